"""The batched environments against Gymnasium's own, bit for bit."""

from __future__ import annotations

import json
from typing import Any

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrl_accel.envs import VectorEnv, make_vector
from msrl_accel.errors import EnvError

IDS = (
    "CartPole-v0",
    "CartPole-v1",
    "Pendulum-v1",
    "Acrobot-v1",
    "MountainCar-v0",
    "MountainCarContinuous-v0",
)
CASES: list[tuple[str, dict[str, Any]]] = [
    *((env_id, {}) for env_id in IDS),
    ("CartPole-v1", {"sutton_barto_reward": True}),
    ("CartPole-v1", {"max_episode_steps": 7}),
    ("Pendulum-v1", {"g": 9.81}),
    ("Pendulum-v1", {"max_episode_steps": -1}),
    ("MountainCar-v0", {"goal_velocity": 0.03}),
    ("MountainCarContinuous-v0", {"goal_velocity": 0.01}),
]


def random_actions(env: VectorEnv, rng: np.random.Generator) -> np.ndarray:
    """Random actions [N, ...]; continuous ones often beyond their bounds."""
    space = env.action_space
    if isinstance(space, gymnasium.spaces.Discrete):
        return rng.integers(space.n, size=env.num_envs)
    scale = rng.choice([0.1, 1.0, 1.5], size=(env.num_envs, 1)) * space.high
    return (scale * rng.uniform(-1, 1, (env.num_envs, 1))).astype(np.float32)


def energetic_actions(env: VectorEnv, observations: np.ndarray) -> np.ndarray:
    """Push the cars along their velocity, which brings them to the goal."""
    right = observations[:, 1] >= 0
    if isinstance(env.action_space, gymnasium.spaces.Discrete):
        return np.where(right, 2, 0)
    return np.where(right, 1.0, -1.0).astype(np.float32)[:, None]


def place(env: gymnasium.Env[Any, Any], state: np.ndarray) -> np.ndarray:
    """Start an episode of a Gymnasium environment in `state`; its observation."""
    env.reset()
    inner: Any = env.unwrapped
    inner.state = state.astype(np.asarray(inner.state).dtype)
    for name in ("_get_ob", "_get_obs"):
        if hasattr(inner, name):
            return np.asarray(getattr(inner, name)())
    return np.asarray(inner.state, np.float32)


