"""MindSpore Lite itself: the vendor's Python package, or its C++ library through the shim.

An engine belongs to one model, takes any batch size, and copies both what it is given and what it
returns. Nothing here imports MindSpore, with which Lite cannot share a process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from msrl_accel.runtime import lite_setup
from msrl_accel.runtime.lite_setup import LiteError

TensorType = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape without the batch dimension, and dtype."""

# mindspore::DataType of the engine's C++ interface
_DTYPES = {30: "bool", 34: "int32", 35: "int64", 37: "uint8", 43: "float32"}
_MAX_RANK = 8
_MINDIR, _MS = 0, 4
"""mindspore::ModelType of the two kinds of files."""


class Engine(Protocol):
    """A loaded model."""

    inputs: Sequence[TensorType]

    def load(self, model: bytes) -> None:
        """Replace the model; on LiteError the old one stays."""

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """C-contiguous inputs [B, ...] of the declared types -> outputs, which the caller owns."""

    def close(self) -> None: ...


def is_ms(model: bytes) -> bool:
    """Whether a model is a .ms file, which `convert_to_ms` writes; MindIR otherwise."""
    return model[4:8] == b"MSL2"


def open_engine(model: bytes, threads: int = 1) -> Engine:
    """Load a MindIR or .ms model with the MindSpore Lite that is there.

    Raises:
        LiteError: there is none, or it refuses the model; the message carries its own words.
    """
    lite_setup.installed_version()
    if lite_setup.package_version() is not None:
        return PackageEngine(model, threads)
    return NativeEngine(model, lite_setup.shim_path(), threads)


class NativeEngine:
    """The C++ library, called through ctypes."""

    inputs: Sequence[TensorType]

    def __init__(self, model: bytes, library: Path, threads: int = 1) -> None:
        self._library = load_library(library)
        self._threads = threads
        self._release: Callable[[], object] = lambda: None
        self.load(model)

    def load(self, model: bytes) -> None:
        kind = _MS if is_ms(model) else _MINDIR
        with engine_log() as log:
            handle = self._library.lite_open(model, len(model), kind, self._threads)
        if not handle:
            raise LiteError(f"MindSpore Lite cannot load the model: {engine_message(log)}")
        self._release()
        self._handle = handle
        # An engine that is still open when the library is unloaded crashes the process.
        self._release = weakref.finalize(self, self._library.lite_close, handle)
        self._rows: int | None = None
        self._sources: list[np.ndarray] = []
        self._targets: list[np.ndarray] = []
        self.inputs = [(shape[1:], dtype) for shape, dtype in self._tensors(output=False)]

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        rows = len(inputs[0])
        if self._rows != rows:
            self._resize(rows)
        for array, x in zip(self._sources, inputs):
            array[...] = x
        if self._library.lite_run(self._handle):
            self._fail("compute the outputs", self._library.lite_run)
        if not self._targets:  # their shapes are known from here on
            self._targets = self._bind(True, self._tensors(output=True))
            self._library.lite_read(self._handle)
        return [array.copy() for array in self._targets]

    def close(self) -> None:
        self._release()

    def _resize(self, rows: int) -> None:
        self._rows, self._targets = None, []
        shapes = [(rows, *shape) for shape, _ in self.inputs]
        flat = [d for shape in shapes for d in shape]
        dims = (ctypes.c_int64 * len(flat))(*flat)
        ranks = (ctypes.c_int * len(shapes))(*map(len, shapes))
        if self._library.lite_resize(self._handle, dims, ranks):
            self._fail(f"take a batch of {rows}", self._library.lite_resize, dims, ranks)
        types = [(shape, dtype) for shape, (_, dtype) in zip(shapes, self.inputs)]
        self._sources = self._bind(False, types)
        self._rows = rows

    def _bind(self, output: bool, types: Sequence[TensorType]) -> list[np.ndarray]:
        """Arrays that keep their place: every run takes its inputs, or puts its outputs, there."""
        arrays = [np.empty(shape, dtype) for shape, dtype in types]
        n = len(arrays)
        data = (ctypes.c_void_p * n)(*(a.ctypes.data for a in arrays))
        sizes = (ctypes.c_size_t * n)(*(a.nbytes for a in arrays))
        self._library.lite_bind(self._handle, output, n, data, sizes)
        return arrays

    def _fail(self, what: str, function: Any, *arguments: Any) -> None:
        """Repeat a call that failed, to hear why."""
        self._rows = None
        with engine_log() as log:
            status = function(self._handle, *arguments)
        raise LiteError(f"MindSpore Lite cannot {what} ({status}): {engine_message(log)}")

    def _tensors(self, output: bool) -> list[TensorType]:
        types = []
        for i in range(self._library.lite_count(self._handle, output)):
            dims, rank = (ctypes.c_int64 * _MAX_RANK)(), ctypes.c_int()
            code = self._library.lite_describe(
                self._handle, output, i, dims, _MAX_RANK, ctypes.byref(rank)
            )
            if code not in _DTYPES or rank.value > _MAX_RANK:
                raise LiteError(f"tensor {i} of the model has an unsupported type ({code})")
            types.append((tuple(dims[: rank.value]), np.dtype(_DTYPES[code])))
        return types


