"""What the tests of graphs share: small spaces, options, finite differences."""

from __future__ import annotations

from contextlib import contextmanager

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


def decided_arrays(policy, rng, spread):
    """Weights whose heads and biases are as large as after training: decided logits and means."""
    arrays = policy.arrays()
    for name, value in arrays.items():
        if name.startswith(("actor", "critic", "log_std")) or name.endswith("bias"):
            arrays[name] = rng.normal(0, spread, value.shape).astype(np.float32)
    return arrays


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


def gae_by_definition(rewards, values, next_values, terminated, truncated, gamma, lam):
    """Sum over l of (gamma lambda)^l delta_{t+l}, up to the end of the episode or of the batch."""
    steps, envs = rewards.shape
    advantages = np.zeros((steps, envs))
    for n in range(envs):
        for t in range(steps):
            for k in range(t, steps):
                bootstrap = 0.0 if terminated[k, n] else gamma * float(next_values[k, n])
                delta = float(rewards[k, n]) + bootstrap - float(values[k, n])
                advantages[t, n] += (gamma * lam) ** (k - t) * delta
                if terminated[k, n] or truncated[k, n]:
                    break
    return advantages


def vtrace_by_definition(
    rewards, values, next_values, log_ratios, terminated, truncated, valid, gamma, lam, rho, c
):
    """Eq. 1 of the paper, one sum a step: gamma^(t-s) (c_s ... c_(t-1)) delta_t, with v - V beside.

    Returns corrections v_s - V(s_s), and advantages rho_s (r_s + gamma v_(s+1) - V(s_s)).
    """
    steps, envs = rewards.shape

    def rho_delta(t, n):
        ratio = min(rho, np.exp(min(float(log_ratios[t, n]), 50.0)))
        after = 0.0 if terminated[t, n] else gamma * float(next_values[t, n])
        return ratio, float(rewards[t, n]) + after - float(values[t, n])

    corrections, advantages = np.zeros((steps, envs)), np.zeros((steps, envs))
    for n in range(envs):
        for s in range(steps):
            weight = 1.0
            for t in range(s, steps):
                if not valid[t, n]:
                    break
                ratio, delta = rho_delta(t, n)
                corrections[s, n] += weight * ratio * delta
                if terminated[t, n] or truncated[t, n]:
                    break
                weight *= gamma * lam * min(c, np.exp(min(float(log_ratios[t, n]), 50.0)))
        for s in range(steps):
            if not valid[s, n]:
                continue
            ratio, delta = rho_delta(s, n)
            ended = terminated[s, n] or truncated[s, n] or s == steps - 1
            advantages[s, n] = ratio * (delta + (0 if ended else gamma * corrections[s + 1, n]))
    return corrections, advantages


class CompilationCount:
    def __init__(self):
        self.count = 0


@contextmanager
def count_compilations():
    """Counts what MindSpore's graph compiler is asked to compile meanwhile."""
    from mindspore.graph import api

    executor = api._cell_graph_executor
    backend = executor._graph_executor
    counter = CompilationCount()

    class Counting:
        def compile(self, *args, **kwargs):
            counter.count += 1
            return backend.compile(*args, **kwargs)

        def __call__(self, *args, **kwargs):
            return backend(*args, **kwargs)

        def __getattr__(self, name):
            return getattr(backend, name)

    executor._graph_executor = Counting()
    try:
        yield counter
    finally:
        executor._graph_executor = backend
