"""What every replay offers, and drawing from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np

from msrl_accel.errors import ConfigError, ReplayError
from msrl_accel.replay.priorities import PrioritySettings, importance_weights
from msrl_accel.spaces import Observations


class ReplayBatch(NamedTuple):
    """k batches of B transitions, arrays [k, B, ...], copies that the caller may keep."""

    observations: Observations
    actions: np.ndarray
    """Raw: float32 in [-1, 1] for bounded continuous actions, int32 for the others."""
    rewards: np.ndarray
    """Discounted sum over the n-step window, float32."""
    next_observations: Observations
    """True successors of the windows, the final observation where an episode ended."""
    discounts: np.ndarray
    """gamma^m after a window of m steps, 0 where it ends in a terminal state; float32."""
    weights: np.ndarray
    """Importance weights, the largest of each batch 1; all 1 for uniform sampling; float32."""
    indices: np.ndarray
    """For `update_priorities`, int64."""


class Replay(ABC):
    """Stored transitions that can be sampled.

    The abstract methods deal in entries (numbered places, some of them empty) and in mass: the
    chance of an entry is its share of the mass.
    """

    settings: PrioritySettings | None
    """Of prioritised sampling; None samples uniformly."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of transitions that can be sampled."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of all arrays, in memory and in files."""

    @abstractmethod
    def add(
        self,
        observations: Observations,
        actions: np.ndarray,
        rewards: np.ndarray,
        next_observations: Observations,
        terminated: np.ndarray,
        truncated: np.ndarray,
        valid: np.ndarray,
    ) -> None:
        """Store one step of all environments, arrays [N, ...].

        Args:
            observations: what the policy acted on.
            actions: raw, as the distribution draws them.
            next_observations: true successors: final observations where episodes ended.
            valid: False leaves a transition out (the fake ones of next-step automatic reset).

        Raises:
            ReplayError: a shape or dtype does not fit, or a reward or action is not finite.
        """

    @abstractmethod
    def end_episodes(self) -> None:
        """Say that all environments start anew although their episodes did not end.

        To be called when they are reset from outside, as after a `restore` that they could not
        follow. The newest transitions then bootstrap from their successors, as truncated ones do.
        """

    @abstractmethod
    def update_priorities(self, indices: np.ndarray, priorities: np.ndarray) -> None:
        """Set the priorities of sampled transitions to their |TD errors|, arrays of one shape.

        Of an index given twice the last value counts. Without effect where sampling is uniform.

        Raises:
            ReplayError: a value is not finite, an index is none of the replay's, or the shapes
                differ.
        """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Everything needed to continue exactly, JSON values and arrays (copies)."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Return to what `state` gave.

        Raises:
            CheckpointError: the state is of a replay of another shape.
        """

    @abstractmethod
    def close(self) -> None:
        """Give files free. Closing twice is allowed."""

    @property
    @abstractmethod
    def mass(self) -> float: ...

    @abstractmethod
    def find(self, points: np.ndarray) -> np.ndarray:
        """Entries [n] at points [n] of the mass."""

    @abstractmethod
    def holds(self, indices: np.ndarray) -> np.ndarray:
        """Which entries hold a transition that can be sampled, bool [n]."""

    @abstractmethod
    def gather(self, indices: np.ndarray) -> ReplayBatch:
        """Transitions of entries [n], arrays [n, ...], weights 1."""

    @abstractmethod
    def priorities_at(self, indices: np.ndarray) -> np.ndarray:
        """p^alpha of entries [n]; prioritised only."""

    def sample(
        self, rng: np.random.Generator, batch_size: int, k: int = 1, beta: float | None = None
    ) -> ReplayBatch:
        """Draw k batches with replacement; arrays [k, B, ...].

        Prioritised batches are stratified: one transition from each of `batch_size` equal parts
        of the mass. Others are independent draws.

        Args:
            beta: exponent of the importance weights, the settings' when None.

        Raises:
            ReplayError: nothing is stored yet.
            ConfigError: batch_size or k is below 1.
        """
        for name, value in (("batch_size", batch_size), ("k", k)):
            if value < 1:
                raise ConfigError(f"{name} = {value}: sample at least 1")
        if not len(self):
            raise ReplayError("the replay is empty: add a transition before sampling")
        n = k * batch_size
        indices = (
            self._draw_uniform(rng, n)
            if self.settings is None
            else self._draw_stratified(rng, k, batch_size)
        )
        batch = self.gather(indices)
        if self.settings is not None:
            priorities = self.priorities_at(indices).reshape(k, batch_size)
            exponent = self.settings.beta if beta is None else beta
            batch = batch._replace(weights=importance_weights(priorities, exponent))
        return _fold(batch, k, batch_size)

    def _draw_uniform(self, rng: np.random.Generator, n: int) -> np.ndarray:
        indices = self.find(rng.random(n) * self.mass)
        while True:
            # Drawing anew where the entry is empty keeps the others equally likely.
            empty = np.flatnonzero(~self.holds(indices))
            if not len(empty):
                return indices
            indices[empty] = self.find(rng.random(len(empty)) * self.mass)

    def _draw_stratified(self, rng: np.random.Generator, k: int, batch_size: int) -> np.ndarray:
        points = (np.arange(batch_size) + rng.random((k, batch_size))) * (self.mass / batch_size)
        return self.find(points.ravel())


def _fold(batch: ReplayBatch, k: int, batch_size: int) -> ReplayBatch:
    """Arrays [k * B, ...] -> [k, B, ...]."""

    def fold(array: np.ndarray) -> np.ndarray:
        return array.reshape(k, batch_size, *array.shape[1:])

    return ReplayBatch(
        observations=tuple(map(fold, batch.observations)),
        actions=fold(batch.actions),
        rewards=fold(batch.rewards),
        next_observations=tuple(map(fold, batch.next_observations)),
        discounts=fold(batch.discounts),
        weights=batch.weights.reshape(k, batch_size),
        indices=fold(batch.indices),
    )
