"""Proportional prioritised replay (Schaul et al. 2016, arXiv:1511.05952)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from msrl_accel.errors import ConfigError, ReplayError
from msrl_accel.replay.checks import LARGEST
from msrl_accel.replay.sum_tree import SumTree


@dataclass(frozen=True)
class PrioritySettings:
    """How prioritised sampling weighs transitions.

    Raises:
        ConfigError: a value is out of its bounds.
    """

    alpha: float = 0.6
    """Exponent of the priorities, in [0, 1]: 0 samples uniformly."""
    beta: float = 0.4
    """Exponent of the importance weights, in [0, 1]: 1 corrects fully. A schedule passes its own
    to `sample`."""
    epsilon: float = 1e-6
    """Added to every |TD error|, above 0: a transition without error keeps a chance."""

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} = {getattr(self, name)}: use a number from 0 to 1")
        if not 0.0 < self.epsilon < np.inf:
            raise ConfigError(f"epsilon = {self.epsilon}: use a small number above 0")


class Priorities:
    """p^alpha of every entry of a replay, 0 where there is nothing to sample.

    A new transition gets the largest priority so far, 1 at first (algorithm 1, line 6).
    """

    def __init__(self, entries: int, settings: PrioritySettings) -> None:
        self.settings = settings
        self.tree = SumTree(entries)
        self.highest = 1.0
        """Largest p^alpha so far."""

    def add(self, indices: np.ndarray) -> None:
        self.tree.set(indices, self.highest)

    def remove(self, indices: np.ndarray) -> None:
        self.tree.set(indices, 0.0)

    def update(self, indices: np.ndarray, errors: np.ndarray) -> None:
        """p = |TD error| + epsilon of entries [n]; entries that are empty stay so.

        Raises:
            ReplayError: an error is no finite float32.
        """
        magnitude = np.abs(np.asarray(errors, np.float64)).ravel()
        finite = magnitude <= LARGEST
        if not finite.all():
            bad = int(np.flatnonzero(~finite)[0])
            raise ReplayError(
                f"priorities: the value of transition {indices[bad]} is "
                f"{np.ravel(errors)[bad]}: give finite float32 TD errors (a critic that diverges "
                "makes others)"
            )
        raised = (magnitude + self.settings.epsilon) ** self.settings.alpha
        self.highest = max(self.highest, float(raised.max(initial=0.0)))
        # An entry may have been overwritten by an unusable one since it was sampled.
        self.tree.set(indices, np.where(self.tree.get(indices) > 0.0, raised, 0.0))

    def state(self, entries: int) -> dict[str, Any]:
        """Of the first entries, the only ones in use."""
        return {"values": self.tree.values[:entries].copy(), "highest": self.highest}

    def restore(self, state: dict[str, Any]) -> None:
        values = state["values"]
        self.tree = SumTree(self.tree.size)
        self.tree.set(np.arange(len(values)), values)
        self.highest = float(state["highest"])


def importance_weights(priorities: np.ndarray, beta: float) -> np.ndarray:
    """w = (N P)^-beta / max w, the maximum over each batch, of p^alpha [k, B]; float32 [k, B].

    N and the sum in P = p^alpha / sum cancel: w = (p^alpha / min p^alpha)^-beta.
    """
    lowest = priorities.min(axis=-1, keepdims=True)
    weights: np.ndarray = (priorities / lowest) ** -beta
    return weights.astype(np.float32)
