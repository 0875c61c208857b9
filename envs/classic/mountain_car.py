"""Mountain car (Moore 1990) with discrete and with continuous force, as in Gymnasium."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from msrl_accel.envs.base import Space
from msrl_accel.envs.classic.batched import BatchedEnv
from msrl_accel.envs.classic.numerics import WEAK_PYTHON_NUMBERS

MIN_POSITION = -1.2
MAX_POSITION = 0.6
MAX_SPEED = 0.07
GRAVITY = 0.0025


class _Car(BatchedEnv):
    """State rows: position, velocity."""

    supported_kwargs: ClassVar[frozenset[str]] = frozenset({"goal_velocity"})

    def __init__(
        self,
        env_id: str,
        num_envs: int,
        action_space: Space,
        max_episode_steps: int | None,
        goal_velocity: float,
    ) -> None:
        low = np.array([MIN_POSITION, -MAX_SPEED], np.float32)
        high = np.array([MAX_POSITION, MAX_SPEED], np.float32)
        space = spaces.Box(low, high, dtype=np.float32)
        super().__init__(env_id, num_envs, space, action_space, max_episode_steps)
        self._goal_velocity = goal_velocity

    def _sample(self, count: int) -> np.ndarray:
        state = np.zeros((2, count))
        state[0] = self._rng.uniform(-0.6, -0.4, count)
        return state

    def _observe(self, state: np.ndarray) -> np.ndarray:
        observations = np.empty((state.shape[1], 2), np.float32)
        observations[:] = state.T
        return observations


class MountainCar(_Car):
    """Actions 0, 1, 2 push left, not at all, right."""

    def __init__(
        self,
        env_id: str,
        num_envs: int,
        max_episode_steps: int | None = None,
        goal_velocity: float = 0,
    ) -> None:
        super().__init__(env_id, num_envs, spaces.Discrete(3), max_episode_steps, goal_velocity)

    def _advance(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        position, velocity = self._state
        force = (actions.astype(np.int64) - 1) * 0.001
        force += np.cos(3 * position) * -GRAVITY
        velocity += force
        _move(position, velocity)
        terminated = (position >= 0.5) & (velocity >= self._goal_velocity)
        return np.full(self.num_envs, -1.0), terminated


class MountainCarContinuous(_Car):
    """The action is a force in [-1, 1].

    Gymnasium keeps this state in float32 after the first step of an episode, and in float64
    before it; so do we.
    """

    def __init__(
        self,
        env_id: str,
        num_envs: int,
        max_episode_steps: int | None = None,
        goal_velocity: float = 0,
    ) -> None:
        actions = spaces.Box(-1.0, 1.0, (1,), np.float32)
        super().__init__(env_id, num_envs, actions, max_episode_steps, goal_velocity)

    def _advance(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        state, terminated = self._drive(self._state, actions, np.float64)
        if WEAK_PYTHON_NUMBERS:
            later = np.flatnonzero(self._elapsed)
            state[:, later], terminated[later] = self._drive(
                self._state[:, later], actions[later], np.float32
            )
        self._state[:] = state.astype(np.float32)
        exact = actions.astype(np.float64)
        rewards = np.where(terminated, 100.0, 0.0)
        rewards -= exact * exact * 0.1
        return rewards, terminated

    def _drive(
        self, state: np.ndarray, actions: np.ndarray, dtype: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """Successor of `state` [2, M] computed in `dtype`, and whether it is at the goal."""
        position, velocity = state.astype(dtype)
        clipped = np.clip(actions, -1.0, 1.0)
        push_dtype = np.float32 if WEAK_PYTHON_NUMBERS else np.float64
        slope = 0.0025 * np.cos((3 * position).astype(np.float64))
        force = (clipped.astype(push_dtype) * 0.0015 - slope.astype(push_dtype)).astype(np.float64)
        # A force beyond the bounds is replaced by a Python float, which widens the arithmetic.
        beyond = clipped != actions
        force[beyond] = clipped[beyond].astype(np.float64) * 0.0015 - slope[beyond]
        velocity += force.astype(dtype)
        _move(position, velocity)
        at_goal = (position >= dtype(0.45)) & (velocity >= dtype(self._goal_velocity))
        return np.stack([position, velocity]), at_goal


def _move(position: np.ndarray, velocity: np.ndarray) -> None:
    """Bound the speed, move, and stop at the left wall; in place."""
    np.clip(velocity, -MAX_SPEED, MAX_SPEED, out=velocity)
    position += velocity
    np.clip(position, MIN_POSITION, MAX_POSITION, out=position)
    velocity[(position == position.dtype.type(MIN_POSITION)) & (velocity < 0)] = 0
