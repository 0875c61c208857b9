"""Worker processes under watch: restarted when they die, raise or hang, ended with the run."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from msrl_accel.envs.workers import UNGUARDED, UNGUARDED_EXIT
from msrl_accel.errors import EnvError
from msrl_accel.shared_memory import BlockHandle, SharedBlock

logger = logging.getLogger("msrl_accel")

Target = Callable[..., None]
BACKOFF_SECONDS = 0.5
"""Before the first restart of a worker; doubled with each failure in a row."""
MAX_BACKOFF_SECONDS = 30.0
START_SECONDS = 120.0
"""A worker imports its packages first, so it gets at least this long to start."""
CLOSE_SECONDS = 2.0


class Worker:
    """One place in the pool, whatever process fills it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.process: Any = None
        self.report: Any = None
        self.started = 0.0
        self.attempt = 0
        self.failures = 0
        """In a row, without a trajectory between them."""
        self.start_at = 0.0

    @property
    def name(self) -> str:
        return f"worker {self.index}"


class WorkerPool:
    """Runs `count` processes and replaces those that fail.

    Args:
        count: processes.
        target: what each runs: target(task, report).
        make_task: of a worker's index and attempt, the task; called at every start.
        on_end: called with a worker's index after its process has ended.
        hang_seconds: without a heartbeat, after which a worker is killed.
        max_restarts: failures in a row that end the run.
    """

    def __init__(
        self,
        count: int,
        target: Target,
        make_task: Callable[[int, int], Any],
        on_end: Callable[[int], object],
        *,
        hang_seconds: float,
        max_restarts: int,
    ) -> None:
        self.restarts = 0
        self._target, self._make_task, self._on_end = target, make_task, on_end
        self._hang_seconds = hang_seconds
        self._max_restarts = max_restarts
        self._context = multiprocessing.get_context("spawn")
        self._block = SharedBlock.create("heartbeats", 8 * count)
        self._beats = self._block.memory.view(np.float64)
        self._workers = [Worker(i) for i in range(count)]

    @property
    def heartbeats(self) -> BlockHandle:
        """One float64 a worker: the monotonic time of its last sign of life."""
        return self._block.handle

    def start(self) -> None:
        for worker in self._workers:
            self._start(worker)

    def delivered(self, index: int) -> None:
        """A worker gave a trajectory: its failures so far are forgiven."""
        self._workers[index].failures = 0

    def supervise(self) -> None:
        """Notice the dead and the hung, and start others in their place when that is due.

        Raises:
            EnvError: a worker failed more often in a row than allowed; with its traceback.
        """
        now = time.monotonic()
        for worker in self._workers:
            if worker.process is None:
                if now >= worker.start_at:
                    self._start(worker)
            elif not worker.process.is_alive():
                self._ended(worker, self._reason(worker))
            elif self._hangs(worker, now):
                worker.process.kill()
                worker.process.join()
                self._ended(worker, f"gave no sign of life for {self._hang_seconds:g} s (hung)")

    def close(self) -> None:
        """End all processes within seconds; the queue they wait for should be closed before."""
        running = [w.process for w in self._workers if w.process is not None]
        deadline = time.monotonic() + CLOSE_SECONDS
        for process in running:
            process.join(max(deadline - time.monotonic(), 0.0))
        for process in running:
            if process.is_alive():
                process.kill()
                process.join()
        for worker in self._workers:
            if worker.report is not None:
                worker.report.close()
        self._beats = np.empty(0)
        self._block.close()

    def _start(self, worker: Worker) -> None:
        worker.report, theirs = multiprocessing.Pipe(duplex=False)
        self._beats[worker.index] = time.monotonic()
        worker.started = time.monotonic()
        task = self._make_task(worker.index, worker.attempt)
        worker.process = self._context.Process(
            target=self._target, args=(task, theirs), name=f"msrl {worker.name}"
        )
        worker.process.start()
        theirs.close()

    def _hangs(self, worker: Worker, now: float) -> bool:
        beat = float(self._beats[worker.index])
        limit = self._hang_seconds
        if beat <= worker.started:  # it is still importing
            limit = max(limit, START_SECONDS)
        return now - max(beat, worker.started) > limit

    def _reason(self, worker: Worker) -> str:
        """Why a process ended: its traceback, or how it died."""
        if worker.report.poll():
            try:
                text: str = worker.report.recv_bytes().decode()
                return f"raised:\n{text}"
            except (EOFError, OSError):
                pass
        code = worker.process.exitcode
        if code == UNGUARDED_EXIT:
            raise EnvError(f"{worker.name}: {UNGUARDED.replace('backend sync', '--mode sync')}")
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def _ended(self, worker: Worker, reason: str) -> None:
        worker.process.close()
        worker.report.close()
        worker.process = worker.report = None
        self._on_end(worker.index)
        worker.failures += 1
        if worker.failures > self._max_restarts:
            raise EnvError(
                f"{worker.name} failed {worker.failures} times in a row "
                f"(pipeline.max_restarts = {self._max_restarts}); the last time it {reason}"
            )
        wait = min(BACKOFF_SECONDS * 2 ** (worker.failures - 1), MAX_BACKOFF_SECONDS)
        logger.warning("%s %s; restarting it in %.1f s", worker.name, reason, wait)
        worker.start_at = time.monotonic() + wait
        worker.attempt += 1
        self.restarts += 1
