"""Signs of life of a worker, in shared memory: when it last gave one, and what it does since."""

from __future__ import annotations

import time
from enum import IntEnum

import numpy as np

NUMBERS = 2
"""float64 of one worker: monotonic time, stage."""


class Stage(IntEnum):
    """What a worker is at."""

    START = 0
    RESET = 1
    STEP = 2
    INFERENCE = 3
    QUEUE = 4

    def describe(self, env: str) -> str:
        """As in "it hung in ..."."""
        return {
            Stage.START: "its start",
            Stage.RESET: f"the reset of {env}",
            Stage.STEP: f"a step of {env}",
            Stage.INFERENCE: "inference",
            Stage.QUEUE: "the wait for a slot of the trajectory queue",
        }[self]


class Heartbeat:
    """One worker's numbers.

    Args:
        numbers: a view of shared memory, [NUMBERS] float64.
    """

    def __init__(self, numbers: np.ndarray) -> None:
        self._numbers = numbers

    def beat(self, stage: Stage) -> float:
        """Enter a stage; returns the monotonic time."""
        now = time.monotonic()
        self._numbers[:] = now, stage
        return now

    @property
    def time(self) -> float:
        return float(self._numbers[0])

    @property
    def stage(self) -> Stage:
        return Stage(int(self._numbers[1]))
