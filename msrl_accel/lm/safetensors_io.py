"""Safetensors files: float32 in memory; float32, float16 or bfloat16 on disk.

The NumPy interface of the `safetensors` package has no bfloat16. The format is short: the length
of a JSON header (8 bytes, little-endian), the header, and the tensors back to back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from msrl_accel.errors import LMError
from msrl_accel.tensor_file import Stored, write_tensors

# What a tensor is stored as, by the names of the header and by those of `save_model`.
_STORED = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
DTYPES = tuple(_NAMES)
ITEM_BYTES = {name: np.dtype(_STORED[_NAMES[name]]).itemsize for name in DTYPES}
# The limit of the safetensors package.
_MAX_HEADER = 100_000_000


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of the file, by name, as float32.

    Raises:
        LMError: the file is missing, truncated, damaged, or holds numbers of another kind
            (integers, 8-bit floats).
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            header, start = _read_header(file.read(8), file, size, path)
        content = np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        raise LMError(f"{path} cannot be read: {error.strerror or error}") from error
    return {
        name: _read_tensor(name, entry, content[start:], path)
        for name, entry in header.items()
        if name != "__metadata__"
    }


def write_safetensors(path: Path, arrays: Mapping[str, np.ndarray], dtype: str) -> None:
    """Write a new file and wait until it is on the disk.

    Raises:
        LMError: a number is beyond what float16 can hold.
        OSError: the file cannot be written.
    """
    tensors = {
        name: Stored(
            _NAMES[dtype],
            array.shape,
            array.size * ITEM_BYTES[dtype],
            partial(_stored_bytes, name, array, dtype),
        )
        for name, array in arrays.items()
    }
    write_tensors(path, tensors, {"format": "pt"})


def bfloat16_to_float32(bits: np.ndarray) -> np.ndarray:
    """Float32 values of bfloat16 bit patterns (uint16); exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Bfloat16 bit patterns (uint16) of float32 values, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    # Rounding would carry some NaNs into infinity or zero.
    quiet = (bits >> 16) | 0x40
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def _read_header(prefix: bytes, file: Any, size: int, path: Path) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER):
        raise LMError(f"{path} is no safetensors file, or was cut off: {_FETCH}")
    try:
        header = json.loads(file.read(length))
    except (ValueError, RecursionError) as error:
        raise LMError(f"{path} has a damaged header ({error}): {_FETCH}") from error
    if not isinstance(header, dict):
        raise LMError(f"{path} has a damaged header: {_FETCH}")
    return header, 8 + length


def _read_tensor(name: str, entry: Any, content: np.ndarray, path: Path) -> np.ndarray:
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        well_formed = isinstance(dtype, str) and all(
            type(n) is int and n >= 0 for n in (*shape, begin, end)
        )
    except (TypeError, KeyError, ValueError):
        well_formed = False
    if not well_formed:
        raise LMError(f"{path} describes {name} wrongly: {_FETCH}")
    if dtype not in _STORED:
        raise LMError(
            f"{path} stores {name} as {dtype!r}, which is not supported; supported: "
            f"{', '.join(_STORED)}"
        )
    stored = np.dtype(_STORED[dtype])
    if end > len(content):
        raise LMError(f"{path} was cut off: {name} ends after the end of the file; {_FETCH}")
    if end - begin != math.prod(shape) * stored.itemsize:
        raise LMError(f"{path} holds {end - begin} bytes of {name}, which do not fit {shape}")
    # A copy: the bytes may be unaligned, and the file may be replaced while the array lives.
    raw = np.frombuffer(content[begin:end].tobytes(), stored).reshape(shape)
    if dtype == "BF16":
        return bfloat16_to_float32(raw)
    return raw.astype(np.float32)


def _stored_bytes(name: str, array: np.ndarray, dtype: str) -> bytes:
    if dtype == "bfloat16":
        return float32_to_bfloat16(array).astype("<u2").tobytes()
    with np.errstate(over="ignore"):
        stored = array.astype(_STORED[_NAMES[dtype]])
    if dtype == "float16" and not np.isfinite(stored).all() and np.isfinite(array).all():
        raise LMError(f"{name} has values that float16 cannot hold: save as bfloat16 or float32")
    content: bytes = stored.tobytes()
    return content


_FETCH = "fetch it again"
