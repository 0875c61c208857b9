"""Publishing weights: versions in shared memory for the processes that act, and who is due when."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from msrl_accel.errors import PipelineError
from msrl_accel.shared_memory import (
    ArraySpec,
    BlockHandle,
    SharedBlock,
    check_arrays,
    layout_nbytes,
    views,
)

Arrays = Mapping[str, np.ndarray]
Source = Callable[[], Optional[Arrays]]
"""Gives a model's present arrays, or None while it has none to give."""

# The header: int64 words, one cache line for what is newest and one for each of the two buffers.
_LINE = 8
_NEWEST, _NEWEST_VERSION = 0, 1
_BEGUN, _VERSION, _CHECKSUM = 0, 1, 2
_HEADER_WORDS = 3 * _LINE
_READ_SECONDS = 10.0
_WORD = 1 << 64


@dataclass(frozen=True)
class StoreHandle:
    """What a process needs to read a `WeightStore`; picklable, fields JSON-able."""

    block: BlockHandle
    layout: tuple[ArraySpec, ...]


class WeightStore:
    """Versions of one set of arrays in shared memory: one writer, any number of readers.

    Publications are numbered 1, 2, ...; number n goes to buffer n % 2 while readers use the other
    one. The writer never waits. A reader sees a whole publication, the newest or the one before,
    and reads anew where the writer came by.

    How a mixture is told, for publication n in its buffer:

    - The writer sets `begun` to n before it writes anything, and `newest` to n after everything. A
      reader that finds `newest` n copies the buffer and then looks at `begun` again: another number
      means that the writer has come round. This needs stores and loads to be seen in program order,
      as on x86 (but for the streaming stores of large copies).
    - The copy must have the checksum that the writer stored: the sum of its 64-bit words, mixed
      with n and the version. This needs no order of stores at all, only that aligned words are
      read and written whole, as on x86 and ARM; a mixture passes with probability 2^-64.

    Made by `create` in the process that publishes and by `attach` in those that read.
    """

    def __init__(self, block: SharedBlock, layout: tuple[ArraySpec, ...]) -> None:
        self.handle = StoreHandle(block.handle, layout)
        self.layout = layout
        self.nbytes = layout_nbytes(layout)
        self.retries = 0
        """Reads that met the writer and were done again."""
        self._block: SharedBlock | None = block
        header = block.memory[: 8 * _HEADER_WORDS].view(np.int64).reshape(3, _LINE)
        self._newest = header[0]
        self._records = header[1:]
        payload = block.memory[8 * _HEADER_WORDS :]
        self._buffers = [payload[: self.nbytes], payload[self.nbytes :]]
        self._arrays = [views(buffer, layout) for buffer in self._buffers]

    @classmethod
    def create(cls, arrays: Arrays, label: str = "weights") -> WeightStore:
        """An empty store for arrays of these names, shapes and dtypes.

        Raises:
            PipelineError: there is not as much shared memory.
        """
        layout = tuple(ArraySpec.of(name, array) for name, array in arrays.items())
        nbytes = 8 * _HEADER_WORDS + 2 * layout_nbytes(layout)
        return cls(SharedBlock.create(label, nbytes), layout)

    @classmethod
    def attach(cls, handle: StoreHandle) -> WeightStore:
        """A reader of another process's store.

        Raises:
            PipelineError: its owner has closed it or ended.
        """
        return cls(SharedBlock.attach(handle.block), handle.layout)

    def publish(self, version: int, arrays: Arrays) -> None:
        """Copy arrays in and make them the newest.

        Args:
            version: greater than any before.

        Raises:
            PipelineError: this process is not the owner, the version is not new, or the arrays do
                not have the layout.
        """
        if not self._open().owner:
            raise PipelineError("weights can be published only by the process that made the store")
        newest = int(self._newest[_NEWEST])
        if version < 0 or (newest and version <= self.latest_version()):
            raise PipelineError(
                f"version {version} is not newer than the published {self.latest_version()}"
            )
        check_arrays(self.layout, arrays)
        publication = newest + 1
        which = publication % 2
        record, buffer = self._records[which], self._buffers[which]
        record[_BEGUN] = publication
        for name, target in self._arrays[which].items():
            np.copyto(target, arrays[name])
        record[_VERSION] = version
        record[_CHECKSUM] = _checksum(buffer, publication, version)
        self._newest[_NEWEST] = publication
        self._newest[_NEWEST_VERSION] = version

    def latest_version(self) -> int:
        """Version published last, -1 before the first; costs less than a microsecond."""
        self._open()
        return int(self._newest[_NEWEST_VERSION]) if self._newest[_NEWEST] else -1

    def read(
        self, newer_than: int | None = None, min_lag: int = 1
    ) -> tuple[int, dict[str, np.ndarray]] | None:
        """Copies of the newest whole version, or None where there is none that is asked for.

        Args:
            newer_than: version the reader has; None takes any.
            min_lag: versions it must be behind at least. A reader passes 1 where it would change
                weights anyway, and more where that disturbs it, so as to pull only when it is too
                far behind.

        Raises:
            PipelineError: the writer came by at every attempt for 10 s.
        """
        self._open()
        deadline = time.monotonic() + _READ_SECONDS
        while True:
            publication = int(self._newest[_NEWEST])
            which = publication % 2
            record = self._records[which]
            version = int(record[_VERSION])
            if not publication or (newer_than is not None and version < newer_than + min_lag):
                return None
            copy = self._buffers[which].copy()
            checksum = int(record[_CHECKSUM])
            if record[_BEGUN] == publication and checksum == _checksum(copy, publication, version):
                return version, views(copy, self.layout)
            self.retries += 1
            if time.monotonic() > deadline:
                raise PipelineError(
                    f"publish: no whole version could be read within {_READ_SECONDS:g} s; "
                    "weights are published faster than they can be copied, publish less often"
                )

    def close(self) -> None:
        """Let go of the memory; it is freed when no process uses it any more."""
        if self._block is not None:
            block, self._block = self._block, None
            self._newest = self._records = np.empty(0, np.int64)
            self._buffers, self._arrays = [], []
            block.close()

    def _open(self) -> SharedBlock:
        if self._block is None:
            raise PipelineError("the weight store has been closed")
        return self._block


