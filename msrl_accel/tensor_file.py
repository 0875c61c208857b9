"""Writing safetensors files array by array, so that no copy of the whole is in memory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

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


class Stored(NamedTuple):
    """One tensor of a file."""

    dtype: str
    """As the format calls it."""
    shape: tuple[int, ...]
    size: int
    """Bytes."""
    content: Callable[[], bytes | memoryview]
    """Makes them, little-endian; called when they are written."""


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> tuple[int, str]:
    """Write a new file and wait until it is on the disk; its size in bytes and its SHA-256.

    Args:
        arrays: of any shape and memory order, with dtypes of `DTYPES`.

    Raises:
        OSError: the file cannot be written.
    """
    # Large numbers first: each array then begins at a multiple of the size of its numbers.
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    return write_tensors(path, {name: _stored(arrays[name]) for name in names})


def write_tensors(
    path: Path, tensors: Mapping[str, Stored], metadata: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """As `write_arrays`, of tensors that are made one after the other, in this order."""
    digest, size = hashlib.sha256(), 0
    with open(path, "xb") as file:
        pieces = (tensor.content() for tensor in tensors.values())
        for content in chain([_header(tensors, metadata)], pieces):
            file.write(content)
            digest.update(content)
            size += len(content)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def _header(tensors: Mapping[str, Stored], metadata: Mapping[str, str] | None) -> bytes:
    """Its length, and what the tensors are."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.size
        header[name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(header).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _stored(array: np.ndarray) -> Stored:
    def content() -> memoryview:
        ordered = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        return ordered.reshape(-1).view(np.uint8).data

    return Stored(DTYPES[array.dtype.name], array.shape, array.nbytes, content)
