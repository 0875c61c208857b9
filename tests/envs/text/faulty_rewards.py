"""Reward functions and tasks that misbehave on purpose, importable in worker processes.

The completion says what to do, so that one batch can mix good and bad.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from msrl_accel.envs.text import Problem, Reward, TextTask


class LocalError(Exception):
    """Cannot be rebuilt from its pickled arguments."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"local error {first} {second}")


def obey(problem: Problem, completion: str) -> Any:
    """Does what the completion says."""
    return _ORDERS.get(completion, lambda: 1.0)()


def deep_inside() -> None:
    raise LocalError(1, 2)


def sleep_for_ever() -> None:
    time.sleep(600)


def compute_for_ever() -> int:
    return 9 ** (9**9)  # one bytecode, so that no Python signal handler gets a turn


def eat_memory() -> int:
    return len(bytearray(64 * 2**30))


_ORDERS: dict[str, Any] = {
    "raise": deep_inside,
    "exit": lambda: sys.exit(0),
    "die": lambda: os._exit(7),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: __import__("ctypes").string_at(0),
    "hang": sleep_for_ever,
    "compute": compute_for_ever,
    "memory": eat_memory,
    "nan": lambda: float("nan"),
    "inf": lambda: np.float32("inf"),
    "none": lambda: None,
    "text": lambda: "1.0",
    "list": lambda: [1.0],
    "complex": lambda: 1j,
    "nan in a reward": lambda: Reward(float("nan")),
    "numpy": lambda: np.float32(0.5),
    "bool": lambda: True,
    "reward": lambda: Reward(0.25, "a quarter"),
    "late alarm": lambda: signal.alarm(1) or 1.0,
}


def one(problem: Problem, completion: str) -> float:
    return 1.0


def length(problem: Problem, completion: str, per: int = 1) -> float:
    return len(completion) / per


def slow(problem: Problem, completion: str) -> float:
    time.sleep(0.05)
    return float(completion)


def main_thread(problem: Problem, completion: str) -> bool:
    return threading.current_thread() is threading.main_thread()


def spawns(problem: Problem, completion: str) -> float:
    """Starts a process that outlives everything, notes its id in the file and hangs."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(completion).write_text(str(child.pid))
    time.sleep(600)
    return 0.0


def dies_once(problem: Problem, completion: str) -> float:
    """Ends its process the first time only."""
    mark = Path(completion)
    if not mark.exists():
        mark.touch()
        os._exit(1)
    return 1.0


class Mine(TextTask):
    """A task of the user: it is not inline, so worker processes make it anew."""

    name = "mine"

    def __init__(self, bonus: float = 0.0) -> None:
        self.bonus = bonus

    def sample(self, rng: np.random.Generator, n: int) -> list[Problem]:
        return [Problem("p", "a") for _ in range(n)]

    def held_out(self, n: int) -> list[Problem]:
        return [Problem("q", "a")]

    def score(self, problem: Problem, completion: str) -> Reward:
        obey(problem, completion)
        return Reward(float(completion == problem.answer) + self.bonus)


not_callable = 3


def no_task() -> int:
    return 3
