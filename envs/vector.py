"""Gymnasium vector environments, in this process and in workers, behind the VectorEnv interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import gymnasium.vector
import numpy as np
from gymnasium.envs.registration import EnvSpec

from msrl_accel.envs.base import (
    Observations,
    StepResult,
    VectorEnv,
    observation_names,
    split_observation,
    stack_observations,
)
from msrl_accel.envs.factory import EnvFactory
from msrl_accel.envs.workers import WorkerVectorEnv
from msrl_accel.errors import EnvError, MsrlError

# The argument `autoreset_mode` came with Gymnasium 1.1; before it, every reset is next-step.
_SAME_STEP: dict[str, Any] = {}
if hasattr(gymnasium.vector, "AutoresetMode"):
    _SAME_STEP["autoreset_mode"] = gymnasium.vector.AutoresetMode.SAME_STEP


class GymnasiumVectorEnv(VectorEnv):
    """Adapter over any `gymnasium.vector.VectorEnv` that resets itself.

    Both automatic reset modes are exact. With same-step resets `next_observations` holds the final
    observation that Gymnasium puts into its infos. With next-step resets (Gymnasium's default)
    the step after an episode's end only resets: it is marked `valid=False`.
    Arrays are copies, never Gymnasium's buffers.

    Args:
        env: the vector environment; it is closed with this object.
        env_id: name for messages, by default that of its specification.
    """

    def __init__(
        self, env: gymnasium.vector.VectorEnv[Any, Any, Any], env_id: str | None = None
    ) -> None:
        self._env = env
        self.env_id = env_id or (env.spec.id if env.spec else type(env).__name__)
        self.num_envs = env.num_envs
        self.observation_space = env.single_observation_space
        self.action_space = env.single_action_space
        observation_names(self.observation_space)  # refuse unsupported spaces now
        self._same_step = _is_same_step(env, self.env_id)
        self._ended = np.zeros(self.num_envs, bool)

    def reset(self, seed: int | None = None) -> Observations:
        seeds: Any = seed
        if seed is not None and isinstance(
            self._env, (gymnasium.vector.SyncVectorEnv, gymnasium.vector.AsyncVectorEnv)
        ):
            # Independent streams: seed, seed + 1, ... would be shared with the next seed's run.
            seeds = [int(s) for s in np.random.SeedSequence(seed).generate_state(self.num_envs)]
        observation, _ = self._call("reset", seed=seeds)
        self._ended = np.zeros(self.num_envs, bool)
        observations = split_observation(self.observation_space, observation)
        self._check_observations(observations)
        return observations

    def step(self, actions: np.ndarray) -> StepResult:
        observation, rewards, terminated, truncated, infos = self._call("step", actions)
        observations = split_observation(self.observation_space, observation)
        terminated = np.array(terminated, bool)
        truncated = np.array(truncated, bool)
        ended = terminated | truncated
        successors = observations
        valid = np.ones(self.num_envs, bool)
        if not self._same_step:
            valid = ~self._ended
            self._ended = ended
        elif ended.any():
            successors = self._final_observations(observations, np.flatnonzero(ended), infos)
        rewards = np.array(rewards, np.float64)
        return self._checked(
            StepResult(observations, successors, rewards, terminated, truncated, valid)
        )

    def close(self) -> None:
        self._env.close()

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return getattr(self._env, name)(*args, **kwargs)
        except MsrlError:
            raise
        except Exception as error:
            raise EnvError(
                f"{self.env_id}: {name} raised {type(error).__name__}: {error}"
            ) from error

    def _final_observations(
        self, observations: Observations, ended: np.ndarray, infos: dict[str, Any]
    ) -> Observations:
        if "final_obs" not in infos:
            raise EnvError(
                f"{self.env_id} says that it resets in the same step but gives no "
                'info["final_obs"], without which truncated episodes cannot be valued'
            )
        final = infos["final_obs"]
        space = self.observation_space
        if isinstance(final, np.ndarray) and final.dtype == object:
            rows = stack_observations(space, [final[index] for index in ended])
        else:
            rows = tuple(entry[ended] for entry in split_observation(space, final))
        successors = tuple(entry.copy() for entry in observations)
        for successor, row in zip(successors, rows):
            successor[ended] = row
        return successors


def _is_same_step(env: gymnasium.vector.VectorEnv[Any, Any, Any], env_id: str) -> bool:
    mode = env.metadata.get("autoreset_mode")
    name = str(getattr(mode, "value", mode or "NextStep"))
    if name not in ("NextStep", "SameStep"):
        raise EnvError(
            f"{env_id}: autoreset mode {name} is not supported; create the vector environment "
            "with AutoresetMode.SAME_STEP or NEXT_STEP"
        )
    return name == "SameStep"


def make_sync(
    env_id: str, spec: EnvSpec, num_envs: int, kwargs: Mapping[str, Any] | None
) -> VectorEnv:
    """Environments stepped in turn in this process."""
    factories = [EnvFactory(env_id, spec, kwargs, index) for index in range(num_envs)]
    # The adapter copies, so Gymnasium need not.
    env = gymnasium.vector.SyncVectorEnv(factories, copy=False, **_SAME_STEP)
    return _adapt(env, env_id)


def make_async(
    env_id: str,
    spec: EnvSpec,
    num_envs: int,
    kwargs: Mapping[str, Any] | None,
    timeout: float,
) -> VectorEnv:
    """Environments in one process each."""
    factories = [
        EnvFactory(env_id, spec, kwargs, index, own_process=True) for index in range(num_envs)
    ]
    env = WorkerVectorEnv(env_id, factories, timeout, **_SAME_STEP)
    return _adapt(env, env_id)


def _adapt(env: gymnasium.vector.VectorEnv[Any, Any, Any], env_id: str) -> VectorEnv:
    try:
        return GymnasiumVectorEnv(env, env_id)
    except MsrlError:
        env.close()
        raise
