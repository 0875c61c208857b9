"""Running statistics of a policy's observations, kept in step with the policy graph."""

from __future__ import annotations

from typing import Any

from msrl_accel.normalize import RunningMeanStd
from msrl_accel.policy import Policy
from msrl_accel.spaces import Observations


class ObservationStatistics:
    """Float64 mean and variance of every observation that is not an image.

    The graph's constants change only between iterations, so that a rollout and the update that
    follows see the same policy.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.statistics = {
            o.name: RunningMeanStd(o.shape) for o in policy.spec.observations if o.dtype != "uint8"
        }

    def update(self, observations: Observations) -> None:
        """Add rows [R, ...] of observations and hand the new statistics to the policy."""
        for spec, rows in zip(self.policy.spec.observations, observations):
            if spec.name in self.statistics:
                statistics = self.statistics[spec.name]
                statistics.update(rows)
                self.policy.set_normalizer(spec.name, statistics.mean, statistics.var)

    def state(self) -> dict[str, Any]:
        return {name: s.state() for name, s in self.statistics.items()}

    def restore(self, state: dict[str, Any]) -> None:
        for name, s in self.statistics.items():
            s.restore(state[name])
