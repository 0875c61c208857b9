"""The part of a NumPy-batched environment that does not depend on its dynamics."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from msrl_accel.envs.base import Observations, Space, StepResult, VectorEnv
from msrl_accel.errors import EnvError


class BatchedEnv(VectorEnv):
    """N copies of one classic-control task, stepped with array operations alone.

    Dynamics follow Gymnasium's operation by operation, so that the same state and action give the
    same bits. Episodes restart in the step that ends them; `next_observations` then holds the
    final observation. The variables of the state are the rows of one float64 array [S, N].
    """

    supported_kwargs: ClassVar[frozenset[str]] = frozenset()
    """Keyword arguments of the Gymnasium environment this class understands."""

    def __init__(
        self,
        env_id: str,
        num_envs: int,
        observation_space: Space,
        action_space: Space,
        max_episode_steps: int | None = None,
    ) -> None:
        self.env_id = env_id
        self.num_envs = num_envs
        self.observation_space = observation_space
        self.action_space = action_space
        self._limit = max_episode_steps
        self._rng = np.random.default_rng()
        self._elapsed = np.zeros(num_envs, np.int64)
        self._state = self._sample(num_envs)

    @abstractmethod
    def _sample(self, count: int) -> np.ndarray:
        """Draw initial states [S, count]."""

    @abstractmethod
    def _advance(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Move `self._state` one step; return rewards float64 [N] and terminated bool [N]."""

    @abstractmethod
    def _observe(self, state: np.ndarray) -> np.ndarray:
        """New float32 observations [M, ...] of the states [S, M]."""

    def _observe_initial(self, state: np.ndarray) -> np.ndarray:
        """Observations of states fresh from `_sample`."""
        return self._observe(state)

    def reset(self, seed: int | None = None) -> Observations:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self._state = self._sample(self.num_envs)
        self._elapsed.fill(0)
        return (self._observe_initial(self._state),)

    def step(self, actions: np.ndarray) -> StepResult:
        rewards, terminated = self._advance(self._check_actions(actions))
        self._elapsed += 1
        if self._limit is None:
            truncated = np.zeros(self.num_envs, bool)
        else:
            truncated = self._elapsed >= self._limit
        successors = (self._observe(self._state),)
        observations = successors
        ended = np.flatnonzero(terminated | truncated)
        if ended.size:
            fresh = self._sample(ended.size)
            self._state[:, ended] = fresh
            self._elapsed[ended] = 0
            observations = (successors[0].copy(),)
            observations[0][ended] = self._observe_initial(fresh)
        valid = np.ones(self.num_envs, bool)
        return self._checked(
            StepResult(observations, successors, rewards, terminated, truncated, valid)
        )

    def state(self) -> dict[str, Any]:
        return {
            "dynamics": self._state.copy(),
            "elapsed": self._elapsed.copy(),
            "rng": self._rng.bit_generator.state,
        }

    def restore(self, state: Mapping[str, Any]) -> Observations:
        dynamics = np.array(state["dynamics"], np.float64)
        if dynamics.shape != self._state.shape:
            raise EnvError(
                f"{self.env_id}: the saved state has shape {dynamics.shape}, this environment "
                f"{self._state.shape}; resume with the same environment and number of environments"
            )
        self._state = dynamics
        self._elapsed = np.array(state["elapsed"], np.int64)
        self._rng.bit_generator.state = state["rng"]
        observations = self._observe(self._state)
        fresh = np.flatnonzero(self._elapsed == 0)
        observations[fresh] = self._observe_initial(self._state[:, fresh])
        return (observations,)

    def close(self) -> None:
        """Nothing is held open."""

    def _check_actions(self, actions: np.ndarray) -> np.ndarray:
        """Actions [N] of a Discrete space, or float32 [N] of a one-dimensional Box."""
        space = self.action_space
        array = np.asarray(actions)
        if array.shape != (self.num_envs, *(space.shape or ())):
            raise EnvError(
                f"{self.env_id}: actions have shape {array.shape}, expected "
                f"{(self.num_envs, *(space.shape or ()))}"
            )
        if not isinstance(space, spaces.Discrete):
            return array.astype(np.float32, copy=False)[:, 0]
        if array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= space.n:
            raise EnvError(
                f"{self.env_id}: actions must be integers from 0 to {space.n - 1}, got "
                f"{array.dtype} between {array.min()} and {array.max()}"
            )
        return array