def _checksum(buffer: np.ndarray, publication: int, version: int) -> int:
    """Sum of 64-bit words modulo 2^64, mixed with odd multiples of both numbers; as int64."""
    words = int(np.add.reduce(buffer.view(np.uint64)))
    mixed = (words + 0x9E3779B97F4A7C15 * publication + 0xC2B2AE3D27D4EB4F * version) % _WORD
    return mixed - _WORD if mixed >= _WORD // 2 else mixed


REFRESH_INTERVALS = {"actor": 500, "critic": 1000, "reward": 2000, "reference": 2000}
"""Training steps between publications, by name of the model."""


@dataclass
class Model:
    """One published model."""

    name: str
    refresh_interval: int
    """Training steps between publications."""
    store: WeightStore
    source: Source
    version: int = -1
    """Of the last publication; -1 before the first."""
    last_publish_step: int = -1
    last_publish_time: float | None = None
    """Seconds since the epoch."""

    def due(self, step: int) -> bool:
        published = self.store.latest_version() >= 0
        return not published or step - self.last_publish_step >= self.refresh_interval


class ModelRegistry:
    """Models that are published each at its own pace, with no barrier between them.

    The training loop calls `scan` after every update; that is the whole event loop.
    """

    def __init__(self) -> None:
        self.models: dict[str, Model] = {}

    def register(
        self, name: str, layout: Arrays, source: Source, refresh_interval: int | None = None
    ) -> Model:
        """Add a model; it is due at once.

        Args:
            layout: arrays of the names, shapes and dtypes that `source` will give.
            source: called when the model is due. While it gives None the model stays due, and
                holds up no other.
            refresh_interval: default by name as in `REFRESH_INTERVALS`.

        Raises:
            PipelineError: the name is taken, or has no default interval and none is given.
        """
        if name in self.models:
            raise PipelineError(f"model {name!r} is already registered")
        interval = REFRESH_INTERVALS.get(name) if refresh_interval is None else refresh_interval
        if interval is None or interval < 1:
            raise PipelineError(
                f"model {name!r}: refresh_interval = {interval} is not a number of training steps; "
                "give one of at least 1"
            )
        model = Model(name, interval, WeightStore.create(layout, name), source)
        self.models[name] = model
        return model

    def due(self, step: int) -> list[str]:
        """Names of the models to publish at a training step."""
        return [name for name, model in self.models.items() if model.due(step)]

    def publish(self, name: str, step: int) -> bool:
        """Publish a model now, due or not; returns whether its source had arrays to give."""
        model = self.models[name]
        arrays = model.source()
        if arrays is None:
            return False
        model.store.publish(model.version + 1, arrays)
        model.version += 1
        model.last_publish_step = step
        model.last_publish_time = time.time()
        return True

    def scan(self, step: int) -> list[str]:
        """Publish every model that is due and ready; returns their names."""
        return [name for name in self.due(step) if self.publish(name, step)]

    def handles(self) -> dict[str, StoreHandle]:
        """What other processes read the models by."""
        return {name: model.store.handle for name, model in self.models.items()}

    def state(self) -> dict[str, Any]:
        """Versions and steps of the last publications, for a checkpoint."""
        return {
            name: {"version": model.version, "step": model.last_publish_step}
            for name, model in self.models.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue counting versions where `state` was taken; every model is due at once."""
        for name, saved in state.items():
            self.models[name].version = int(saved["version"])
            self.models[name].last_publish_step = int(saved["step"])

    def close(self) -> None:
        for model in self.models.values():
            model.store.close()
