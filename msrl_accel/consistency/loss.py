"""The training graph as the loss uses it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from mindspore import Tensor, nn

from msrl_accel.networks import Weights
from msrl_accel.policy import Policy, SquashedPolicy
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


class _Sample(nn.Cell):
    """construct(*observations, noise) -> raw_action [B, D], log_prob [B]."""

    def __init__(self, policy: SquashedPolicy) -> None:
        super().__init__(auto_prefix=False)
        self.policy = policy

    def construct(self, *inputs: Tensor) -> Weights:
        return self.policy.sample(self.policy.weights, inputs[:-1], inputs[-1])


class LossPosition:
    """What the loss computes of the policy: by `Policy.evaluate` of given actions, log-probability
    and value; by `SquashedPolicy.sample` of given noise, raw action and log-probability.

    The other outputs of a result are those of `acted`: the loss does not compute them.
    """

    def __init__(self, policy: Policy) -> None:
        self.spec = policy.spec
        self.outputs = ("log_prob", "value")
        if isinstance(policy, SquashedPolicy):
            self.outputs = ("log_prob", "raw_action")
            self.cell: nn.Cell = _Sample(policy)
        else:
            self.cell = _Evaluate(policy)

    def act(self, observations: Observations, noise: np.ndarray, acted: ActResult) -> ActResult:
        squashed = self.spec.action.squashed
        given = np.ascontiguousarray(noise if squashed else acted.raw_action)
        inputs = (*check_inputs(self.spec, observations), given)
        outputs = self.cell(*[Tensor.from_numpy(x) for x in inputs])
        first, second = (np.array(o.asnumpy()) for o in outputs)
        if squashed:
            return replace(acted, raw_action=first, log_prob=second)
        return replace(acted, log_prob=first, value=second)
