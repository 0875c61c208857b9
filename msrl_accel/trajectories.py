"""On-policy trajectories and the estimators computed from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

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

    def with_values(self, values: np.ndarray) -> Trajectories:
        """The same steps with other values [T, N] of their observations.

        A step's next value becomes that of the following step. At the last step, and where an
        episode was cut, it stays as collected: those observations are not kept.
        """
        next_values = self.next_values.copy()
        follows = ~(self.terminated | self.truncated)[:-1] & self.valid[1:]
        next_values[:-1][follows] = values[1:][follows]
        return replace(self, values=values, next_values=next_values)


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


class VTrace(NamedTuple):
    """Off-policy estimates, [T, N] float32, 0 at steps that are not valid."""

    corrections: np.ndarray
    """v_t - V(s_t), to be added to the value for what it is trained towards."""
    advantages: np.ndarray
    """rho_t (r_t + gamma v_{t+1} - V_t), of the policy gradient."""


def vtrace(
    rewards: np.ndarray,
    values: np.ndarray,
    next_values: np.ndarray,
    log_ratios: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    valid: np.ndarray,
    gamma: float,
    *,
    trace_lambda: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> VTrace:
    """V-trace (Espeholt et al. 2018, arXiv:1802.01561, eq. 1 and remark 2); arrays are [T, N].

    With x_t = pi(a_t) / mu(a_t), rho_t = min(rho_bar, x_t) and c_t = lambda min(c_bar, x_t):
    delta_t = rho_t (r_t + gamma V(s_{t+1}) (1 - terminated_t) - V(s_t));
    v_t = V(s_t) + delta_t + gamma c_t (1 - terminated_t)(1 - truncated_t)(v_{t+1} - V(s_{t+1})).
    With ratios of 1, v_t - V(s_t) is `gae` of the same lambda.

    Args:
        values, next_values: of the policy that is trained; as in `Trajectories`.
        log_ratios: log pi - log mu, not clipped: the trained policy against the one that acted.
        valid: steps that are not take no part, whatever their numbers are.
    """
    # Clipped before the exponential, which cannot overflow then.
    log_ratios = np.where(valid, log_ratios, 0.0).astype(np.float64)
    rho = np.exp(np.minimum(log_ratios, np.log(rho_bar)))
    c = trace_lambda * np.exp(np.minimum(log_ratios, np.log(c_bar)))
    error = np.where(valid, rewards + gamma * next_values * ~terminated - values, 0.0)
    follows = gamma * ~(terminated | truncated)
    corrections = np.empty(error.shape, np.float32)
    advantages = np.empty(error.shape, np.float32)
    running = np.zeros(error.shape[1:])
    for t in range(len(error) - 1, -1, -1):
        future = np.where(valid[t], follows[t] * running, 0.0)
        advantages[t] = rho[t] * (error[t] + future)
        running = rho[t] * error[t] + c[t] * future
        corrections[t] = running
    return VTrace(corrections, advantages)
