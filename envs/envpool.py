"""EnvPool (Weng et al. 2022, arXiv:2206.10558): C++ environments, an optional package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from msrl_accel.envs.base import (
    Observations,
    StepResult,
    VectorEnv,
    observation_names,
    split_observation,
)
from msrl_accel.errors import EnvError


class EnvPoolVectorEnv(VectorEnv):
    """Environments of EnvPool, which resets an environment in the step after its episode ended.

    That step ignores the action and is marked `valid=False`. EnvPool takes seeds only when it is
    created, so a reset with a seed creates it anew.
    """

    def __init__(self, env_id: str, num_envs: int, kwargs: Mapping[str, Any] | None = None) -> None:
        try:
            import envpool  # type: ignore[import-not-found]
        except ImportError as error:
            raise EnvError(
                "backend envpool needs EnvPool, which is not installed: pip install envpool"
            ) from error
        if env_id not in envpool.list_all_envs():
            raise EnvError(f"EnvPool has no environment {env_id!r}; use backend sync or async")
        self._make = envpool.make
        self._kwargs = dict(kwargs or {})
        self.env_id = env_id
        self.num_envs = num_envs
        self._env = self._create(seed=None)
        self.observation_space = self._env.observation_space
        self.action_space = self._env.action_space
        observation_names(self.observation_space)
        self._ended = np.zeros(num_envs, bool)

    def _create(self, seed: int | None) -> Any:
        arguments = {**self._kwargs, "num_envs": self.num_envs}
        if seed is not None:
            arguments["seed"] = seed
        try:
            return self._make(self.env_id, env_type="gymnasium", **arguments)
        except Exception as error:
            raise EnvError(
                f"EnvPool cannot make {self.env_id} with {arguments}: {error}"
            ) from error

    def reset(self, seed: int | None = None) -> Observations:
        if seed is not None:
            self._env.close()
            self._env = self._create(seed)
        observation, _ = self._env.reset()
        self._ended = np.zeros(self.num_envs, bool)
        observations = split_observation(self.observation_space, observation)
        self._check_observations(observations)
        return observations

    def step(self, actions: np.ndarray) -> StepResult:
        observation, rewards, terminated, truncated, _ = self._env.step(np.asarray(actions))
        observations = split_observation(self.observation_space, observation)
        valid = ~self._ended
        terminated = np.array(terminated, bool) & valid
        truncated = np.array(truncated, bool) & valid
        self._ended = terminated | truncated
        rewards = np.array(rewards, np.float64)
        return self._checked(
            StepResult(observations, observations, rewards, terminated, truncated, valid)
        )

    def close(self) -> None:
        self._env.close()
