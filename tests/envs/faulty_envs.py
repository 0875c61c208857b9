"""Environments that misbehave on purpose, importable in worker processes."""

from __future__ import annotations

import os
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Counter(gymnasium.Env[Any, Any]):
    """Observes [episode, step]; an episode lasts `length` steps and ends by truncation."""

    observation_space: spaces.Space[Any] = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)
    fault_step = 3

    def __init__(self, length: int = 4, faulty: bool = True) -> None:
        self.length = length
        self.faulty = faulty
        self.episode = -1
        self.count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episode += 1
        self.count = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        if self.faulty and self.count == self.fault_step:
            self.misbehave()
        return self.observe(), self.reward(), False, self.count >= self.length, {}

    def observe(self) -> Any:
        return np.array([self.episode, self.count], np.float32)

    def reward(self) -> float:
        return float(self.count)

    def misbehave(self) -> None:
        pass


class DictCounter(Counter):
    observation_space = spaces.Dict(
        {
            "zeta": spaces.Box(-np.inf, np.inf, (2,), np.float64),
            "alpha": spaces.Box(0, 255, (2, 2, 1), np.uint8),
        }
    )

    def observe(self) -> Any:
        return {
            "zeta": np.array([self.episode, self.count], np.float64),
            "alpha": np.full((2, 2, 1), 10 * self.episode + self.count, np.uint8),
        }


class LocalError(Exception):
    """Cannot be rebuilt from its pickled arguments."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"local error {first} {second}")


class Raising(Counter):
    def misbehave(self) -> None:
        self.deep_inside()

    def deep_inside(self) -> None:
        raise LocalError(1, 2)


class Exiting(Counter):
    def misbehave(self) -> None:
        os._exit(7)


class Hanging(Counter):
    def misbehave(self) -> None:
        time.sleep(600)


class NanReward(Counter):
    def reward(self) -> float:
        return float("nan") if self.count == self.fault_step else 0.0


class NanObservation(DictCounter):
    def observe(self) -> Any:
        observation = super().observe()
        if self.count == self.fault_step:
            observation["zeta"][1] = np.inf
        return observation


class TupleObservation(Counter):
    observation_space = spaces.Tuple((spaces.Discrete(2), spaces.Discrete(2)))


class FaultyOnce(Counter):
    """Takes one file of the folder in each episode, and does once what its name says."""

    def __init__(self, folder: str, length: int = 4) -> None:
        super().__init__(length)
        self.folder = folder

    def misbehave(self) -> None:
        for name, fault in (
            ("raise", Raising.deep_inside),
            ("exit", Exiting.misbehave),
            ("hang", Hanging.misbehave),
        ):
            try:
                os.unlink(os.path.join(self.folder, name))
            except OSError:
                continue
            fault(self)  # type: ignore[arg-type]


class FailsLater(Counter):
    """Every environment of a process raises in its `episodes`-th episode."""

    def __init__(self, episodes: int) -> None:
        super().__init__()
        self.episodes = episodes

    def misbehave(self) -> None:
        if self.episode == self.episodes:
            raise LocalError(3, 4)


class Exhausted(Counter):
    """Has data for a number of episodes only."""

    def __init__(self, episodes: int) -> None:
        super().__init__(faulty=False)
        self.data = iter(range(episodes))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        next(self.data)
        return super().reset(seed=seed)


class MissingPackage(Counter):
    def __init__(self) -> None:
        raise gymnasium.error.DependencyNotInstalled("Box2D is not installed")


class OnlyInParent(Counter):
    """Fails to be made in a worker process."""

    def __init__(self) -> None:
        import multiprocessing

        if multiprocessing.parent_process() is not None:
            raise RuntimeError("no licence in this process")
        super().__init__()


for _cls in (
    Counter,
    DictCounter,
    Raising,
    Exiting,
    Hanging,
    NanReward,
    NanObservation,
    TupleObservation,
    OnlyInParent,
    FaultyOnce,
    FailsLater,
    Exhausted,
):
    gymnasium.register(id=f"{_cls.__name__}-v0", entry_point=f"{__name__}:{_cls.__name__}")
