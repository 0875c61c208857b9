"""Worker processes that are watched: a crash, a death or a hang names the environment."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import connection
from typing import Any

import gymnasium.vector

from msrl_accel.envs.factory import EnvFactory
from msrl_accel.errors import EnvError

UNGUARDED_EXIT = 87
"""Exit code of a worker that found itself starting workers while importing the main script."""
UNGUARDED = (
    "worker processes import the main script, and this script starts training when it is imported; "
    "put its code under `if __name__ == '__main__':`, or use backend sync"
)
_CLOSE_SECONDS = 3.0
_START_SECONDS = 60.0
"""A worker imports its packages first, so it gets at least this long to start."""


class WorkerVectorEnv(gymnasium.vector.AsyncVectorEnv):  # type: ignore[type-arg]
    """`AsyncVectorEnv` whose failures are EnvErrors that name the environment and its index.

    Workers are spawned, because a fork after MindSpore has run a graph hangs. After a failure the
    workers are ended and the object is closed.

    Args:
        env_id: name for messages.
        factories: one a worker.
        timeout: seconds a worker may take to reset or step.
    """

    def __init__(
        self, env_id: str, factories: Sequence[EnvFactory], timeout: float, **kwargs: Any
    ) -> None:
        stop_if_importing_main()
        self._env_id = env_id
        self._timeout = timeout
        with self._failures_close():
            super().__init__(factories, copy=False, context="spawn", **kwargs)

    def reset(self, **kwargs: Any) -> Any:
        with self._failures_close():
            self.reset_async(**kwargs)
            self._await_workers("reset", self._timeout)
            return self.reset_wait()

    def step(self, actions: Any) -> Any:
        with self._failures_close():
            self.step_async(actions)
            self._await_workers("step", self._timeout)
            return self.step_wait()

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End every worker: ask, then kill. Never hangs, leaves no process."""
        pipes = [pipe for pipe in self.parent_pipes if pipe is not None and not pipe.closed]
        if not terminate:
            for pipe in pipes:
                with contextlib.suppress(OSError):
                    pipe.send(("close", None))
            _join(self.processes, _CLOSE_SECONDS if timeout is None else timeout)
        running = [process for process in self.processes if process.is_alive()]
        for process in running:
            process.kill()  # workers ignore SIGTERM
        _join(running, _CLOSE_SECONDS)
        for pipe in pipes:
            pipe.close()
        self.error_queue.close()
        self.error_queue.cancel_join_thread()

    def _check_spaces(self) -> None:
        for pipe in self.parent_pipes:
            pipe.send(
                (
                    "_check_spaces",
                    (
                        self.observation_mode,
                        self.single_observation_space,
                        self.single_action_space,
                    ),
                )
            )
        self._await_workers("start", max(self._timeout, _START_SECONDS))
        replies = [pipe.recv()[0] for pipe in self.parent_pipes]
        different = [index for index, same in enumerate(replies) if not all(same)]
        if different:
            self.reset()  # an environment that could not be made tells why
            raise EnvError(
                f"{self._env_id}: environment {different[0]} has other spaces than environment 0"
            )

    def _await_workers(self, what: str, timeout: float) -> None:
        """Wait until every worker has answered or died."""
        deadline = time.monotonic() + timeout
        pending = {pipe: index for index, pipe in enumerate(self.parent_pipes)}
        while pending:
            ready = connection.wait(list(pending), max(deadline - time.monotonic(), 0.0))
            if not ready:
                indices = sorted(pending.values())
                raise EnvError(
                    f"{self._env_id}: environment {', '.join(map(str, indices))} did not answer "
                    f"{what} within {timeout:g} s (timeout); it hangs or is too slow"
                )
            for pipe in ready:
                del pending[pipe]  # type: ignore[arg-type]

    def _raise_if_errors(self, successes: Iterable[bool]) -> None:
        if all(successes):
            return
        _, _, value, trace = self.error_queue.get(timeout=_CLOSE_SECONDS)
        cause = trace.split("\nThe above exception")[0]  # what the environment itself raised
        raise EnvError(f"{value}\nTraceback of the worker process:\n{cause}")

    @contextlib.contextmanager
    def _failures_close(self) -> Iterator[None]:
        """Close after any failure, and explain a broken pipe by the worker behind it."""
        try:
            yield
        except (EOFError, OSError) as error:
            message = self._describe_death()
            self._abandon()
            raise EnvError(message) from error
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        if not self.closed and hasattr(self, "error_queue"):
            self.close(terminate=True)

    def _describe_death(self) -> str:
        _join(getattr(self, "processes", []), 1.0, stop_at_first=True)
        for index, process in enumerate(getattr(self, "processes", [])):
            code = process.exitcode
            if code == UNGUARDED_EXIT:
                return f"{self._env_id}: {UNGUARDED}"
            if code is not None:
                how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
                return f"{self._env_id}: the worker process of environment {index} died ({how})"
        return f"{self._env_id}: the connection to a worker process broke"

    def __del__(self) -> None:
        self._abandon()


def _join(processes: Iterable[Any], seconds: float, stop_at_first: bool = False) -> None:
    """Wait until the processes have ended, or the first of them has, for at most `seconds`."""
    deadline = time.monotonic() + seconds
    running = [process for process in processes if process.is_alive()]
    while running and time.monotonic() < deadline:
        connection.wait([p.sentinel for p in running], max(deadline - time.monotonic(), 0.0))
        still = [process for process in running if process.is_alive()]
        if stop_at_first and len(still) < len(running):
            return
        running = still


def stop_if_importing_main() -> None:
    """End a worker that is still importing the main script, before it spawns workers itself."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(UNGUARDED_EXIT)
