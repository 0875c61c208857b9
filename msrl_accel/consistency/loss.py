"""The training graph as the loss uses it."""

from __future__ import annotations

import numpy as np
from mindspore import Tensor

from msrl_accel.learner import EvaluateActions
from msrl_accel.policy import Policy
from msrl_accel.runtime.base import ActResult, check_inputs
from msrl_accel.spaces import Observations


class LossPosition:
    """Log-probability and value of given actions, by `Policy.evaluate`.

    The other outputs of a result are those of `acted`: the loss does not compute them.
    """

    def __init__(self, policy: Policy) -> None:
        self.spec = policy.spec
        self.evaluate = EvaluateActions(policy)

    def act(self, observations: Observations, acted: ActResult) -> ActResult:
        raw = np.ascontiguousarray(acted.raw_action)
        inputs = (*check_inputs(self.spec, observations), raw)
        outputs = self.evaluate(*[Tensor.from_numpy(x) for x in inputs])
        log_prob, value = (np.array(o.asnumpy()) for o in outputs)
        return ActResult(acted.action, log_prob, value, acted.raw_action, acted.parameters)
