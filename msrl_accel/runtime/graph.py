"""The training graph itself as a runtime."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from mindspore import Tensor

from msrl_accel.policy import Policy
from msrl_accel.runtime.base import ActResult, check_inputs
from msrl_accel.spaces import Observations


class GraphRuntime:
    """Runs a `Policy` Cell; each batch size compiles once (about half a second).

    The weights are the Cell's own Parameters: training in the same process needs no copy.
    """

    def __init__(self, policy: Policy, version: int = 0) -> None:
        self.policy = policy
        self.spec = policy.spec
        self.version = version

    def load_weights(self, version: int, arrays: Mapping[str, np.ndarray]) -> None:
        self.policy.load_arrays(arrays)
        self.version = version

    def act(self, observations: Observations, noise: np.ndarray) -> ActResult:
        inputs = (*check_inputs(self.spec, observations, noise), np.ascontiguousarray(noise))
        # from_numpy shares memory: safe, since reading the outputs waits for the graph.
        outputs = self.policy(*[Tensor.from_numpy(x) for x in inputs])
        return ActResult.of(self.spec, [np.array(o.asnumpy()) for o in outputs])

    def close(self) -> None:
        """Nothing to release."""