@pytest.mark.parametrize(("env_id", "kwargs"), CASES)
def test_every_step_equals_gymnasium(env_id: str, kwargs: dict[str, Any]) -> None:
    count, steps = 8, 1100
    batched = make_vector(env_id, count, kwargs=kwargs, backend="batched")
    singles = [gymnasium.make(env_id, disable_env_checker=True, **kwargs) for _ in range(count)]
    assert batched.observation_space == singles[0].observation_space
    assert batched.action_space == singles[0].action_space
    (current,) = batched.reset(seed=0)
    state = batched.state()
    assert state is not None
    for index, single in enumerate(singles):
        np.testing.assert_array_equal(place(single, state["dynamics"][:, index]), current[index])

    rng = np.random.default_rng(1)
    episodes = goals = 0
    for step in range(steps):
        actions = random_actions(batched, rng)
        if env_id.startswith("MountainCar") and (step // 250) % 2 == 0:
            actions = energetic_actions(batched, current)
        result = batched.step(actions)
        current = result.observations[0]
        assert result.valid.all()
        assert current.dtype == np.float32
        assert result.rewards.dtype == np.float64
        after = batched.state()
        assert after is not None
        for index, single in enumerate(singles):
            observation, reward, terminated, truncated, _ = single.step(actions[index])
            np.testing.assert_array_equal(result.next_observations[0][index], observation)
            assert result.rewards[index] == reward
            assert result.terminated[index] == terminated
            assert result.truncated[index] == truncated
            if terminated or truncated:
                observation = place(single, after["dynamics"][:, index])
                episodes += 1
                goals += terminated
            np.testing.assert_array_equal(current[index], observation)
    assert episodes > 0 or kwargs == {"max_episode_steps": -1}
    assert goals > 0 or not env_id.startswith("MountainCar")


@pytest.mark.parametrize("env_id", IDS)
def test_initial_states_follow_gymnasiums_law(env_id: str) -> None:
    (ours,) = make_vector(env_id, 4000, backend="batched").reset(seed=0)
    single = gymnasium.make(env_id)
    theirs = np.stack([single.reset(seed=seed)[0] for seed in range(400)])
    for column in range(ours.shape[1]):
        spread = float(np.ptp(theirs[:, column]))
        assert ours[:, column].min() == pytest.approx(theirs[:, column].min(), abs=spread / 20)
        assert ours[:, column].max() == pytest.approx(theirs[:, column].max(), abs=spread / 20)
        assert ours[:, column].mean() == pytest.approx(theirs[:, column].mean(), abs=spread / 10)


@given(
    env_id=st.sampled_from(IDS),
    count=st.integers(1, 9),
    before=st.integers(0, 60),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=30, deadline=None)
def test_a_restored_environment_continues_bit_for_bit(
    env_id: str, count: int, before: int, seed: int
) -> None:
    kwargs = {"max_episode_steps": 25}
    first = make_vector(env_id, count, kwargs=kwargs, backend="batched")
    current = first.reset(seed)
    rng = np.random.default_rng(seed)
    for _ in range(before):
        current = first.step(random_actions(first, rng)).observations
    saved = first.state()
    assert saved is not None
    saved["rng"] = json.loads(json.dumps(saved["rng"]))

    second = make_vector(env_id, count, kwargs=kwargs, backend="batched")
    np.testing.assert_array_equal(second.restore(saved)[0], current[0])
    for _ in range(40):
        actions = random_actions(first, rng)
        a, b = first.step(actions), second.step(actions)
        for left, right in zip(vars(a).values(), vars(b).values()):
            np.testing.assert_array_equal(left, right)


def test_a_saved_state_is_not_changed_by_later_steps() -> None:
    env = make_vector("CartPole-v1", 4, backend="batched")
    (start,) = env.reset(seed=3)
    saved = env.state()
    assert saved is not None
    for _ in range(30):
        env.step(np.zeros(4, np.int64))
    np.testing.assert_array_equal(env.restore(saved)[0], start)


def test_seeds() -> None:
    env = make_vector("Pendulum-v1", 5, backend="batched")
    (first,) = env.reset(seed=1)
    (second,) = env.reset()
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(env.reset(seed=1)[0], first)
    np.testing.assert_array_equal(env.reset()[0], second)
    assert len(np.unique(first, axis=0)) == 5


def test_observations_are_not_overwritten_by_later_steps() -> None:
    env = make_vector("CartPole-v1", 16, backend="batched")
    kept = [env.reset(seed=0)[0]]
    copies = [kept[0].copy()]
    for _ in range(40):
        result = env.step(np.ones(16, np.int64))
        kept += [result.observations[0], result.next_observations[0]]
        copies += [result.observations[0].copy(), result.next_observations[0].copy()]
    for array, copy in zip(kept, copies):
        np.testing.assert_array_equal(array, copy)


@pytest.mark.parametrize(
    ("env_id", "actions"),
    [
        ("CartPole-v1", np.array([0, 2])),
        ("CartPole-v1", np.array([-1, 0])),
        ("CartPole-v1", np.array([0.0, 1.0])),
        ("CartPole-v1", np.array([0, 1, 1])),
        ("Pendulum-v1", np.zeros(2, np.float32)),
    ],
)
def test_actions_outside_the_space_are_refused(env_id: str, actions: np.ndarray) -> None:
    env = make_vector(env_id, 2, backend="batched")
    env.reset(seed=0)
    with pytest.raises(EnvError, match="actions"):
        env.step(actions)


def test_a_nan_action_is_named_before_it_reaches_a_learner() -> None:
    env = make_vector("Pendulum-v1", 3, backend="batched")
    env.reset(seed=0)
    actions = np.array([[0.0], [np.nan], [0.0]], np.float32)
    with pytest.raises(EnvError, match=r"Pendulum-v1.*environment 1.*observation.*step 1"):
        env.step(actions)


def test_a_state_of_another_size_is_refused() -> None:
    saved = make_vector("CartPole-v1", 4, backend="batched").state()
    assert saved is not None
    with pytest.raises(EnvError, match="number of environments"):
        make_vector("CartPole-v1", 5, backend="batched").restore(saved)
