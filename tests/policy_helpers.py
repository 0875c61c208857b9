"""What the tests of graphs share: small spaces, options, finite differences."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from msrl_accel.config import PolicyConfig
from msrl_accel.spaces import PolicySpec

VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float32)

ACTION_SPACES = {
    "discrete": spaces.Discrete(4, start=2),
    "one_choice": spaces.Discrete(1, start=2),
    "multi_discrete": spaces.MultiDiscrete(
        np.array([[3, 2], [1, 4]]), start=np.array([[1, 0], [5, -2]])
    ),
    "multi_binary": spaces.MultiBinary((2, 3)),
    "box": spaces.Box(np.array([-1.0, 0.0]), np.array([3.0, 0.5]), dtype=np.float64),
    "half_open_box": spaces.Box(
        np.array([[-np.inf, -2.0], [0.0, -np.inf]], np.float32),
        np.array([[1.0, np.inf], [1.0, np.inf]], np.float32),
    ),
}


def spec_of(action_space, observation_space=VECTOR):
    return PolicySpec.from_spaces(observation_space, action_space)


def options(**values):
    return PolicyConfig(**{"hidden_sizes": (8,), **values})


def numerical_gradient(function, x, step=1e-5):
    """Central differences of a scalar function at float64 `x`, changed one entry at a time."""
    x = np.array(x, np.float64)
    gradient = np.zeros_like(x)
    for index in np.ndindex(*x.shape):
        kept = x[index]
        x[index] = kept + step
        above = function(x)
        x[index] = kept - step
        gradient[index] = (above - function(x)) / (2 * step)
        x[index] = kept
    return gradient


def log_softmax(x):
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
