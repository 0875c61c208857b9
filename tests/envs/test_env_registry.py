"""Environment ids, backends and what is said when one cannot be had."""

from __future__ import annotations

import sys
import types
from typing import Any

import faulty_envs
import gymnasium
import numpy as np
import pytest

from msrl_accel.envs import (
    GymnasiumVectorEnv,
    is_batched,
    make_single,
    make_vector,
    split_observation,
    stack_observations,
)
from msrl_accel.envs.classic import BatchedEnv, CartPole
from msrl_accel.envs.registry import AUTO_BATCHED_ENVS
from msrl_accel.errors import EnvError

TOYS = ("Discrete", "MultiDiscrete", "MultiBinary", "Box", "Image", "Dict")


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("CartPol-v1", "CartPole-v1"),
        ("CartPole-v7", r"`v0`, `v1`"),
        ("LunarLander-v2", r"deprecated.*LunarLander-v3"),
        ("Nowhere/Thing-v0", "Nowhere"),
        ("not an id", "not an id"),
        ("", "unknown environment"),
        ("no_such_module:Thing-v0", "no_such_module.*PYTHONPATH"),
        ("faulty_envs:Missing-v0", "Missing-v0"),
    ],
)
def test_unknown_ids_say_what_is_near(env_id: str, message: str) -> None:
    for make in (make_single, lambda name: make_vector(name, 2), is_batched):
        with pytest.raises(EnvError, match=message):
            make(env_id)


@pytest.mark.parametrize("num_envs", [0, -3])
def test_at_least_one_environment(num_envs: int) -> None:
    with pytest.raises(EnvError, match=f"num_envs is {num_envs}"):
        make_vector("CartPole-v1", num_envs)


def test_an_unknown_backend_lists_the_known() -> None:
    with pytest.raises(EnvError, match="sync, async, threads, batched"):
        make_vector("CartPole-v1", 2, backend="fibers")


def test_auto_takes_the_batched_implementation_for_many_environments() -> None:
    few = make_vector("CartPole-v1", AUTO_BATCHED_ENVS - 1)
    many = make_vector("CartPole-v1", AUTO_BATCHED_ENVS)
    assert isinstance(few, GymnasiumVectorEnv)
    assert isinstance(many, CartPole)
    unknown = {"render_mode": "rgb_array"}
    assert isinstance(make_vector("CartPole-v1", 16, kwargs=unknown), GymnasiumVectorEnv)
    assert is_batched("CartPole-v1")
    assert not is_batched("CartPole-v1", unknown)
    assert isinstance(make_vector("gymnasium:CartPole-v1", 16), BatchedEnv)


def test_a_task_without_batched_implementation_is_refused() -> None:
    with pytest.raises(EnvError, match="no NumPy-batched"):
        make_vector("msrl_accel.envs.toy:IdentityBox-v0", 2, backend="batched")


def test_an_id_registered_anew_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = gymnasium.envs.registration.EnvSpec("CartPole-v1", "faulty_envs:Counter")
    monkeypatch.setitem(gymnasium.registry, "CartPole-v1", spec)
    assert not is_batched("CartPole-v1")
    assert make_vector("CartPole-v1", 16).observation_space.shape == (2,)


@pytest.mark.parametrize("limit", [0, 2.5, "x"])
def test_a_bad_time_limit_is_named(limit: Any) -> None:
    with pytest.raises(EnvError, match="max_episode_steps"):
        make_vector("CartPole-v1", 16, kwargs={"max_episode_steps": limit})


def test_rejected_arguments_are_shown() -> None:
    with pytest.raises(EnvError, match=r"CartPole-v1 cannot be made with .*gravitas"):
        make_vector("CartPole-v1", 2, kwargs={"gravitas": 3})


