"""Cart-pole (Barto, Sutton and Anderson 1983), Euler integration as in Gymnasium."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
from gymnasium import spaces

from msrl_accel.envs.classic.batched import BatchedEnv

GRAVITY = 9.8
MASS_POLE = 0.1
MASS_TOTAL = MASS_POLE + 1.0
LENGTH = 0.5  # half of the pole
POLE_MOMENT = MASS_POLE * LENGTH
FORCE = 10.0
TAU = 0.02  # seconds a step
ANGLE_LIMIT = 12 * 2 * math.pi / 360
POSITION_LIMIT = 2.4


class CartPole(BatchedEnv):
    """State rows: position, velocity, pole angle, angular velocity."""

    supported_kwargs: ClassVar[frozenset[str]] = frozenset({"sutton_barto_reward"})

    def __init__(
        self,
        env_id: str,
        num_envs: int,
        max_episode_steps: int | None = None,
        sutton_barto_reward: bool = False,
    ) -> None:
        high = np.array([POSITION_LIMIT * 2, np.inf, ANGLE_LIMIT * 2, np.inf], np.float32)
        space = spaces.Box(-high, high, dtype=np.float32)
        super().__init__(env_id, num_envs, space, spaces.Discrete(2), max_episode_steps)
        self._sutton_barto = sutton_barto_reward

    def _sample(self, count: int) -> np.ndarray:
        return self._rng.uniform(-0.05, 0.05, (4, count))

    def _observe(self, state: np.ndarray) -> np.ndarray:
        observations = np.empty((state.shape[1], 4), np.float32)
        observations[:] = state.T
        return observations

    def _advance(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        position, velocity, angle, spin = self._state
        cos, sin = np.cos(angle), np.sin(angle)
        force = np.where(actions == 1, FORCE, -FORCE)

        temp = np.square(spin)
        temp *= POLE_MOMENT
        temp *= sin
        temp += force
        temp /= MASS_TOTAL

        denominator = np.square(cos)
        denominator *= MASS_POLE
        denominator /= MASS_TOTAL
        np.subtract(4.0 / 3.0, denominator, out=denominator)
        denominator *= LENGTH
        spin_rate = sin
        spin_rate *= GRAVITY
        spin_rate -= cos * temp
        spin_rate /= denominator

        acceleration = POLE_MOMENT * spin_rate
        acceleration *= cos
        acceleration /= MASS_TOTAL
        np.subtract(temp, acceleration, out=acceleration)

        position += TAU * velocity
        velocity += TAU * acceleration
        angle += TAU * spin
        spin += TAU * spin_rate

        terminated = (np.abs(position) > POSITION_LIMIT) | (np.abs(angle) > ANGLE_LIMIT)
        if self._sutton_barto:
            rewards = np.where(terminated, -1.0, 0.0)
        else:
            rewards = np.ones(self.num_envs)
        return rewards, terminated
