"""The process that runs verifiers, one item at a time, in its main thread.

Parent and worker speak JSON over a socket: nothing a verifier computes is ever unpickled.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

from msrl_accel.envs.text.base import Problem
from msrl_accel.envs.text.registry import make_task
from msrl_accel.envs.text.rewards import RewardFunction, RewardSpec, build_reward, validated

_STACK_AFTER = 0.9
"""Share of the time limit after which the worker writes down where it is."""
_LONGEST_MESSAGE = 2_000
_LONGEST_TRACEBACK = 20_000
END_WITH_PARENT = "watch_parent"
"""Name of the function that every worker's second thread runs, which says nothing in a stack."""
_MEGABYTE = 1024 * 1024


def main(connection_fd: int, stacks_fd: int) -> None:
    """Serve until the parent closes the connection or ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent decides when workers end
        signal.signal(number, signal.SIG_IGN)
    _end_with_parent()
    faulthandler.enable(file=stacks_fd)
    with Connection(connection_fd) as connection, contextlib.suppress(EOFError, OSError):
        plan = json.loads(connection.recv_bytes())
        try:
            _limit_memory(plan["memory_mb"])
            functions = [reward and _make(reward) for reward in plan["rewards"]]
        except BaseException as error:
            _send(connection, describe_error(error))
            return
        _send(connection, {"ready": True})
        while True:
            job = json.loads(connection.recv_bytes())
            with _watched(plan["timeout"], stacks_fd):
                answer = judge(
                    functions[job["reward"]], Problem(*job["problem"]), job["completion"]
                )
            _send(connection, answer)


def judge(function: RewardFunction, problem: Problem, completion: str) -> dict[str, Any]:
    """`value` and `reason`, or `error` and `traceback` where the verifier failed."""
    try:
        reward = validated(function(problem, completion))
    except BaseException as error:  # math-verify's timeout and SystemExit are no Exceptions
        return describe_error(error)
    return {"value": reward.value, "reason": reward.reason}


def describe_error(error: BaseException) -> dict[str, Any]:
    """An exception as JSON; endless messages are cut."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    message = f"{type(error).__name__}: {error}"
    return {"error": message[:_LONGEST_MESSAGE], "traceback": text[-_LONGEST_TRACEBACK:]}


def _make(reward: Mapping[str, Any]) -> RewardFunction:
    task = reward.get("task")
    if task is not None:
        return _TaskReward(*task)
    return build_reward(RewardSpec(**reward["spec"]))


class _TaskReward(RewardFunction):
    """The verifier of a task, made anew in this process."""

    def __init__(self, env_id: str, kwargs: Mapping[str, Any]) -> None:
        self._task = make_task(env_id, **kwargs)

    def __call__(self, problem: Problem, completion: str) -> Any:
        return self._task.score(problem, completion)


@contextlib.contextmanager
def _watched(timeout: float, stacks_fd: int) -> Iterator[None]:
    """Write the stack down shortly before the parent gives up, whatever holds the interpreter."""
    os.ftruncate(stacks_fd, 0)
    faulthandler.dump_traceback_later(_STACK_AFTER * timeout, file=stacks_fd)
    # The default action of SIGPROF ends a process that computes on without its parent.
    signal.setitimer(signal.ITIMER_PROF, 2 * timeout + 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)  # one that a verifier left behind would end a later item
        faulthandler.cancel_dump_traceback_later()


def _limit_memory(megabytes: int | None) -> None:
    """Let allocations beyond the limit raise MemoryError, before the machine runs out."""
    if megabytes is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = megabytes * _MEGABYTE
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _end_with_parent() -> None:
    """End this process group, verifiers' own children included, when the parent is gone."""
    parent = os.getppid()

    def watch_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch_parent, daemon=True).start()


def _send(connection: Connection, message: Mapping[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode("ascii"))
