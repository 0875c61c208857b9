"""From an environment id to environments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium

from msrl_accel.envs.base import VectorEnv
from msrl_accel.envs.classic import (
    Acrobot,
    BatchedEnv,
    CartPole,
    MountainCar,
    MountainCarContinuous,
    Pendulum,
)
from msrl_accel.envs.factory import find_spec, make_env
from msrl_accel.envs.threads import make_threads
from msrl_accel.envs.vector import make_async, make_sync
from msrl_accel.errors import EnvError

BACKENDS = ("auto", "sync", "async", "threads", "batched", "envpool")

AUTO_BATCHED_ENVS = 4
"""From this many environments on, backend "auto" steps the classic tasks with NumPy."""

_CONTROL = "gymnasium.envs.classic_control."
# Registered entry point -> batched class; whoever re-registers an id gets their own environment.
_BATCHED: dict[str, Any] = {
    _CONTROL + "cartpole:CartPoleEnv": CartPole,
    _CONTROL + "pendulum:PendulumEnv": Pendulum,
    _CONTROL + "acrobot:AcrobotEnv": Acrobot,
    _CONTROL + "mountain_car:MountainCarEnv": MountainCar,
    _CONTROL + "continuous_mountain_car:Continuous_MountainCarEnv": MountainCarContinuous,
}


def make_single(
    env_id: str, kwargs: Mapping[str, Any] | None = None, render_mode: str | None = None
) -> gymnasium.Env[Any, Any]:
    """One Gymnasium environment, for evaluation and rendering.

    `env_id` is any registered id or `module:EnvId`. Raises EnvError for an unknown id, a missing
    package, or arguments the environment rejects.
    """
    return make_env(find_spec(env_id), kwargs, render_mode)


def is_batched(env_id: str, kwargs: Mapping[str, Any] | None = None) -> bool:
    """Whether the NumPy-batched implementation exists for this id and these arguments."""
    spec = find_spec(env_id)
    cls = _BATCHED.get(str(spec.entry_point))
    if cls is None or spec.kwargs or spec.additional_wrappers:
        return False
    supported: frozenset[str] = cls.supported_kwargs | {"max_episode_steps"}
    return supported.issuperset(kwargs or {})


def make_vector(
    env_id: str,
    num_envs: int,
    *,
    kwargs: Mapping[str, Any] | None = None,
    backend: str = "auto",
    timeout: float = 60.0,
) -> VectorEnv:
    """N environments that step together.

    Args:
        env_id: any id `gymnasium.make` knows, or `module:EnvId`.
        num_envs: how many, at least 1.
        kwargs: arguments of the environment, as for `gymnasium.make`.
        backend: "sync" steps them in turn in this process, "async" each in a process of its own,
            "threads" each in a thread (for those that wait rather than compute), "batched" all at
            once with NumPy (classic control only), "envpool" with EnvPool; "auto" is "batched"
            where possible from `AUTO_BATCHED_ENVS` on, else "sync".
        timeout: seconds after which a silent environment of "async" or "threads" counts as hung.

    Raises EnvError for an unknown id or backend, num_envs below 1, or a missing package, and
    SpaceError for an observation space other than Box and one-level Dict.
    """
    if num_envs < 1:
        raise EnvError(f"num_envs is {num_envs}; at least 1 environment is needed")
    if backend not in BACKENDS:
        raise EnvError(f"backend {backend!r} is not known; choose one of {', '.join(BACKENDS)}")
    if backend == "envpool":
        from msrl_accel.envs.envpool import EnvPoolVectorEnv

        return EnvPoolVectorEnv(env_id, num_envs, kwargs)
    batched = is_batched(env_id, kwargs)
    if backend == "batched" and not batched:
        given = f" with {dict(kwargs)}" if kwargs else ""
        raise EnvError(
            f"{env_id}{given} has no NumPy-batched implementation; use backend sync or async"
        )
    if backend == "batched" or (backend == "auto" and batched and num_envs >= AUTO_BATCHED_ENVS):
        return _make_batched(env_id, num_envs, kwargs)
    if backend == "async":
        return make_async(env_id, find_spec(env_id), num_envs, kwargs, timeout)
    if backend == "threads":
        return make_threads(env_id, find_spec(env_id), num_envs, kwargs, timeout)
    return make_sync(env_id, find_spec(env_id), num_envs, kwargs)


def _make_batched(env_id: str, num_envs: int, kwargs: Mapping[str, Any] | None) -> BatchedEnv:
    spec = find_spec(env_id)
    arguments = dict(kwargs or {})
    limit = arguments.pop("max_episode_steps", spec.max_episode_steps)
    if limit == -1:  # Gymnasium's way to ask for no limit
        limit = None
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise EnvError(f"max_episode_steps is {limit!r}; it must be a positive integer, or -1")
    env: BatchedEnv = _BATCHED[str(spec.entry_point)](
        env_id, num_envs, max_episode_steps=limit, **arguments
    )
    return env
