"""Arrays in memory-mapped files, for a replay larger than memory.

A folder holds one file of raw numbers for each array, and `replay.json`, which says what they are.
The files are allocated when they are created: a disk that is too small is an error then, and not a
bus error of some later write. One process at a time has the folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import mmap
import os
import secrets
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from msrl_accel.errors import CheckpointError, ConfigError
from msrl_accel.files import write_text_atomic
from msrl_accel.replay.memory import format_bytes

DESCRIPTION_FILE = "replay.json"
LOCK_FILE = "replay.lock"
SCHEMA_VERSION = 1
_COUNTER = "touched"


class MappedArrays:
    """Arrays [entries, ...] in files of a folder, created or opened.

    Args:
        folder: created where missing.
        arrays: shape and dtype of each.
        layout: JSON-able description; a folder that holds another one is refused.

    Raises:
        ConfigError: the folder holds another layout, is in use, or the disk is too small.
        CheckpointError: its files are damaged.
    """

    def __init__(
        self,
        folder: Path,
        arrays: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]],
        layout: Mapping[str, Any],
    ) -> None:
        self.folder = folder
        self._layout = dict(layout)
        self._files = {
            **arrays,
            # How far each environment's ring was ever written, also after the last checkpoint.
            _COUNTER: ((int(layout["n_envs"]),), np.dtype(np.int64)),
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock()
        except OSError as error:
            raise ConfigError(
                f"folder = {str(folder)!r}: cannot keep a replay there: {error.strerror or error}"
            ) from error
        self.identity = self._saved_identity()
        if self.identity is None:
            self._create()
        self._claimed = False
        self._maps = {name: self._open(name) for name in self._files}
        opened = {
            name: np.frombuffer(self._maps[name], dtype).reshape(shape)
            for name, (shape, dtype) in self._files.items()
        }
        self._touched = opened.pop(_COUNTER)
        self.arrays: dict[str, np.ndarray] = opened
        if self.identity is None:
            self.claim()

    def touch(self, columns: slice | np.ndarray, positions: np.ndarray) -> None:
        """Record that rings are about to be written up to these counts of positions."""
        if not self._claimed:
            self.claim()
        # Never lowered: a run that went back to a checkpoint has written beyond it before.
        self._touched[columns] = np.maximum(self._touched[columns], positions)

    def adopt(self, identity: str) -> np.ndarray:
        """Continue with the content a checkpoint refers to; the counts that `touch` recorded.

        Raises:
            CheckpointError: another run has used the folder since.
        """
        if identity != self.identity:
            raise CheckpointError(
                f"the replay files in {self.folder} are not those of this checkpoint: give the "
                "folder that the run wrote, or start the run anew"
            )
        self._claimed = True
        touched: np.ndarray = self._touched.copy()
        return touched

    def flush(self) -> None:
        """Wait until everything written is on the disk."""
        for mapped in self._maps.values():
            mapped.flush()

    def close(self) -> None:
        """Give the folder free; the arrays stay readable."""
        self._unlock()

    def _lock(self) -> None:
        descriptor = os.open(self.folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        self._unlock = weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._unlock()
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise ConfigError(
                f"folder = {str(self.folder)!r}: another replay is using it: give each replay a "
                "folder of its own"
            ) from error

    def _saved_identity(self) -> str | None:
        """Which run's content the folder holds; None when it holds none."""
        file = self.folder / DESCRIPTION_FILE
        try:
            description = json.loads(file.read_text("utf-8"))
            version, layout = description["schema_version"], description["layout"]
            identity = str(description["identity"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{file} is damaged: delete the folder ({error})") from error
        if version != SCHEMA_VERSION or layout != self._layout:
            raise ConfigError(
                f"folder = {str(self.folder)!r}: it holds a replay of another shape "
                f"({_difference(layout, self._layout)}): give another folder, or delete this one"
            )
        for name in self._files:
            size = self._path(name).stat().st_size if self._path(name).exists() else 0
            if size != self._size(name):
                raise CheckpointError(
                    f"{self._path(name)} has {size} bytes instead of {self._size(name)}: it is "
                    "damaged, delete the folder"
                )
        return identity

    def _create(self) -> None:
        try:
            for name in self._files:
                with open(self._path(name), "wb") as file:
                    os.posix_fallocate(file.fileno(), 0, self._size(name))
        except OSError as error:
            for name in self._files:
                with contextlib.suppress(OSError):
                    self._path(name).unlink()
            needed = format_bytes(sum(map(self._size, self._files)))
            raise ConfigError(
                f"folder = {str(self.folder)!r}: cannot allocate {needed} for the replay: "
                f"{error.strerror or error}; free disk space, lower capacity, or give another "
                "folder"
            ) from error

    def claim(self) -> None:
        """Start a new content: checkpoints that refer to the one before are refused from now on."""
        self.identity = secrets.token_hex(8)
        description = {
            "schema_version": SCHEMA_VERSION,
            "identity": self.identity,
            "layout": self._layout,
        }
        write_text_atomic(
            self.folder / DESCRIPTION_FILE, json.dumps(description, indent=1, sort_keys=True) + "\n"
        )
        self._touched[:] = 0
        self._claimed = True

    def _open(self, name: str) -> mmap.mmap:
        with open(self._path(name), "r+b") as file:
            mapped = mmap.mmap(file.fileno(), self._size(name))
        # Samples are scattered: reading the neighbours ahead would only push others out.
        mapped.madvise(mmap.MADV_RANDOM)
        return mapped

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.bin"

    def _size(self, name: str) -> int:
        shape, dtype = self._files[name]
        return math.prod(shape) * dtype.itemsize


def _difference(saved: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """The first part of two layouts that differs."""
    for key, value in asked.items():
        if saved.get(key) != value:
            return f"{key}: {saved.get(key)} there, {value} asked for"
    return "written by another version"
