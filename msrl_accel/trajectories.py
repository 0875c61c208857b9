"""On-policy trajectories and the estimators computed from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from msrl_accel.spaces import Observations, PolicySpec


@dataclass
class Trajectories:
    """T steps of N environments. Arrays are [T, N, ...]; values[t] is of observations[t]."""

    observations: Observations
    raw_actions: np.ndarray
    log_probs: np.ndarray
    values: np.ndarray
    rewards: np.ndarray
    """As the loss sees them (normalised where that is asked for)."""
    next_values: np.ndarray
    """Value of each step's true successor: the final observation's where an episode ended."""
    terminated: np.ndarray
    truncated: np.ndarray
    valid: np.ndarray
    """False marks fake transitions (autoreset), which training leaves out."""
    versions: np.ndarray
    """Of the weights that chose each action, int32."""

    @classmethod
    def empty(cls, spec: PolicySpec, n_steps: int, n_envs: int) -> Trajectories:
        """Uninitialised arrays for a policy's trajectories."""
        shape, action = (n_steps, n_envs), spec.action
        return cls(
            observations=tuple(np.empty((*shape, *o.shape), o.dtype) for o in spec.observations),
            raw_actions=np.empty((*shape, *action.raw_shape), action.raw_dtype),
            log_probs=np.empty(shape, np.float32),
            values=np.empty(shape, np.float32),
            rewards=np.empty(shape, np.float64),
            next_values=np.empty(shape, np.float32),
            terminated=np.empty(shape, bool),
            truncated=np.empty(shape, bool),
            valid=np.empty(shape, bool),
            versions=np.empty(shape, np.int32),
        )

    def flat(self, array: np.ndarray) -> np.ndarray:
        """[T, N, ...] -> [valid rows, ...]."""
        rows = array.reshape((-1, *array.shape[2:]))
        return rows if self.valid.all() else rows[self.valid.reshape(-1)]


def gae(
    rewards: np.ndarray,
    values: np.ndarray,
    next_values: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    gamma: float,
    gae_lambda: float,
) -> np.ndarray:
    """Generalised advantage estimates (Schulman et al. 2016, arXiv:1506.02438), [T, N] float32.

    delta_t = r_t + gamma V(s_{t+1}) (1 - terminated_t) - V(s_t);
    A_t = delta_t + gamma lambda (1 - terminated_t)(1 - truncated_t) A_{t+1}.
    """
    delta = rewards + gamma * next_values * ~terminated - values
    decay = gamma * gae_lambda * ~(terminated | truncated)
    advantages = np.empty(delta.shape, np.float32)
    running = np.zeros(delta.shape[1:])
    for t in range(len(delta) - 1, -1, -1):
        running = delta[t] + decay[t] * running
        advantages[t] = running
    return advantages
