"""Memory shared between processes, with no name that a crash could leave behind.

A block is an open file without a name (memfd, or an unlinked file in /dev/shm): the kernel frees it
when the last process that maps it ends, however it ends. Others reach it through its owner's entry
in /proc, so no resource tracker takes part. Every block is labelled `PREFIX`..., which is what
/proc/PID/maps shows of it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from msrl_accel.errors import PipelineError

PREFIX = "msrl_"
ALIGNMENT = 64
"""Bytes of a cache line; arrays start at multiples of it."""
_FOLDER = "/dev/shm"


@dataclass(frozen=True)
class ArraySpec:
    """One array of fixed shape; `dtype` as in ``np.dtype(x).str``."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    @classmethod
    def of(cls, name: str, array: np.ndarray) -> ArraySpec:
        return cls(name, tuple(array.shape), array.dtype.str)


def layout_nbytes(layout: Sequence[ArraySpec]) -> int:
    """Bytes of all arrays, each rounded up to the alignment."""
    return sum(_aligned(spec.nbytes) for spec in layout)


def views(memory: np.ndarray, layout: Sequence[ArraySpec]) -> dict[str, np.ndarray]:
    """Arrays in `layout_nbytes(layout)` bytes of memory, one after the other."""
    arrays: dict[str, np.ndarray] = {}
    offset = 0
    for spec in layout:
        part = memory[offset : offset + spec.nbytes]
        arrays[spec.name] = part.view(spec.dtype).reshape(spec.shape)
        offset += _aligned(spec.nbytes)
    return arrays


def check_arrays(layout: Sequence[ArraySpec], arrays: Mapping[str, np.ndarray]) -> None:
    """Raise `PipelineError` where arrays do not have the layout's names, shapes and dtypes."""
    if len(arrays) != len(layout):
        unknown = sorted(set(arrays) - {spec.name for spec in layout})
        if unknown:
            raise PipelineError(f"array {unknown[0]!r} is not in the shared layout")
    for spec in layout:
        if spec.name not in arrays:
            raise PipelineError(f"array {spec.name!r} of the shared layout is missing")
        given = ArraySpec.of(spec.name, arrays[spec.name])
        if given != spec:
            raise PipelineError(
                f"array {spec.name!r} has shape {given.shape} and dtype {given.dtype}, "
                f"the shared layout has {spec.shape} and {spec.dtype}"
            )


@dataclass(frozen=True)
class BlockHandle:
    """What another process on this host needs to attach; picklable, fields JSON-able."""

    path: str
    nbytes: int
    token: int


class SharedBlock:
    """Zeroed bytes that several processes map. `memory` is uint8 [nbytes], cache-line aligned.

    Args:
        descriptor: open file of the block; the object takes it over.
        handle: of the block.
        owner: whether this process made it.
    """

    def __init__(self, descriptor: int, handle: BlockHandle, owner: bool) -> None:
        self.handle = handle
        self.owner = owner
        self._descriptor: int | None = descriptor if owner else None
        try:
            mapping = mmap.mmap(descriptor, ALIGNMENT + handle.nbytes)
        finally:
            if not owner:
                os.close(descriptor)  # the mapping keeps the memory
        self._map: mmap.mmap | None = mapping
        whole = np.frombuffer(mapping, np.uint8)
        self._token = whole[:8].view(np.int64)
        self.memory: np.ndarray = whole[ALIGNMENT:]

    @classmethod
    def create(cls, label: str, nbytes: int) -> SharedBlock:
        """A new block, owned by this process; readers can attach until it is closed.

        Raises:
            PipelineError: there is not as much memory.
        """
        descriptor = _anonymous_file(PREFIX + label)
        try:
            # Reserved now: memory that is missing later would end the process by SIGBUS.
            os.posix_fallocate(descriptor, 0, ALIGNMENT + nbytes)
        except OSError as error:
            os.close(descriptor)
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise PipelineError(
                f"cannot reserve {nbytes / 2**20:.1f} MB of shared memory for {label} "
                f"({error.strerror}); use fewer or smaller slots, or give the container more "
                "(docker run --shm-size)"
            ) from error
        token = secrets.randbits(62)
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        block = cls(descriptor, BlockHandle(path, nbytes, token), owner=True)
        block._token[0] = token
        return block

    @classmethod
    def attach(cls, handle: BlockHandle) -> SharedBlock:
        """The block of another process (or this one).

        Raises:
            PipelineError: its owner has closed it or ended.
        """
        gone = PipelineError(
            f"shared memory {handle.path} is gone: the process that made it has closed it or ended"
        )
        try:
            block = cls(os.open(handle.path, os.O_RDWR), handle, owner=False)
        except (OSError, ValueError) as error:  # ValueError: a file that is too short
            raise gone from error
        if block._token[0] != handle.token:  # its number now belongs to another file
            block.close()
            raise gone
        return block

    def drop(self, start: int, stop: int) -> None:
        """Give the system back the whole pages in `memory[start:stop]`; they read as zeros."""
        begin = -(-(ALIGNMENT + start) // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (ALIGNMENT + stop) // mmap.PAGESIZE * mmap.PAGESIZE
        if self._map is not None and begin < end and hasattr(mmap, "MADV_REMOVE"):
            self._map.madvise(mmap.MADV_REMOVE, begin, end - begin)

    def close(self) -> None:
        """Unmap; arrays that still view the memory keep it mapped until they go."""
        self.memory = self._token = np.empty(0, np.uint8)
        mapping, self._map = self._map, None
        if mapping is not None:
            with contextlib.suppress(BufferError):  # such arrays are left
                mapping.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _anonymous_file(name: str) -> int:
    """Descriptor of an empty file in memory that has no path."""
    if hasattr(os, "memfd_create"):  # not limited by the size of /dev/shm
        return os.memfd_create(name)
    path = f"{_FOLDER}/{name}_{os.getpid()}_{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)
    return descriptor


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