def test_a_missing_package_names_the_extra() -> None:
    for extra in ("box2d", "mujoco"):
        name = f"Needs_{extra}-v0"
        module = types.ModuleType(f"fake_{extra}")
        module.Env = faulty_envs.MissingPackage  # type: ignore[attr-defined]
        sys.modules[module.__name__] = module
        gymnasium.register(id=name, entry_point=f"{module.__name__}:Env")
        try:
            with pytest.raises(EnvError, match=rf"pip install 'msrl_accel\[{extra}\]'"):
                make_vector(name, 2)
        finally:
            del gymnasium.registry[name], sys.modules[module.__name__]


def test_render_mode_reaches_the_environment() -> None:
    with make_single("CartPole-v1", render_mode="rgb_array") as env:
        assert env.render_mode == "rgb_array"


@pytest.mark.parametrize("task", TOYS)
def test_identity_tasks_reward_the_shown_target(task: str) -> None:
    env: Any = make_single(f"msrl_accel.envs.toy:Identity{task}-v0")
    total = 0.0
    observation, _ = env.reset(seed=0)
    for step in range(8):
        assert env.observation_space.contains(observation)
        action = env.unwrapped._target
        observation, reward, terminated, truncated, _ = env.step(action)
        total += reward
        assert terminated == (step == 7)
        assert not truncated
    assert total == (0.0 if task == "Box" else 8.0)
    random = 0.0
    env.reset(seed=1)
    env.action_space.seed(0)
    for _ in range(8):
        random += env.step(env.action_space.sample())[1]
    assert random < total - 1


@pytest.mark.parametrize("task", TOYS)
def test_identity_tasks_run_as_vectors(task: str) -> None:
    env = make_vector(f"msrl_accel.envs.toy:Identity{task}-v0", 3)
    observations = env.reset(seed=0)
    assert all(len(entry) == 3 for entry in observations)
    batch = gymnasium.vector.utils.batch_space(env.action_space, 3)
    batch.seed(0)
    for _ in range(20):
        result = env.step(batch.sample())
        assert len(result.next_observations) == len(observations)


def test_split_and_stack_agree() -> None:
    space = faulty_envs.DictCounter.observation_space
    singles = [space.sample() for _ in range(3)]
    stacked = stack_observations(space, singles)
    for index, single in enumerate(singles):
        for row, entry in zip(stacked, split_observation(space, single)):
            np.testing.assert_array_equal(row[index], entry)
    np.testing.assert_array_equal(stacked[0][1], singles[1]["alpha"])


def test_envpool_missing_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(EnvError, match="pip install envpool"):
        make_vector("CartPole-v1", 2, backend="envpool")


class FakePool:
    """EnvPool's interface over Gymnasium's next-step vector environment."""

    def __init__(self, num_envs: int, seed: int = 0, length: int = 2) -> None:
        makers = [lambda: faulty_envs.DictCounter(length, False) for _ in range(num_envs)]
        self._envs = gymnasium.vector.SyncVectorEnv(makers)
        self.observation_space = self._envs.single_observation_space
        self.action_space = self._envs.single_action_space
        self.reset, self.step, self.close = self._envs.reset, self._envs.step, self._envs.close


def test_envpool_marks_the_resetting_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pool: Any = types.ModuleType("envpool")
    pool.list_all_envs = lambda: ["Counter-v0"]
    pool.make = lambda env_id, env_type, **kwargs: FakePool(**kwargs)
    monkeypatch.setitem(sys.modules, "envpool", pool)
    with make_vector("Counter-v0", 2, kwargs={"length": 3}, backend="envpool") as env:
        _, counts = env.reset(seed=4)
        np.testing.assert_array_equal(counts, [[0, 0], [0, 0]])
        results = [env.step(np.zeros(2, np.int64)) for _ in range(5)]
    assert [result.valid.tolist() for result in results] == [
        [True] * 2,
        [True] * 2,
        [True] * 2,
        [False] * 2,
        [True] * 2,
    ]
    np.testing.assert_array_equal(results[2].next_observations[1], [[0, 3], [0, 3]])
    with pytest.raises(EnvError, match="EnvPool has no environment"):
        make_vector("Else-v0", 2, backend="envpool")
