"""n-step returns and what is kept, against plain loops over each environment's transitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_helpers import IMAGE_SPEC, VECTOR_SPEC, Kept, Stream, check_samples, numbers_of

from msrl_accel.replay import PrioritySettings, ReplayBuffer, ShardedReplay

cases = st.fixed_dictionaries(
    {
        "spec": st.sampled_from([VECTOR_SPEC, IMAGE_SPEC]),
        "n_envs": st.integers(1, 4),
        "rows": st.integers(1, 12),
        "extra": st.integers(0, 3),
        "steps": st.integers(1, 40),
        "n_step": st.integers(1, 5),
        "gamma": st.sampled_from([0.0, 0.9, 1.0]),
        "share_next": st.booleans(),
        "prioritized": st.booleans(),
        "next_step_reset": st.booleans(),
        "end_chance": st.sampled_from([0.0, 0.1, 0.5, 1.0]),
        "restart": st.booleans(),
        "seed": st.integers(0, 2**32 - 1),
    }
)


def build(case, **options):
    """A replay and the stream that will fill it."""
    arguments = {
        "gamma": case["gamma"],
        "n_step": case["n_step"],
        "prioritized": PrioritySettings(alpha=0.3) if case["prioritized"] else None,
        "share_next": case["share_next"],
        **options,
    }
    n = case["n_envs"]
    # A capacity that n_envs does not divide is rounded down.
    capacity = case["rows"] * n + min(case["extra"], n - 1)
    stream = Stream(case["spec"], n, case["seed"], case["next_step_reset"], case["end_chance"])
    return ReplayBuffer(case["spec"], capacity, n, **arguments), stream


def kept(case, stream):
    return Kept(stream, case["rows"], case["share_next"], case["gamma"], case["n_step"])


@given(cases)
@settings(max_examples=150, deadline=None)
def test_samples_are_what_loops_over_the_transitions_give(case):
    replay, stream = build(case)
    rng = np.random.default_rng(case["seed"])
    old = np.zeros(0, np.int64)
    for t in range(case["steps"]):
        replay.add(*stream.step())
        if case["restart"] and t == case["steps"] // 2:
            replay.end_episodes()
            stream.restart()
        # Errors of transitions that may have been overwritten since they were sampled.
        replay.update_priorities(old, rng.uniform(0.5, 2.0, old.shape))
        old = replay.sample(rng, 5, k=2).indices
    check_samples(replay, kept(case, stream), rng)


@given(cases, st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_shards_hold_together_what_one_buffer_holds(case, n_shards):
    n = case["n_envs"]
    replay = ShardedReplay.create(
        min(n_shards, n),
        case["spec"],
        case["rows"] * n,
        n,
        gamma=case["gamma"],
        n_step=case["n_step"],
        prioritized=PrioritySettings(alpha=0.3) if case["prioritized"] else None,
        share_next=case["share_next"],
    )
    stream = Stream(case["spec"], n, case["seed"], case["next_step_reset"], case["end_chance"])
    rng = np.random.default_rng(case["seed"])
    for _ in range(case["steps"]):
        replay.add(*stream.step())
        indices = replay.sample(rng, 5, k=2).indices
        replay.update_priorities(indices, rng.uniform(0.5, 2.0, indices.shape))
    check_samples(replay, kept(case, stream), rng)


@pytest.mark.parametrize("share_next", [False, True])
@pytest.mark.parametrize("next_step_reset", [False, True])
def test_a_cut_episode_bootstraps_from_its_true_final_observation(share_next, next_step_reset):
    spec = VECTOR_SPEC
    replay = ReplayBuffer(spec, 20, 1, gamma=0.5, n_step=3, share_next=share_next)
    stream = Stream(spec, 1, 0, next_step_reset, end_chance=0.0)
    for t in range(6):
        arguments = list(stream.step())
        if t == 2:
            stream.transitions[0][-1].ended = arguments[5][0] = True
            final = stream.transitions[0][-1].next_observation
            if next_step_reset:
                stream.resetting[0] = True
            else:
                stream.current = stream.new(1)
        replay.add(*arguments)
    first_three = [t.observation for t in stream.transitions[0][:3]]
    batch = replay.sample(np.random.default_rng(0), 200)
    numbers = numbers_of(spec, batch.observations)
    successors = numbers_of(spec, batch.next_observations)
    for steps_left, number in zip((3, 2, 1), first_three):
        rows = numbers == number
        assert set(successors[rows]) == {final}
        assert set(batch.discounts[0, rows]) == {np.float32(0.5**steps_left)}


def test_images_stay_uint8_and_actions_stay_int32():
    replay = ReplayBuffer(IMAGE_SPEC, 10, 2, gamma=0.9)
    stream = Stream(IMAGE_SPEC, 2, 0)
    replay.add(*stream.step())
    batch = replay.sample(np.random.default_rng(0), 4, k=3)
    assert [x.dtype for x in batch.observations] == [np.uint8, np.float32]
    assert [x.dtype for x in batch.next_observations] == [np.uint8, np.float32]
    assert batch.observations[0].shape == (3, 4, 8, 8, 3)
    assert batch.actions.dtype == np.int32
    assert batch.actions.shape == batch.indices.shape == (3, 4)
    assert batch.rewards.dtype == batch.discounts.dtype == batch.weights.dtype == np.float32
    assert (batch.weights == 1).all()


def test_a_batch_is_the_callers_to_keep():
    replay = ReplayBuffer(VECTOR_SPEC, 3, 1, gamma=0.9)
    stream = Stream(VECTOR_SPEC, 1, 0)
    for _ in range(3):
        replay.add(*stream.step())
    batch = replay.sample(np.random.default_rng(0), 8)
    before = batch.observations[0].copy()
    for _ in range(3):
        replay.add(*stream.step())
    np.testing.assert_array_equal(batch.observations[0], before)
