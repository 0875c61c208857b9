"""What compiling a training configuration's graphs gave, kept on disk for the next processes.

MindSpore stores a compiled graph under the number of compilations before it, and reads back
whatever has that number, unchecked. So at most one graph a process is stored or read here, alone in
a folder whose name is a digest of all that shapes it: source code, versions, configuration,
tensors. The seed and what `_NEUTRAL` lists do not: graphs take weights and schedules as arguments.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import msrl_accel
from msrl_accel.config import TrainConfig
from msrl_accel.files import write_bytes_atomic
from msrl_accel.spaces import PolicySpec

KEPT = 32
"""Configurations whose graphs are kept, those used last."""

_NEUTRAL = ("seed", "run_dir", "quiet", "evaluation", "checkpoint", "logging")
_PACKAGES = ("mindspore", "numpy", "onnx")
_CONTEXT = ("mode", "deterministic", "enable_graph_kernel", "jit_config", "jit_syntax_level")
_GRAPH = "rank_0/graph_cache/compile_cache_0.mindir"
_taken = False
"""Whether this process has compiled its one graph."""


class GraphCache:
    """Compiled forms of one training configuration.

    Args:
        config: resolved; with `runtime.compile_cache` off, on a device other than the CPU, or where
            the user has set up MindSpore's own cache or put other functions in the place of this
            package's, nothing is stored or read.
        spec: the environment's tensors.
    """

    def __init__(self, config: TrainConfig, spec: PolicySpec) -> None:
        runtime = config.runtime
        wanted = runtime.compile_cache and "MS_COMPILER_CACHE_ENABLE" not in os.environ
        self.folder: Path | None = None
        if wanted and runtime.device == "CPU" and _ours(config.algo) and not _patched():
            self.folder = home() / _digest(config, spec)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """The graph that is compiled in the block is read from the cache, or put there.

        To be entered with one and the same graph of a configuration: the second block that a
        process enters, and every later one, does nothing.
        """
        global _taken
        if self.folder is None or _taken:
            yield
            return
        _taken = True
        stored = _intact(self.folder, "update", _GRAPH)
        with contextlib.ExitStack() as stack:
            try:
                path = stored or self._staging(stack)
            except OSError:  # no cache then
                path = None
            if path is not None:
                stack.enter_context(_environment(path))
            try:
                yield
            except BaseException:
                if stored is not None:
                    shutil.rmtree(stored, ignore_errors=True)
                raise
            if path is not None and stored is None and (path / _GRAPH).is_file():
                with contextlib.suppress(OSError):  # another process was faster
                    os.rename(path, self.folder / f"update.{_file_digest(path / _GRAPH)}")

    def file(self, name: str, make: Callable[[], bytes]) -> bytes:
        """A file of the cache, made where it is not there."""
        if self.folder is None:
            return make()
        with contextlib.suppress(OSError):
            stored = _intact(self.folder, name)
            if stored is not None:
                return stored.read_bytes()
        data = make()
        with contextlib.suppress(OSError):  # no cache then
            self.folder.mkdir(parents=True, exist_ok=True)
            write_bytes_atomic(self.folder / f"{name}.{_short(hashlib.sha256(data))}", data)
            _forget_oldest()
        return data

    def _staging(self, stack: contextlib.ExitStack) -> Path:
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        _forget_oldest()
        return Path(stack.enter_context(tempfile.TemporaryDirectory(dir=self.folder, prefix=".")))


def home() -> Path:
    """Folder of the cache: $XDG_CACHE_HOME/msrl_accel/graphs, by default below ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "msrl_accel" / "graphs"


def _ours(algo: str) -> bool:
    """Whether the digest covers the source code of an algorithm."""
    from msrl_accel.algorithms import algorithm_class

    return algorithm_class(algo).__module__.startswith("msrl_accel.")


def _patched() -> bool:
    """Whether a function in this package is from elsewhere, so that its files do not tell all."""
    known = [*_folders(), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")]
    known += [sysconfig.get_path("platlib"), "<"]  # <string>: dataclasses write methods
    for name, module in list(sys.modules.items()):
        if module is None or not name.startswith("msrl_accel"):
            continue
        values = list(vars(module).values())
        for cls in [v for v in values if isinstance(v, type) and v.__module__ == name]:
            values += vars(cls).values()
        for value in values:
            function = getattr(value, "__func__", value)  # of a class method
            code = getattr(inspect.unwrap(function), "__code__", None)
            if code is not None and not code.co_filename.startswith(tuple(known)):
                return True
    return False


def _folders() -> list[str]:
    """Of this package."""
    from msrl_accel import algorithms, configs, envs

    packages = (algorithms, configs, envs)
    return [*msrl_accel.__path__, *(path for p in packages for path in p.__path__)]


def _digest(config: TrainConfig, spec: PolicySpec) -> str:
    """Of everything that shapes the graphs."""
    import mindspore

    values = {key: value for key, value in config.to_dict().items() if key not in _NEUTRAL}
    described = {
        "config": values,
        "spec": spec.to_dict(),
        "python": sys.version,
        "machine": platform.machine(),
        "versions": _versions(),
        "context": [repr(mindspore.get_context(name)) for name in _CONTEXT],
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("MS_")},
    }
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=repr).encode())
    digest.update(_source_digest())
    return _short(digest)


def _versions() -> Mapping[str, Any]:
    versions: dict[str, Any] = {}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    library = sys.modules.get("mindspore._c_expression")
    if library is not None and library.__file__:  # builds of one version differ
        status = os.stat(library.__file__)
        versions["build"] = (status.st_size, status.st_mtime_ns)
    return versions


@functools.cache
def _source_digest() -> bytes:
    """Of this package's Python files."""
    digest = hashlib.sha256()
    for file in sorted({file for folder in _folders() for file in Path(folder).rglob("*.py")}):
        digest.update(f"{file}\n".encode())
        digest.update(file.read_bytes())
    return digest.digest()


def _intact(folder: Path, name: str, content: str = "") -> Path | None:
    """The entry of that name whose content has the digest its own name ends with."""
    for entry in folder.glob(f"{name}.*"):
        with contextlib.suppress(OSError):
            if entry.suffix[1:] == _file_digest(entry / content if content else entry):
                os.utime(folder)
                return entry
            if content:
                shutil.rmtree(entry)
            else:
                entry.unlink()
    return None


def _forget_oldest() -> None:
    folders = sorted(home().iterdir(), key=lambda folder: folder.stat().st_mtime)
    for folder in folders[:-KEPT]:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _environment(path: Path) -> Iterator[None]:
    """MindSpore reads these at every compilation, and the path once a process."""
    values = {
        "MS_COMPILER_CACHE_ENABLE": "1",
        "MS_COMPILER_CACHE_PATH": str(path),
        # Its own check would compare the script that was started, and nothing else.
        "MS_DEV_FORCE_USE_COMPILE_CACHE": "1",
    }
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)


def _file_digest(file: Path) -> str:
    return _short(hashlib.sha256(file.read_bytes()))


def _short(digest: Any) -> str:
    return str(digest.hexdigest()[:32])
