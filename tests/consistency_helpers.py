"""What the tests of the checker share: small policies, damaged runtimes, results."""

from __future__ import annotations

import numpy as np
from policy_helpers import ACTION_SPACES, VECTOR, options, spec_of

from msrl_accel.runtime.base import ActResult


def make_policy(action="discrete", observation_space=VECTOR, seed=3, **values):
    """A policy whose heads, biases and statistics are not near zero, as after training."""
    from msrl_accel.policy import Policy

    spec = spec_of(ACTION_SPACES[action], observation_space)
    policy = Policy(
        spec, options(**{"hidden_sizes": (16, 16), "activation": "relu", **values}), seed
    )
    rng = np.random.default_rng(seed)
    arrays = {
        name: (x + 0.1 * rng.standard_normal(x.shape)).astype(np.float32)
        for name, x in policy.arrays().items()
    }
    policy.load_arrays(arrays)
    return policy


class Changed:
    """A runtime whose results pass through a function."""

    def __init__(self, runtime, change):
        self.runtime, self.change = runtime, change
        self.spec, self.version = runtime.spec, runtime.version

    def load_weights(self, version, arrays):
        self.runtime.load_weights(version, arrays)

    def act(self, observations, noise):
        return self.change(self.runtime.act(observations, noise))

    def close(self):
        pass


def result(action=None, log_prob=None, value=None, raw=None, parameters=()):
    """An `ActResult` of a few rows; what is not given is zero."""
    rows = len(parameters[0])
    raw = np.zeros(rows, np.int32) if raw is None else np.asarray(raw)
    return ActResult(
        raw if action is None else np.asarray(action),
        np.zeros(rows, np.float32) if log_prob is None else np.asarray(log_prob, np.float32),
        np.zeros(rows, np.float32) if value is None else np.asarray(value, np.float32),
        raw,
        tuple(np.asarray(p, np.float32) for p in parameters),
    )
