"""Finding MindSpore Lite, and setting up the public 2.0.0 wheel where there is none.

The wheel is for CPython 3.7. Its C++ library serves any Python through a shim of a hundred lines
that is compiled here: what is needed is Linux on x86_64, pip and a C++ compiler.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from msrl_accel.errors import MsrlError

PACKAGE = "mindspore_lite"
WHEEL_VERSION = "2.0.0"
WHEEL_SHA256 = "199cd0605cc985b88eddb273db9dfe9000a585ba10ca2292b6b36ebfff07b3ec"
SHIM_SOURCE = Path(__file__).with_name("lite_shim.cc")
SETUP_COMMAND = "python -m msrl_accel.runtime.lite setup"

# Of the wheel's half gigabyte, what inference on CPU loads; the shim calls the first two.
LIBRARIES = (
    "libmindspore-extendrt_python.so",
    "libmindspore_converter.so",
    "libmslite_converter_plugin.so",
    "libruntime_convert_plugin_python.so",
    "libmsplugin-ge-litert_python.so",
    "libmindspore_core.so",
    "libmindspore_glog.so.0",
    "libdnnl.so.2",
    "libopencv_core.so.4.5",
    "libopencv_imgcodecs.so.4.5",
    "libopencv_imgproc.so.4.5",
)


class LiteError(MsrlError):
    """MindSpore Lite is missing, cannot be set up, or failed; the message carries its own words."""


def home() -> Path:
    """Folder of the set-up: $XDG_CACHE_HOME/msrl_accel/lite-2.0.0, by default below ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "msrl_accel" / f"lite-{WHEEL_VERSION}"


def shim_path() -> Path:
    """Compiled shim; its name changes with its source, so that an old one is never loaded."""
    digest = hashlib.sha256(SHIM_SOURCE.read_bytes()).hexdigest()[:12]
    return home() / f"lite_shim-{digest}.so"


def package_version() -> str | None:
    """Version of an importable `mindspore_lite`, found without importing it; None without one."""
    if importlib.util.find_spec(PACKAGE) is None:
        return None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("mindspore-lite")
    return "2 (version unknown)"


def available() -> tuple[bool, str]:
    """Whether a policy can run on MindSpore Lite here: and on which, or what adds it."""
    version = package_version()
    if version is not None:
        if version.startswith("2"):
            return True, f"MindSpore Lite {version} (Python package)"
        return False, f"mindspore_lite {version} is installed, version 2 is needed"
    if shim_path().exists():
        return True, f"MindSpore Lite {WHEEL_VERSION} ({home()})"
    return False, f"MindSpore Lite is not installed: {_obstacle() or f'run `{SETUP_COMMAND}`'}"


def installed_version() -> str:
    """Version of the MindSpore Lite that `available` found.

    Raises:
        LiteError: there is none.
    """
    found, message = available()
    if not found:
        raise LiteError(message)
    return package_version() or WHEEL_VERSION


def setup(wheel: Path | None = None) -> Path:
    """Set up the public wheel in the user's cache folder; does nothing where it is there already.

    Args:
        wheel: a copy of the wheel, for machines without network; None lets pip download it.

    Returns:
        The folder, of 300 MB.

    Raises:
        LiteError: no compiler, another platform, no network, or the wheel is not the pinned one.
    """
    obstacle = _obstacle()
    if obstacle:
        raise LiteError(f"MindSpore Lite {WHEEL_VERSION} cannot be set up: {obstacle}")
    target = home()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if not (target / "lib").exists():
            _install(wheel, target)
        if not shim_path().exists():
            _compile_shim(target, shim_path())
    except OSError as error:
        raise LiteError(f"cannot set up MindSpore Lite in {target}: {error}") from error
    return target


def _install(wheel: Path | None, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        archive = wheel or _download(Path(scratch))
        _check_digest(archive)
        unpacked = Path(scratch) / "unpacked"
        _unpack(archive, unpacked)
        try:
            os.rename(unpacked, target)
        except OSError:
            if not (target / "lib").exists():  # else another process was faster
                raise


def _obstacle() -> str | None:
    """Why the public wheel cannot serve this machine."""
    vendor = "install the vendor's mindspore_lite wheel of your platform (mindspore.cn/lite)"
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"the public wheel is for Linux on x86_64, this is {platform.platform()}; {vendor}"
    if _compiler() is None:
        return f"no C++ compiler found; install g++ and run `{SETUP_COMMAND}`, or {vendor}"
    return None


def _compiler() -> str | None:
    names = (os.environ.get("CXX"), "g++", "c++", "clang++")
    return next((path for path in (shutil.which(n) for n in names if n) if path), None)


def _download(folder: Path) -> Path:
    requirement = folder / "requirements.txt"
    requirement.write_text(f"mindspore-lite=={WHEEL_VERSION} --hash=sha256:{WHEEL_SHA256}\n")
    options = ["--no-deps", "--require-hashes", "--only-binary=:all:", "--dest", str(folder)]
    options += ["--implementation=cp", "--python-version=3.7", "--abi=cp37m"]
    options += ["--platform=manylinux1_x86_64", "--requirement", str(requirement)]
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", *options]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode or not wheels:
        raise LiteError(f"pip could not download mindspore-lite: {result.stderr.strip()}")
    return wheels[0]


def _check_digest(wheel: Path) -> None:
    digest = hashlib.sha256()
    try:
        with open(wheel, "rb") as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                digest.update(block)
    except OSError as error:
        raise LiteError(f"cannot read the wheel {wheel}: {error.strerror}") from error
    if digest.hexdigest() != WHEEL_SHA256:
        raise LiteError(
            f"{wheel} is not the pinned mindspore-lite {WHEEL_VERSION} wheel: "
            f"its SHA-256 is {digest.hexdigest()}, expected {WHEEL_SHA256}"
        )


def _unpack(wheel: Path, folder: Path) -> None:
    """Put the needed libraries in `lib` and the headers in `include`."""
    wanted = {f"{PACKAGE}/lib/{name}" for name in LIBRARIES}
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.namelist():
            if entry in wanted or entry.startswith(f"{PACKAGE}/include/"):
                archive.extract(entry, folder)
    for part in ("lib", "include"):
        os.rename(folder / PACKAGE / part, folder / part)
    (folder / PACKAGE).rmdir()


def _compile_shim(root: Path, target: Path) -> None:
    temporary = target.with_suffix(f".{os.getpid()}.tmp")
    flags = ["-O2", "-std=c++17", "-shared", "-fPIC", "-D_GLIBCXX_USE_CXX11_ABI=0"]
    flags += [f"-I{root}", f"-I{root / 'include'}", f"-L{root / 'lib'}"]
    linking = [f"-l:{name}" for name in LIBRARIES[:2]]
    linking += ["-Wl,--allow-shlib-undefined", "-Wl,--disable-new-dtags", "-Wl,-rpath,$ORIGIN/lib"]
    command = [str(_compiler()), *flags, str(SHIM_SOURCE), "-o", str(temporary), *linking]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise LiteError(f"the C++ compiler failed: {result.stderr.strip()[-2000:]}")
    os.replace(temporary, target)
