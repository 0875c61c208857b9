"""Gymnasium's vector environments behind our interface: both automatic reset modes, exactly."""

from __future__ import annotations

from typing import Any

import faulty_envs
import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from msrl_accel.envs import GymnasiumVectorEnv, VectorEnv, make_vector
from msrl_accel.errors import EnvError, SpaceError

if not hasattr(gymnasium.vector, "AutoresetMode"):
    pytest.skip("Gymnasium before 1.1 has one reset mode only", allow_module_level=True)
AutoresetMode = gymnasium.vector.AutoresetMode


def counters(lengths: list[int], mode: Any, cls: Any = faulty_envs.Counter) -> VectorEnv:
    makers = [lambda n=n: cls(length=n, faulty=False) for n in lengths]
    return GymnasiumVectorEnv(SyncVectorEnv(makers, autoreset_mode=mode))


def actions(env: VectorEnv) -> np.ndarray:
    return np.zeros(env.num_envs, np.int64)


@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4), steps=st.integers(1, 15))
@settings(max_examples=40, deadline=None)
def test_same_step_resets(lengths: list[int], steps: int) -> None:
    env = counters(lengths, AutoresetMode.SAME_STEP)
    np.testing.assert_array_equal(env.reset()[0], [[0, 0]] * len(lengths))
    for step in range(1, steps + 1):
        result = env.step(actions(env))
        for index, length in enumerate(lengths):
            episode, count = (step - 1) // length, (step - 1) % length + 1
            ends = count == length
            after = [episode + 1, 0] if ends else [episode, count]
            np.testing.assert_array_equal(result.next_observations[0][index], [episode, count])
            np.testing.assert_array_equal(result.observations[0][index], after)
            assert result.truncated[index] == ends
            assert result.rewards[index] == count
        assert result.valid.all()
        assert not result.terminated.any()


@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4), steps=st.integers(1, 15))
@settings(max_examples=40, deadline=None)
def test_next_step_resets(lengths: list[int], steps: int) -> None:
    env = counters(lengths, AutoresetMode.NEXT_STEP)
    env.reset()
    for step in range(1, steps + 1):
        result = env.step(actions(env))
        for index, length in enumerate(lengths):
            # One step of each episode's period only resets.
            episode, count = step // (length + 1), step % (length + 1)
            np.testing.assert_array_equal(result.next_observations[0][index], [episode, count])
            np.testing.assert_array_equal(result.observations[0][index], [episode, count])
            assert result.truncated[index] == (count == length)
            assert result.valid[index] == (count > 0)
            assert result.rewards[index] == count


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_a_reset_forgets_the_ended_episodes(mode: Any) -> None:
    env = counters([2, 2], mode)
    env.reset()
    env.step(actions(env))
    assert env.step(actions(env)).truncated.all()
    env.reset()
    assert env.step(actions(env)).valid.all()


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_dict_observations_come_sorted_by_key(mode: Any) -> None:
    env = counters([2, 3], mode, faulty_envs.DictCounter)
    alpha, zeta = env.reset()
    assert (alpha.dtype, alpha.shape) == (np.uint8, (2, 2, 2, 1))
    assert (zeta.dtype, zeta.shape) == (np.float64, (2, 2))
    env.step(actions(env))
    result = env.step(actions(env))
    np.testing.assert_array_equal(result.truncated, [True, False])
    np.testing.assert_array_equal(result.next_observations[1], [[0, 2], [0, 2]])
    np.testing.assert_array_equal(result.next_observations[0][:, 0, 0, 0], [2, 2])


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_arrays_are_not_overwritten_by_later_steps(backend: str) -> None:
    kwargs = {"faulty": False}
    with make_vector("faulty_envs:DictCounter-v0", 2, kwargs=kwargs, backend=backend) as env:
        kept = list(env.reset())
        copies = [array.copy() for array in kept]
        for _ in range(9):
            result = env.step(actions(env))
            arrays = [*result.observations, *result.next_observations, result.rewards]
            kept += arrays
            copies += [array.copy() for array in arrays]
        for array, copy in zip(kept, copies):
            np.testing.assert_array_equal(array, copy)


def test_gymnasiums_own_batched_cartpole_can_be_wrapped() -> None:
    inner = gymnasium.make_vec("CartPole-v1", 4, vectorization_mode="vector_entry_point")
    env = GymnasiumVectorEnv(inner)
    env.reset(seed=0)
    ended = np.zeros(4, bool)
    for _ in range(60):
        result = env.step(np.ones(4, np.int64))
        np.testing.assert_array_equal(result.valid, ~ended)
        ended = result.terminated | result.truncated


def test_disabled_resets_are_refused() -> None:
    with pytest.raises(EnvError, match=r"Disabled.*SAME_STEP or NEXT_STEP"):
        counters([2], AutoresetMode.DISABLED)


def test_unsupported_observation_spaces_are_refused() -> None:
    with pytest.raises(SpaceError, match=r"Tuple.*not supported"):
        make_vector("faulty_envs:TupleObservation-v0", 2)


@pytest.mark.parametrize(
    ("env_id", "field"), [("NanReward-v0", "reward nan"), ("NanObservation-v0", "zeta inf")]
)
def test_non_finite_numbers_are_named_at_their_source(env_id: str, field: str) -> None:
    env = make_vector(f"faulty_envs:{env_id}", 2, backend="sync")
    env.reset()
    env.step(actions(env))
    env.step(actions(env))
    with pytest.raises(EnvError, match=f"{env_id}: environment 0 returned {field} at step 3"):
        env.step(actions(env))


def test_an_error_in_this_process_names_environment_and_cause() -> None:
    env = make_vector("faulty_envs:Raising-v0", 2, backend="sync")
    env.reset()
    env.step(actions(env))
    env.step(actions(env))
    with pytest.raises(EnvError, match=r"Raising-v0: environment 0.*LocalError in step") as caught:
        env.step(actions(env))
    assert isinstance(caught.value.__cause__, faulty_envs.LocalError)


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_seeds_give_the_same_episodes_and_differ_between_environments(backend: str) -> None:
    with make_vector("Pendulum-v1", 3, backend=backend) as env:
        (first,) = env.reset(seed=5)
        (again,) = env.reset(seed=5)
        (other,) = env.reset(seed=6)
    np.testing.assert_array_equal(first, again)
    assert len(np.unique(np.concatenate([first, other]), axis=0)) == 6


def test_gymnasium_environments_cannot_give_their_state() -> None:
    assert make_vector("CartPole-v1", 2, backend="sync").state() is None
