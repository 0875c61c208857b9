"""A policy that takes the learner's newer weights by itself, and counts what its calls cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from msrl_accel.pipeline.heartbeat import Heartbeat, Stage
from msrl_accel.publish import WeightStore
from msrl_accel.runtime.base import ActResult, PolicyRuntime
from msrl_accel.spaces import Observations


@dataclass
class Calls:
    """Of a runtime, since they were last taken."""

    seconds: float = 0.0
    slowest: float = 0.0
    count: int = 0
    rows: int = 0


class FollowingRuntime:
    """Takes newer weights before it acts, and shows that its worker is alive.

    Args:
        runtime: acts.
        store: where newer weights come from; None where the runtime takes them by itself.
        heartbeat: beats at every call.
    """

    def __init__(
        self, runtime: PolicyRuntime, store: WeightStore | None, heartbeat: Heartbeat
    ) -> None:
        self.runtime = runtime
        self.spec = runtime.spec
        self.version = runtime.version
        self._store = store
        self._heartbeat = heartbeat
        self._calls = Calls()

    def act(self, observations: Observations, noise: np.ndarray) -> ActResult:
        start = self._heartbeat.beat(Stage.INFERENCE)
        newer = None if self._store is None else self._store.read(newer_than=self.version)
        if newer is not None:
            self.load_weights(*newer)
        result = self.runtime.act(observations, noise)
        self.version = self.runtime.version
        seconds = self._heartbeat.beat(Stage.STEP) - start
        calls = self._calls
        calls.seconds += seconds
        calls.slowest = max(calls.slowest, seconds)
        calls.count += 1
        calls.rows += len(noise)
        return result

    def load_weights(self, version: int, arrays: Mapping[str, np.ndarray]) -> None:
        self.runtime.load_weights(version, arrays)
        self.version = version

    def take_calls(self) -> Calls:
        """What the calls since the last time cost."""
        calls, self._calls = self._calls, Calls()
        return calls

    def close(self) -> None:
        self.runtime.close()
