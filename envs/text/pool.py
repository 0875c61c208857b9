"""Worker processes that may hang or die: their items are reported, the processes replaced."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import Pipe, connection
from typing import Any

from msrl_accel.envs.text.worker import END_WITH_PARENT
from msrl_accel.errors import EnvError

START_SECONDS = 60.0
"""A worker imports its packages first, so it gets this long to start."""
_CLOSE_SECONDS = 1.0
_TRIES = 2
"""A worker that dies may have been ended from outside, so its job is tried once more."""
_MOST_LOSSES = 12
"""Workers lost one after the other, with no answer between, before scoring is given up."""
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from msrl_accel.envs.text.worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)

Job = Mapping[str, Any]
Answer = Mapping[str, Any]


class WorkerPool:
    """Runs jobs in a fixed number of worker processes, one job at a time in each.

    Workers are new interpreters that import neither the main script nor MindSpore, each in a
    process group of its own, so that whatever a verifier started ends with it. After an exception
    the pool is closed.

    Args:
        plan: what every worker gets first: rewards, timeout, memory limit.
        workers: how many processes.
        timeout: seconds a job may take.

    Raises EnvError, with the worker's traceback, where a worker cannot start.
    """

    def __init__(self, plan: Mapping[str, Any], workers: int, timeout: float) -> None:
        self._plan = json.dumps(plan).encode("ascii")
        self._timeout = timeout
        self._workers: list[_Worker] = []
        self._waiting: deque[_Item] = deque()
        self._answers: dict[int, Answer] = {}
        self._losses = 0
        self._finalizer = weakref.finalize(self, _end_all, self._workers)
        self.restarts = 0
        with self._failures_close():
            for _ in range(workers):
                self._workers.append(_Worker(self._plan))
            while not all(worker.ready for worker in self._workers):
                self._await_event()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in self._workers]

    def run(self, jobs: Sequence[Job]) -> list[Answer]:
        """The answer of each job: `value` and `reason`, or `error` and `traceback`.

        Raises EnvError when worker after worker is lost, or a new one cannot start.
        """
        if not self._finalizer.alive:
            raise EnvError("the scoring workers are closed")
        self._answers = {}
        self._waiting.extend(_Item(index, job) for index, job in enumerate(jobs))
        with self._failures_close():
            while len(self._answers) < len(jobs):
                self._assign()
                self._await_event()
        return [self._answers[index] for index in range(len(jobs))]

    def close(self) -> None:
        """End the workers. Never hangs, leaves no process; closing twice is allowed."""
        self._finalizer()

    def _assign(self) -> None:
        for index, worker in enumerate(self._workers):
            if self._waiting and worker.ready and worker.item is None:
                item = self._waiting.popleft()
                if not worker.give(item, self._timeout):  # it died while idle
                    self._waiting.appendleft(item)
                    self._replace(index)

    def _await_event(self) -> None:
        """Wait for a message, a death or the end of a time limit, and deal with it."""
        busy = [worker for worker in self._workers if not worker.ready or worker.item is not None]
        patience = min(worker.deadline for worker in busy) - time.monotonic()
        heard = connection.wait([worker.connection for worker in busy], max(patience, 0.0))
        for index, worker in enumerate(self._workers):
            if worker.connection in heard:
                self._receive(index, worker)
            elif worker in busy and worker.deadline <= time.monotonic():
                self._lose(index, worker, hung=True)

    def _receive(self, index: int, worker: _Worker) -> None:
        message = worker.receive()
        if message is None:
            self._lose(index, worker, hung=False)
        elif worker.item is not None:
            self._answers[worker.item.index] = message
            worker.item = None
            self._losses = 0
        elif "error" in message:
            raise EnvError(
                f"a scoring worker cannot start: {message['error']}\n"
                f"Traceback of the worker process:\n{message['traceback']}"
            )
        else:
            worker.ready = True

    def _lose(self, index: int, worker: _Worker, hung: bool) -> None:
        """Replace a worker that hangs or died; report its job, or try it once more."""
        how = (
            f"no answer within {self._timeout:g} s (timeout); its worker process was killed"
            if hung
            else f"its worker process died ({worker.describe_death()})"
        )
        item, stack = worker.item, worker.stack()
        if item is None:
            raise EnvError(f"a scoring worker does not start: {how}")
        item.tries += 1
        if hung or item.tries == _TRIES:
            self._answers[item.index] = {"error": how, "traceback": stack}
        else:
            self._waiting.appendleft(item)
        self._losses += 1
        if self._losses >= _MOST_LOSSES:
            raise EnvError(
                f"{self._losses} scoring workers were lost one after the other, the last one by "
                f"reward {item.job['name']}: {how}\nStack of the worker process:\n"
                f"{stack or '(unknown)'}"
            )
        self._replace(index)

    def _replace(self, index: int) -> None:
        self._workers[index].end()
        self._workers[index] = _Worker(self._plan)
        self.restarts += 1

    @contextlib.contextmanager
    def _failures_close(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise


class _Item:
    """A job, its place among the answers, and how often it was lost."""

    def __init__(self, index: int, job: Job) -> None:
        self.index = index
        self.job = job
        self.tries = 0


class _Worker:
    """One process, and what it is doing."""

    def __init__(self, plan: bytes) -> None:
        self.ready = False
        self.item: _Item | None = None
        self.deadline = time.monotonic() + START_SECONDS
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115  closed by end
        self.connection, remote = Pipe()
        descriptors = (remote.fileno(), self._stacks.fileno())
        with remote:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _CODE, json.dumps(sys.path), *map(str, descriptors)],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C is the parent's; and a group to kill
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
        self._send(plan)

    def give(self, item: _Item, timeout: float) -> bool:
        """Start on a job; False where the process is gone."""
        self.item = item
        self.deadline = time.monotonic() + timeout
        return self._send(json.dumps(item.job).encode("ascii"))

    def receive(self) -> Answer | None:
        """The next message; None where the process is gone."""
        try:
            message: Answer = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return None
        return message

    def stack(self) -> str:
        """Where it last was when its time ran out or a signal ended it, as far as it could say."""
        self._stacks.seek(0)
        threads = self._stacks.read().decode("utf-8", "replace").split("\n\n")
        return "\n\n".join(text for text in threads if f" in {END_WITH_PARENT}\n" not in text)

    def describe_death(self) -> str:
        self._await_exit()
        self._kill()
        code = self.process.wait()
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    def end(self, ask: bool = False) -> None:
        """End the process and all it started; with `ask` it may first leave by itself."""
        self.connection.close()
        if ask:
            self._await_exit()
        if self.process.returncode is None:
            self._kill()
            self.process.wait()
        self._stacks.close()

    def _send(self, message: bytes) -> bool:
        try:
            self.connection.send_bytes(message)
        except OSError:
            return False
        return True

    def _await_exit(self) -> None:
        """Wait a little until it has exited, without reaping: its id still names its group."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        while self.process.returncode is None and time.monotonic() < deadline:
            if os.waitid(os.P_PID, self.process.pid, options) is not None:
                return
            time.sleep(0.005)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def _end_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.connection.close()  # all may leave at the same time
    for worker in workers:
        worker.end(ask=worker.ready and worker.item is None)
    workers.clear()
