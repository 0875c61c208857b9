"""What the training loop needs of an algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np

from msrl_accel.config import Section, TrainConfig
from msrl_accel.policy import Policy
from msrl_accel.spaces import PolicySpec
from msrl_accel.trajectories import Trajectories


class Algorithm(ABC):
    """An on-policy algorithm: a policy graph and one compiled update.

    Args:
        config: the whole resolved configuration.
        spec: the environment's tensors.
    """

    Config: ClassVar[type[Section]]
    policy: Policy
    n_steps: int
    """Steps each environment takes between updates."""

    @abstractmethod
    def __init__(self, config: TrainConfig, spec: PolicySpec) -> None: ...

    @abstractmethod
    def update(
        self, trajectories: Trajectories, progress: float, rng: np.random.Generator
    ) -> dict[str, float]:
        """Train on one batch of trajectories.

        Args:
            progress: share of the run's steps done before this batch, 0 to 1, for schedules.
            rng: source of shuffling.

        Returns:
            Metrics of the update.
        """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Optimiser state and counters: a tree of dicts, ndarrays and JSON values."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Inverse of `state`."""
