"""The pipeline's worker as a Ray actor; imports Ray nowhere, so it can be tried without."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from msrl_accel.pipeline.heartbeat import NUMBERS, Heartbeat
from msrl_accel.pipeline.shared_queue import QueueClosed, Slot
from msrl_accel.pipeline.worker import Worker, WorkerTask
from msrl_accel.shared_memory import ArraySpec

TAKE_SECONDS = 1.0
"""In which a worker is asked for trajectories, and answers even without: a sign of life."""

Arrays = Mapping[str, np.ndarray]


class Outbox:
    """What a worker fills: slots it was granted, in this process; stands for a queue's producer."""

    def __init__(self, name: str, layout: Sequence[ArraySpec]) -> None:
        self.name = name
        self._layout = layout
        self._granted = 0
        self._ready: deque[dict[str, np.ndarray]] = deque()
        self._condition = threading.Condition()
        self._closed = False
        self._failure = ""

    def grant(self, count: int) -> None:
        with self._condition:
            self._granted += count
            self._condition.notify_all()

    def take(self, timeout: float) -> list[dict[str, np.ndarray]]:
        """The arrays of all filled slots; none where none was filled within `timeout` seconds.

        Raises:
            RuntimeError: the worker failed; with its traceback.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._ready or self._failure, timeout)
            if self._failure:
                raise RuntimeError(self._failure)
            taken = list(self._ready)
            self._ready.clear()
        return taken

    def fail(self, text: str) -> None:
        with self._condition:
            self._failure = text
            self._condition.notify_all()

    def ask(self, count: int = 1) -> None:
        """Slots are granted unasked, as many as the worker has use for."""

    def try_acquire(self, timeout: float) -> Slot | None:
        """As of `Producer`."""
        with self._condition:
            self._condition.wait_for(lambda: self._granted or self._closed, timeout)
            if self._closed:
                raise QueueClosed(f"{self.name}: the learner has ended")
            if not self._granted:
                return None
            self._granted -= 1
        arrays = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in self._layout}
        return Slot(0, arrays, self.name)

    def commit(self, slot: Slot) -> None:
        with self._condition:
            self._ready.append(slot.arrays)
            self._condition.notify_all()

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()


class NewestWeights:
    """The newest weights that came; stands for a `WeightStore`."""

    def __init__(self) -> None:
        self._newest: tuple[int, Arrays] = (-1, {})

    def put(self, version: int, arrays: Arrays) -> None:
        if version > self._newest[0]:
            self._newest = version, arrays

    def read(self, newer_than: int) -> tuple[int, Arrays] | None:
        newest = self._newest
        return newest if newest[0] > newer_than else None


class _ActorWorker(Worker):
    def __init__(self, task: WorkerTask, outbox: Outbox, weights: NewestWeights) -> None:
        self._parts: tuple[Any, Any] = outbox, weights
        super().__init__(task)

    def _open_heartbeat(self) -> Heartbeat:
        return Heartbeat(np.zeros(NUMBERS))

    def _open_queue(self) -> Any:
        return self._parts[0]

    def _open_store(self) -> Any:
        return self._parts[1]


class WorkerActor:
    """A worker in a thread; the methods are called by the learner, in other threads.

    Args:
        task: without queue, weights and heartbeats of shared memory.
        layout: arrays of a slot.
    """

    def __init__(self, task: WorkerTask, layout: Sequence[ArraySpec]) -> None:
        self._task = task
        self._outbox = Outbox(f"worker {task.index}", layout)
        self._weights = NewestWeights()
        self._worker: _ActorWorker | None = None
        threading.Thread(target=self._run, name="worker", daemon=True).start()

    def grant(self, count: int, version: int, weights: Arrays) -> None:
        """Let the worker start `count` more slots, with weights no older than these."""
        self._weights.put(version, weights)
        self._outbox.grant(count)

    def publish(self, version: int, weights: Arrays) -> None:
        """Newer weights, for steps from now on."""
        self._weights.put(version, weights)

    def take(self, timeout: float) -> tuple[list[dict[str, np.ndarray]], str, float]:
        """Filled slots, if any within `timeout` s; what the worker is at, and for how many s."""
        slots = self._outbox.take(timeout)
        worker = self._worker
        if worker is None:
            return slots, "its start", 0.0
        stage = worker.heartbeat.stage.describe(self._task.env)
        return slots, stage, time.monotonic() - worker.heartbeat.time

    def process_id(self) -> int:
        return os.getpid()

    def stop(self) -> None:
        self._outbox.close()

    def _run(self) -> None:
        try:
            worker = _ActorWorker(self._task, self._outbox, self._weights)
            self._worker = worker
            try:
                worker.run()
            finally:
                worker.close()
        except QueueClosed:
            return
        except BaseException:
            self._outbox.fail(traceback.format_exc())
