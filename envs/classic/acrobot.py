"""Acrobot swing-up (Sutton 1996), the book's dynamics and one Runge-Kutta step, as in Gymnasium."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from msrl_accel.envs.classic.batched import BatchedEnv
from msrl_accel.envs.classic.numerics import scalar_square

DT = 0.2
GRAVITY = 9.8
MAX_SPEED_1 = 4 * np.pi
MAX_SPEED_2 = 9 * np.pi
# Both links have mass 1, length 1, centre of mass 0.5 and moment of inertia 1.
COM = 0.5
INERTIA = 1.0


class Acrobot(BatchedEnv):
    """State rows: angle of link 1 (0 hangs down), angle of link 2 to it, their velocities."""

    def __init__(self, env_id: str, num_envs: int, max_episode_steps: int | None = None) -> None:
        high = np.array([1.0, 1.0, 1.0, 1.0, MAX_SPEED_1, MAX_SPEED_2], np.float32)
        space = spaces.Box(-high, high, dtype=np.float32)
        super().__init__(env_id, num_envs, space, spaces.Discrete(3), max_episode_steps)

    def _sample(self, count: int) -> np.ndarray:
        return self._rng.uniform(-0.1, 0.1, (4, count)).astype(np.float32).astype(np.float64)

    def _observe(self, state: np.ndarray) -> np.ndarray:
        observations = np.empty((state.shape[1], 6), np.float32)
        observations[:, 0] = np.cos(state[0])
        observations[:, 1] = np.sin(state[0])
        observations[:, 2] = np.cos(state[1])
        observations[:, 3] = np.sin(state[1])
        observations[:, 4:] = state[2:].T
        return observations

    def _observe_initial(self, state: np.ndarray) -> np.ndarray:
        # Initial states are float32 in Gymnasium, and so are their sines.
        return self._observe(state.astype(np.float32))

    def _advance(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        torque = actions.astype(np.float64)
        torque -= 1.0
        state = _runge_kutta(self._state, torque)
        _wrap(state[:2])
        np.clip(state[2], -MAX_SPEED_1, MAX_SPEED_1, out=state[2])
        np.clip(state[3], -MAX_SPEED_2, MAX_SPEED_2, out=state[3])
        self._state = state
        terminated = -np.cos(state[0]) - np.cos(state[1] + state[0]) > 1.0
        return np.where(terminated, 0.0, -1.0), terminated


def _runge_kutta(state: np.ndarray, torque: np.ndarray) -> np.ndarray:
    """One step of length DT by the classical fourth-order method."""
    k1 = _derivative(state, torque)
    k2 = _derivative(state + DT / 2.0 * k1, torque)
    k3 = _derivative(state + DT / 2.0 * k2, torque)
    k4 = _derivative(state + DT * k3, torque)
    following: np.ndarray = state + DT / 6.0 * (k1 + 2 * k2 + 2 * k3 + k4)
    return following


def _derivative(state: np.ndarray, torque: np.ndarray) -> np.ndarray:
    """Time derivative of the state [4, N], in the order of operations of Gymnasium."""
    theta1, theta2, dtheta1, dtheta2 = state
    cos2, sin2 = np.cos(theta2), np.sin(theta2)
    d1 = COM**2 + (1.0 + COM**2 + 2 * COM * cos2) + INERTIA + INERTIA
    d2 = (COM**2 + COM * cos2) + INERTIA
    phi2 = COM * GRAVITY * np.cos(theta1 + theta2 - np.pi / 2.0)
    phi1 = (
        -COM * scalar_square(dtheta2) * sin2
        - 2 * COM * dtheta2 * dtheta1 * sin2
        + (COM + 1.0) * GRAVITY * np.cos(theta1 - np.pi / 2)
        + phi2
    )
    ratio = d2 / d1
    ratio *= phi1
    numerator = torque + ratio - COM * scalar_square(dtheta1) * sin2 - phi2
    result = np.empty_like(state)
    result[0] = dtheta1
    result[1] = dtheta2
    result[3] = numerator / (COM**2 + INERTIA - scalar_square(d2) / d1)
    result[2] = -(d2 * result[3] + phi1) / d1
    return result


def _wrap(angles: np.ndarray) -> None:
    """Bring angles into [-pi, pi] by whole turns, one at a time as Gymnasium does; in place."""
    turn = 2 * np.pi
    while (above := angles > np.pi).any():
        angles[above] -= turn
    while (below := angles < -np.pi).any():
        angles[below] += turn
