"""Writing safetensors files array by array, so that no copy of the whole is in memory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

DTYPES = {
    "bool": "BOOL",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}
"""What the format calls the types of numbers."""


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> tuple[int, str]:
    """Write a new file and wait until it is on the disk; its size in bytes and its SHA-256.

    Args:
        arrays: of any shape and memory order, with dtypes of `DTYPES`.

    Raises:
        OSError: the file cannot be written.
    """
    digest, size = hashlib.sha256(), 0
    with open(path, "xb") as file:
        for piece in _pieces(arrays):
            file.write(piece)
            digest.update(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def _pieces(arrays: Mapping[str, np.ndarray]) -> Iterator[bytes | memoryview]:
    """The length of the header, the header, then the bytes of each array."""
    # Large numbers first: each array then begins at a multiple of the size of its numbers.
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    header, end = {}, 0
    for name in names:
        array = arrays[name]
        start, end = end, end + array.nbytes
        header[name] = {
            "dtype": DTYPES[array.dtype.name],
            "shape": array.shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(header).encode("utf-8")
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        dtype = arrays[name].dtype.newbyteorder("<")
        yield np.ascontiguousarray(arrays[name], dtype).reshape(-1).view(np.uint8).data
