"""How old samples may be, and what old ones count."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np

from msrl_accel.errors import ConfigError

LAG_DISCOUNT = 0.05
"""Share by which one version of lag slows learning down."""
_HISTOGRAM = 8
"""Lags that are counted apart; the last counts all from there on."""


def lag_learning_rate(base: float, lag: float, discount: float = LAG_DISCOUNT) -> float:
    """base / (1 + discount * lag): smaller steps on older samples."""
    return base / (1.0 + discount * lag)


class StalenessManager:
    """Bounds the lag of samples in versions of the policy, and says what they weigh.

    Trajectories may start as long as

        capacity = (max_staleness + current_version + 1) * batch - admitted

    is positive, where `admitted` counts all that have started and were not withdrawn (Fu et al.
    2025, arXiv:2505.24298, section 5.1). Training takes `batch` of them to the next version, so a
    trajectory that starts when capacity is positive is used at most `max_staleness` versions later,
    if they are used in the order they started. One that is slower than its followers can come
    later still; `weigh` sees to that. With max_staleness 0 the next batch starts when the last one
    has been trained on and published: that is synchronous training.

    Threads may call `admit` and `withdraw` while another one trains.

    Args:
        max_staleness: versions.
        batch: trajectories trained on between two versions.
        group: trajectories that start together, by one admission.
        quota: trajectories that one producer may start within a version; None leaves that open.
            With max_staleness 0 and an equal share for each, what is trained on does not depend on
            who is faster.
        version: of the policy now; the versions before it count as trained on.
        stale: what happens to samples of a larger lag: 'drop' gives them weight 0, 'down_weight'
            (1 + max_staleness) / (1 + lag).
    """

    # Of the samples weighed since the last metrics.
    _samples: int
    _beyond: int
    _lag_sum: int
    _lag_max: int
    _histogram: np.ndarray

    def __init__(
        self,
        max_staleness: int,
        batch: int,
        *,
        group: int = 1,
        quota: int | None = None,
        version: int = 0,
        stale: str = "drop",
    ) -> None:
        if max_staleness < 0 or batch < 1:
            raise ConfigError(
                f"max_staleness = {max_staleness} and batch = {batch}: give at least 0 and 1"
            )
        if stale not in ("drop", "down_weight"):
            raise ConfigError(f"stale = {stale!r}: expected 'drop' or 'down_weight'")
        self.max_staleness = max_staleness
        self.batch = batch
        self.group = group
        self.quota = quota
        self.stale = stale
        self._version = version
        self._admitted = version * batch
        self._started: Counter[str] = Counter()  # in this version, by producer
        self._lock = threading.Lock()
        self._forget()

    @property
    def version(self) -> int:
        """Current version; raise it after publishing, then let the queue ask for admission anew."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        with self._lock:
            self._version = version
            self._started.clear()

    @property
    def capacity(self) -> int:
        """Trajectories that may start now."""
        return (self.max_staleness + self._version + 1) * self.batch - self._admitted

    def admit(self, producer: str = "") -> bool:
        """Start a group of trajectories, if there is capacity for it."""
        with self._lock:
            if self.capacity < self.group:
                return False
            if self.quota is not None and self._started[producer] + self.group > self.quota:
                return False
            self._admitted += self.group
            self._started[producer] += self.group
            return True

    def withdraw(self, producer: str = "") -> None:
        """A group that was admitted is not trained on: discarded, dropped, or its worker died.

        Without this the capacity would shrink for ever.
        """
        with self._lock:
            self._admitted -= self.group
            self._started[producer] -= min(self.group, self._started[producer])

    def lag(self, versions: np.ndarray) -> np.ndarray:
        """Versions between the policies that made samples and the current one, in any shape."""
        lag: np.ndarray = np.maximum(self._version - np.asarray(versions), 0)
        return lag

    def weigh(self, versions: np.ndarray) -> np.ndarray:
        """Weights of samples in the loss, float32 in the shape of `versions`; counts their lags.

        Where all are 0 the trajectory need not be trained on: `withdraw` it.
        """
        lag = self.lag(versions)
        beyond = lag > self.max_staleness
        late = 0.0 if self.stale == "drop" else (1.0 + self.max_staleness) / (1.0 + lag)
        self._samples += lag.size
        self._lag_sum += int(lag.sum())
        self._lag_max = max(self._lag_max, int(lag.max(initial=0)))
        self._beyond += int(beyond.sum())
        self._histogram += np.bincount(
            np.minimum(lag, _HISTOGRAM - 1).ravel(), minlength=_HISTOGRAM
        )
        return np.where(beyond, late, 1.0).astype(np.float32)

    def metrics(self) -> dict[str, float]:
        """Of the samples weighed since the last call: mean and largest lag, shares of each lag,
        shares dropped and down-weighted; and what is admitted now.

        `lag_7` counts all lags from 7 on.
        """
        n = max(self._samples, 1)
        beyond = self._beyond / n
        result = {
            "lag_mean": self._lag_sum / n,
            "lag_max": float(self._lag_max),
            **{f"lag_{i}": count / n for i, count in enumerate(self._histogram.tolist())},
            "dropped": beyond if self.stale == "drop" else 0.0,
            "down_weighted": beyond if self.stale == "down_weight" else 0.0,
            "capacity": float(self.capacity),
        }
        self._forget()
        return result

    def _forget(self) -> None:
        self._samples = self._beyond = self._lag_sum = self._lag_max = 0
        self._histogram = np.zeros(_HISTOGRAM, np.int64)