class PackageEngine:
    """An importable `mindspore_lite` of version 2."""

    inputs: Sequence[TensorType]

    def __init__(self, model: bytes, threads: int = 1) -> None:
        self._threads = threads
        self.load(model)

    def load(self, model: bytes) -> None:
        import mindspore_lite  # type: ignore[import-not-found]

        context = mindspore_lite.Context()
        context.target = ["cpu"]
        context.cpu.thread_num = self._threads
        loaded = mindspore_lite.Model()
        failure = None
        types = mindspore_lite.ModelType
        kind, suffix = (types.MINDIR_LITE, ".ms") if is_ms(model) else (types.MINDIR, ".mindir")
        with tempfile.NamedTemporaryFile(suffix=suffix) as file, engine_log() as log:
            file.write(model)
            file.flush()
            try:
                loaded.build_from_file(file.name, kind, context)
            except RuntimeError as error:
                failure = error
        if failure is not None:
            reason = f"{failure}; {engine_message(log)}"
            raise LiteError(f"MindSpore Lite cannot load the model: {reason}") from failure
        self._model = loaded
        self.inputs = [
            (tuple(t.shape[1:]), np.dtype(t.dtype.name.lower())) for t in loaded.get_inputs()
        ]

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        try:
            tensors = self._model.get_inputs()
            if [list(t.shape) for t in tensors] != [list(x.shape) for x in inputs]:
                self._model.resize(tensors, [list(x.shape) for x in inputs])
                tensors = self._model.get_inputs()
            for tensor, x in zip(tensors, inputs):
                tensor.set_data_from_numpy(x)
            # The arrays are views of memory that the next call overwrites.
            return [t.get_data_to_numpy().copy() for t in self._model.predict(tensors)]
        except RuntimeError as error:
            raise LiteError(f"MindSpore Lite failed: {error}") from error

    def close(self) -> None:
        self._model = None


@contextlib.contextmanager
def engine_log() -> Iterator[list[str]]:
    """Collect what the engine writes to the standard error stream; complete after the block."""
    lines: list[str] = []
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            lines += file.read().decode("utf-8", "replace").splitlines()


def engine_message(log: Sequence[str]) -> str:
    """The engine's error messages without time stamps and addresses, the first few of them."""
    pattern = re.compile(r"^\[(?:ERROR|CRITICAL)\] .*? \[[^\]]*\] (?:\w+\] )?(.*)$")
    matches = [match for match in (pattern.match(line) for line in log) if match]
    messages = list(dict.fromkeys(match.group(1).strip() for match in matches))
    return "; ".join(messages[:4]) or "it gave no reason"


def load_library(path: Path) -> Any:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise LiteError(f"MindSpore Lite cannot be loaded: {error}") from error
    handle, number = ctypes.c_void_p, ctypes.c_int
    signatures = {
        "lite_open": (handle, [ctypes.c_char_p, ctypes.c_size_t, number, number]),
        "lite_close": (None, [handle]),
        "lite_resize": (ctypes.c_int64, [handle, handle, handle]),
        "lite_bind": (None, [handle, number, number, handle, handle]),
        "lite_run": (ctypes.c_int64, [handle]),
        "lite_read": (ctypes.c_int64, [handle]),
        "lite_count": (number, [handle, number]),
        "lite_describe": (number, [handle, number, number, handle, number, handle]),
        "lite_convert": (ctypes.c_int64, [ctypes.c_char_p, ctypes.c_char_p]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
