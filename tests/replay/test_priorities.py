"""Prioritised sampling against the formulas of Schaul et al. 2016."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_helpers import VECTOR_SPEC, Stream

from msrl_accel.errors import ConfigError, ReplayError
from msrl_accel.replay import PrioritySettings, ReplayBuffer, ShardedReplay

KINDS = ("buffer", "shared", "sharded")


def prioritized(kind, alpha=0.6, beta=0.4, epsilon=1e-3, n_envs=4, capacity=32, steps=20):
    """A replay whose rings have wrapped around, and the stream that goes on."""
    options = {"gamma": 0.9, "prioritized": PrioritySettings(alpha, beta, epsilon)}
    if kind == "sharded":
        replay = ShardedReplay.create(3, VECTOR_SPEC, capacity, n_envs, **options)
    else:
        shared = kind == "shared"
        replay = ReplayBuffer(VECTOR_SPEC, capacity, n_envs, share_next=shared, **options)
    stream = Stream(VECTOR_SPEC, n_envs, 7)
    for _ in range(steps):
        replay.add(*stream.step())
    return replay, stream


def all_indices(replay):
    """Of everything that can be sampled."""
    indices = np.unique(replay.sample(np.random.default_rng(0), 20_000).indices)
    assert len(indices) == len(replay)
    return indices


@pytest.mark.parametrize("kind", KINDS)
@given(
    alpha=st.floats(0, 1),
    beta=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
    batch_size=st.integers(1, 300),
)
@settings(max_examples=25, deadline=None)
def test_chances_and_weights_are_those_of_the_paper(kind, alpha, beta, seed, batch_size):
    epsilon = 1e-3
    replay, _ = prioritized(kind, alpha, beta, epsilon)
    rng = np.random.default_rng(seed)
    indices = all_indices(replay)
    errors = rng.standard_normal(len(indices)) * 3
    replay.update_priorities(indices, errors)

    # p_i = |delta_i| + epsilon; P(i) = p_i^alpha / sum_k p_k^alpha      (eq. 1, section 3.3)
    p = np.abs(errors) + epsilon
    chance = dict(zip(indices, p**alpha / (p**alpha).sum()))

    batch = replay.sample(rng, batch_size, k=3)
    for drawn, weights in zip(batch.indices, batch.weights):
        # One draw from each of B equal parts of the mass: an interval of length B P(i) meets
        # between floor(B P(i)) - 1 and ceil(B P(i)) + 1 of them.
        counts = dict(zip(*np.unique(drawn, return_counts=True)))
        for index, P in chance.items():
            assert abs(counts.get(index, 0) - batch_size * P) < 2
        # w_j = (N P(j))^-beta / max_i w_i                                  (algorithm 1, line 10)
        N = len(replay)
        w = np.array([(N * chance[index]) ** -beta for index in drawn])
        np.testing.assert_allclose(weights, w / w.max(), rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_over_many_batches(kind):
    replay, _ = prioritized(kind, alpha=1.0, epsilon=1e-9)
    rng = np.random.default_rng(1)
    indices = all_indices(replay)
    errors = rng.uniform(0.2, 3.0, len(indices))
    replay.update_priorities(indices, errors)
    drawn = replay.sample(rng, 8, k=10_000).indices
    frequency = np.array([(drawn == index).mean() for index in indices])
    np.testing.assert_allclose(frequency, errors / errors.sum(), rtol=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_transition_gets_the_largest_priority_so_far(kind):
    replay, stream = prioritized(kind, alpha=1.0, epsilon=1e-9)
    indices = all_indices(replay)
    errors = np.linspace(0.1, 0.5, len(indices))
    errors[0] = -50.0
    replay.update_priorities(indices, errors)
    replay.update_priorities(indices, np.full(len(indices), 0.1))  # the largest so far stays 50
    replay.add(*stream.step())
    drawn = replay.sample(np.random.default_rng(0), 1000, k=10).indices
    # Each environment's new transition has about a quarter of the mass.
    counts = np.unique(drawn, return_counts=True)[1]
    assert np.sort(counts)[-4:].sum() / counts.sum() == pytest.approx(
        200 / (200 + 0.1 * (len(replay) - 4)), rel=0.01
    )
    assert np.sort(counts)[-4:].min() / counts.sum() == pytest.approx(0.25, rel=0.05)


def test_before_any_update_all_are_equal():
    replay, _ = prioritized("buffer")
    batch = replay.sample(np.random.default_rng(0), len(replay))
    assert (batch.weights == 1).all()
    assert len(np.unique(batch.indices)) > len(replay) / 2


def test_beta_given_to_sample_overrides_the_settings():
    replay, _ = prioritized("buffer", beta=0.4)
    indices = all_indices(replay)
    replay.update_priorities(indices, np.linspace(0.1, 3, len(indices)))
    rng = np.random.default_rng
    by_settings = replay.sample(rng(3), 64).weights
    np.testing.assert_allclose(replay.sample(rng(3), 64, beta=0.8).weights, by_settings**2, 1e-5)
    assert (replay.sample(rng(3), 64, beta=0.0).weights == 1).all()


def test_the_last_priority_of_a_repeated_index_counts():
    replay, _ = prioritized("buffer", alpha=1.0)
    indices = all_indices(replay)
    replay.update_priorities(indices, np.full(len(indices), 1.0))
    replay.update_priorities(np.array([indices[0]] * 3), np.array([9.0, 5.0, 1000.0]))
    drawn = replay.sample(np.random.default_rng(0), 1000).indices
    assert (drawn == indices[0]).mean() == pytest.approx(1000 / (999 + len(replay)), abs=0.01)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
def test_a_priority_that_is_not_finite_is_refused_by_name(kind, bad):
    replay, _ = prioritized(kind)
    batch = replay.sample(np.random.default_rng(0), 8)
    priorities = np.ones((1, 8))
    priorities[0, 5] = bad
    with pytest.raises(ReplayError, match=r"priorities: the value of transition .*finite"):
        replay.update_priorities(batch.indices, priorities)
    assert np.isfinite(replay.sample(np.random.default_rng(0), 8).weights).all()


@pytest.mark.parametrize("kind", KINDS)
def test_indices_of_no_transition_are_refused(kind):
    replay, _ = prioritized(kind)
    for index in (-1, 10**6):
        with pytest.raises(ReplayError, match="not of this replay"):
            replay.update_priorities(np.array([0, index]), np.ones(2))
    with pytest.raises(ReplayError, match="one for each index"):
        replay.update_priorities(np.arange(3), np.ones(2))
    replay.update_priorities(np.zeros(0, np.int64), np.zeros(0))


def test_a_uniform_replay_ignores_priorities():
    replay = ReplayBuffer(VECTOR_SPEC, 8, 1, gamma=0.9)
    replay.add(*Stream(VECTOR_SPEC, 1, 0).step())
    batch = replay.sample(np.random.default_rng(0), 4)
    replay.update_priorities(batch.indices, np.ones((1, 4)))
    assert (replay.sample(np.random.default_rng(0), 4).weights == 1).all()


@pytest.mark.parametrize(
    "name, value", [("alpha", 1.5), ("alpha", -0.1), ("beta", 2.0), ("epsilon", 0.0)]
)
def test_settings_out_of_bounds_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name} = {value}"):
        PrioritySettings(**{name: value})


@pytest.mark.parametrize("share_next", [False, True])
@pytest.mark.parametrize("next_step_reset", [False, True])
def test_uniform_sampling_is_uniform_over_what_is_stored(share_next, next_step_reset):
    replay = ReplayBuffer(VECTOR_SPEC, 30, 3, gamma=0.9, share_next=share_next)
    stream = Stream(VECTOR_SPEC, 3, 5, next_step_reset)
    for _ in range(25):
        replay.add(*stream.step())
    drawn = replay.sample(np.random.default_rng(0), 200, k=500).indices
    counts = np.unique(drawn, return_counts=True)[1]
    assert len(counts) == len(replay)
    expected = drawn.size / len(replay)
    # Chi-squared: mean and variance of the statistic are d and 2 d.
    d = len(counts) - 1
    assert ((counts - expected) ** 2 / expected).sum() < d + 4 * np.sqrt(2 * d)
