"""Running statistics in float64 on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from msrl_accel.errors import CheckpointError


class RunningMeanStd:
    """Mean and population variance of everything seen, one batch at a time.

    Parallel update of Chan, Golub and LeVeque (1979). `mean`, `var`: float64 of `shape`; `count`:
    samples seen. Before the first batch mean is 0 and var 1. `prior_count` (default 0) gives that
    start the weight of so many samples; Gymnasium and Stable-Baselines3 use 1e-4.
    """

    def __init__(self, shape: tuple[int, ...] = (), prior_count: float = 0.0) -> None:
        self.mean = np.zeros(shape, np.float64)
        self.var = np.ones(shape, np.float64)
        self.count = float(prior_count)

    def update(self, batch: np.ndarray) -> None:
        """Add samples [B, *shape]; B = 0 changes nothing."""
        batch = np.asarray(batch)
        if batch.shape[1:] != self.mean.shape:
            raise ValueError(f"batch has shape {batch.shape}, expected [B, *{self.mean.shape}]")
        added = len(batch)
        if added == 0:
            return
        batch_mean = np.mean(batch, axis=0, dtype=np.float64)
        batch_var = np.var(batch, axis=0, dtype=np.float64)
        total = self.count + added
        delta = batch_mean - self.mean
        squares = self.var * self.count + batch_var * added
        squares += np.square(delta) * (self.count * added / total)
        # New arrays, not in place: snapshots that a caller holds must not change.
        self.mean = np.asarray(self.mean + delta * (added / total))
        self.var = np.asarray(squares / total)
        self.count = total

    def state(self) -> dict[str, Any]:
        """Everything, exactly, for a checkpoint."""
        return {"mean": self.mean.copy(), "var": self.var.copy(), "count": self.count}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`; CheckpointError if it is of another shape."""
        self.mean = _copy_like(state["mean"], self.mean, "mean")
        self.var = _copy_like(state["var"], self.var, "var")
        self.count = float(state["count"])


class RewardNormalizer:
    """Divides rewards by the running standard deviation of the discounted return.

    The return of each environment, R = gamma * R + r, feeds the statistics before the division
    and restarts at 0 after an episode's end, as in VecNormalize of Stable-Baselines3. The mean is
    not subtracted. Output is clipped to [-clip, clip].
    """

    def __init__(
        self, num_envs: int, gamma: float, clip: float = 10.0, epsilon: float = 1e-8
    ) -> None:
        self.gamma = gamma
        self.clip = clip
        self.epsilon = epsilon
        self.statistics = RunningMeanStd((), prior_count=1e-4)
        self._returns = np.zeros(num_envs, np.float64)

    def __call__(
        self, rewards: np.ndarray, dones: np.ndarray, valid: np.ndarray | None = None
    ) -> np.ndarray:
        """Normalised rewards, float64 [N], of one step with `rewards`, `dones`, `valid` [N].

        Entries with `valid` False (default: none) touch no statistics and give 0.
        """
        if valid is None:
            valid = np.ones(self._returns.shape, bool)
        rewards = np.where(valid, rewards, 0.0)
        self._returns = np.where(valid, self._returns * self.gamma + rewards, self._returns)
        self.statistics.update(self._returns[valid])
        self._returns = np.where(valid & dones, 0.0, self._returns)
        scaled = rewards / np.sqrt(self.statistics.var + self.epsilon)
        return np.clip(scaled, -self.clip, self.clip)

    def state(self) -> dict[str, Any]:
        """Everything, exactly, for a checkpoint."""
        return {"statistics": self.statistics.state(), "returns": self._returns.copy()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`; CheckpointError if it is of another number of environments."""
        self.statistics.restore(state["statistics"])
        self._returns = _copy_like(state["returns"], self._returns, "returns")


def _copy_like(value: Any, current: np.ndarray, name: str) -> np.ndarray:
    array = np.array(value, np.float64)
    if array.shape != current.shape:
        raise CheckpointError(
            f"saved normaliser {name} has shape {array.shape}, this run needs {current.shape}: "
            "resume with the same environment and number of environments"
        )
    return array
