"""Worker processes under watch: restarted when they die, raise or hang, ended with the run."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any

from msrl_accel.envs.workers import UNGUARDED_EXIT
from msrl_accel.errors import EnvError
from msrl_accel.pipeline.heartbeat import NUMBERS, Heartbeat, Stage
from msrl_accel.pipeline.worker import DUMP_SIGNAL, heartbeat_of
from msrl_accel.shared_memory import BlockHandle, SharedBlock

logger = logging.getLogger("msrl_accel")

Target = Callable[[Any], None]
BACKOFF_SECONDS = 0.5
"""Before the first restart of a worker; doubled with each failure in a row."""
MAX_BACKOFF_SECONDS = 30.0
START_SECONDS = 120.0
"""A worker imports its packages first, so it gets at least this long to start."""
GRACE_SECONDS = 5.0
"""What a worker gets on top, at most: it may be about to say which environment hangs."""
CLOSE_SECONDS = 2.0
UNGUARDED = (
    "worker processes import the main script, and this script starts training when it is imported; "
    "put its code under `if __name__ == '__main__':`, or use pipeline.mode sync"
)
_DUMP_SECONDS = 0.5
_LONGEST_REPORT = 20_000


class Member:
    """One place in the pool, whatever process fills it."""

    def __init__(self, index: int, heartbeat: Heartbeat, label: str) -> None:
        self.index = index
        self.name = f"{label} {index}"
        self.heartbeat = heartbeat
        self.process: Any = None
        self.report = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the pool
        self.attempt = 0
        self.failures = 0
        """In a row, without a trajectory between them."""
        self.start_at = 0.0

    @property
    def report_path(self) -> str:
        """By which the worker opens the file, which has no name of its own."""
        return f"/proc/{os.getpid()}/fd/{self.report.fileno()}"

    def read_report(self) -> str:
        self.report.seek(0)
        text = self.report.read().decode(errors="replace").strip()
        return text if len(text) <= _LONGEST_REPORT else f"...{text[-_LONGEST_REPORT:]}"


class WorkerPool:
    """Runs `count` processes and replaces those that fail.

    Args:
        count: processes.
        target: what each runs, with a task.
        make_task: of a worker's index, attempt and report file, its task; called at every start.
        on_end: called with a worker's index after its process has ended.
        env_id: name for messages.
        hang_seconds: without a heartbeat, after which a worker is killed.
        max_restarts: failures in a row that end the run.
        label: of a process, before its number.
    """

    def __init__(
        self,
        count: int,
        target: Target,
        make_task: Callable[[int, int, str], Any],
        on_end: Callable[[int], object],
        *,
        env_id: str,
        hang_seconds: float,
        max_restarts: int,
        label: str = "worker",
    ) -> None:
        self.restarts = 0
        self._target, self._make_task, self._on_end = target, make_task, on_end
        self._env_id = env_id
        self._hang_seconds = hang_seconds
        self._max_restarts = max_restarts
        self._context = multiprocessing.get_context("spawn")
        self._block = SharedBlock.create("heartbeats", 8 * NUMBERS * count)
        self._members = [Member(i, heartbeat_of(self._block, i), label) for i in range(count)]

    @property
    def heartbeats(self) -> BlockHandle:
        """The numbers of all workers' heartbeats."""
        return self._block.handle

    @property
    def pids(self) -> list[int]:
        """Of the processes that run."""
        return [m.process.pid for m in self._members if m.process is not None]

    def start(self) -> None:
        for member in self._members:
            self._start(member)

    def delivered(self, index: int) -> None:
        """A worker gave a trajectory: its failures so far are forgiven."""
        self._members[index].failures = 0

    def supervise(self) -> None:
        """Notice the dead and the hung, and start others in their place when that is due.

        Raises:
            EnvError: a worker failed more often in a row than allowed; with its traceback.
        """
        now = time.monotonic()
        for member in self._members:
            if member.process is None:
                if now >= member.start_at:
                    self._start(member)
            elif not member.process.is_alive():
                self._ended(member, self._reason(member))
            elif now - member.heartbeat.time > self._limit(member):
                self._ended(member, self._kill_hung(member))

    def describe(self) -> str:
        """What each worker is at."""
        return "; ".join(
            f"{m.name} waits to be restarted"
            if m.process is None
            else f"{m.name} is at {m.heartbeat.stage.describe(self._env_id)}"
            for m in self._members
        )

    def close(self) -> None:
        """End all processes within seconds; the queue they wait for should be closed before."""
        running = [m.process for m in self._members if m.process is not None]
        deadline = time.monotonic() + CLOSE_SECONDS
        for process in running:
            process.join(max(deadline - time.monotonic(), 0.0))
        for process in running:
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        for member in self._members:
            member.process = None
            member.report.close()
        self._members = []
        self._block.close()

    def _start(self, member: Member) -> None:
        member.report.truncate(0)
        member.heartbeat.beat(Stage.START)
        task = self._make_task(member.index, member.attempt, member.report_path)
        member.process = self._context.Process(
            target=self._target, args=(task,), name=f"msrl {member.name}"
        )
        with _signals_blocked():
            member.process.start()

    def _limit(self, member: Member) -> float:
        """Seconds without a heartbeat that are too many."""
        limit = self._hang_seconds
        if member.heartbeat.stage is Stage.START:
            return max(limit, START_SECONDS)
        return limit + min(limit, GRACE_SECONDS)

    def _kill_hung(self, member: Member) -> str:
        """End a worker; returns what it hung in, with its stacks where it could still tell."""
        silent = time.monotonic() - member.heartbeat.time
        stage = member.heartbeat.stage.describe(self._env_id)
        with contextlib.suppress(OSError):
            os.kill(member.process.pid, DUMP_SIGNAL)
        member.process.join(_DUMP_SECONDS)
        member.process.kill()
        member.process.join()
        stacks = member.read_report()
        text = f"gave no sign of life for {silent:.1f} s in {stage} and was killed"
        return f"{text}; its stacks:\n{stacks}" if stacks else text

    def _reason(self, member: Member) -> str:
        """Why a process ended: its traceback, or how it died."""
        code = member.process.exitcode
        if code == UNGUARDED_EXIT:
            raise EnvError(f"{member.name}: {UNGUARDED}")
        text = member.read_report()
        if text:
            return f"raised:\n{text}"
        stage = member.heartbeat.stage.describe(self._env_id)
        if code < 0:
            return f"was killed by {signal.Signals(-code).name} in {stage}"
        return f"ended with exit code {code} in {stage}"

    def _ended(self, member: Member, reason: str) -> None:
        member.process.close()
        member.process = None
        self._on_end(member.index)
        member.failures += 1
        if member.failures > self._max_restarts:
            raise EnvError(
                f"{member.name} failed {member.failures} times in a row "
                f"(pipeline.max_restarts = {self._max_restarts}); the last time it {reason}"
            )
        wait = min(BACKOFF_SECONDS * 2 ** (member.failures - 1), MAX_BACKOFF_SECONDS)
        logger.warning("%s %s; restarting it in %.1f s", member.name, reason, wait)
        member.start_at = time.monotonic() + wait
        member.attempt += 1
        self.restarts += 1


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """A process started here takes no Ctrl-C or SIGTERM before it is ready to; none is lost."""
    resource_tracker.ensure_running()  # it would lift the block
    signals = (signal.SIGINT, signal.SIGTERM)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
