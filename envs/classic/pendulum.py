"""Pendulum swing-up with a bounded torque, as in Gymnasium."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from gymnasium import spaces

from msrl_accel.envs.classic.batched import BatchedEnv
from msrl_accel.envs.classic.numerics import SCALAR_FLOAT, scalar_square, scalar_square32

MAX_SPEED = 8
MAX_TORQUE = 2.0
DT = 0.05


class Pendulum(BatchedEnv):
    """State rows: angle (0 is upright), angular velocity. Mass and length are 1."""

    supported_kwargs: ClassVar[frozenset[str]] = frozenset({"g"})

    def __init__(
        self,
        env_id: str,
        num_envs: int,
        max_episode_steps: int | None = None,
        g: float = 10.0,
    ) -> None:
        high = np.array([1.0, 1.0, MAX_SPEED], np.float32)
        super().__init__(
            env_id,
            num_envs,
            spaces.Box(-high, high, dtype=np.float32),
            spaces.Box(-MAX_TORQUE, MAX_TORQUE, (1,), np.float32),
            max_episode_steps,
        )
        self._gravity = g

    def _sample(self, count: int) -> np.ndarray:
        high = np.array([[np.pi], [1.0]])
        return self._rng.uniform(-high, high, (2, count))

    def _observe(self, state: np.ndarray) -> np.ndarray:
        observations = np.empty((state.shape[1], 3), np.float32)
        observations[:, 0] = np.cos(state[0])
        observations[:, 1] = np.sin(state[0])
        observations[:, 2] = state[1]
        return observations

    def _advance(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        angle, speed = self._state
        torque = np.clip(actions, -MAX_TORQUE, MAX_TORQUE)
        effort = 0.001 * scalar_square32(torque)
        # Whether a float32 torque times 3.0 stays float32 depends on the NumPy version.
        push = 3.0 * torque.astype(SCALAR_FLOAT, copy=False)

        wrapped = angle + np.pi
        wrapped %= 2 * np.pi
        wrapped -= np.pi
        cost = scalar_square(wrapped)
        cost += 0.1 * scalar_square(speed)
        cost += effort

        rate = np.sin(angle)
        rate *= 3 * self._gravity / 2.0
        rate += push
        rate *= DT
        speed += rate
        np.clip(speed, -MAX_SPEED, MAX_SPEED, out=speed)
        angle += speed * DT
        return -cost, np.zeros(self.num_envs, bool)
