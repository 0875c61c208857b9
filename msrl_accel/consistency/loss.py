"""The training graph as the loss uses it."""

from __future__ import annotations

import numpy as np
from mindspore import Tensor, nn

from msrl_accel.networks import Weights
from msrl_accel.policy import Policy
from msrl_accel.runtime.base import ActResult, check_inputs
from msrl_accel.spaces import Observations


class _Evaluate(nn.Cell):
    """construct(*observations, raw_action) -> log_prob [B], value [B]."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(auto_prefix=False)
        self.policy = policy

    def construct(self, *inputs: Tensor) -> Weights:
        log_prob, _, value = self.policy.evaluate(self.policy.weights, inputs[:-1], inputs[-1])
        return log_prob, value


class LossPosition:
    """Log-probability and value of given actions, by `Policy.evaluate`.

    The other outputs of a result are those of `acted`: the loss does not compute them.
    """

    def __init__(self, policy: Policy) -> None:
        self.spec = policy.spec
        self.evaluate = _Evaluate(policy)

    def act(self, observations: Observations, acted: ActResult) -> ActResult:
        raw = np.ascontiguousarray(acted.raw_action)
        inputs = (*check_inputs(self.spec, observations), raw)
        outputs = self.evaluate(*[Tensor.from_numpy(x) for x in inputs])
        log_prob, value = (np.array(o.asnumpy()) for o in outputs)
        return ActResult(acted.action, log_prob, value, acted.raw_action, acted.parameters)
