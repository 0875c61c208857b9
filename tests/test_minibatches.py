from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrl_accel.minibatches import make_minibatches, n_minibatches, standardize

MASKS = st.lists(st.booleans(), min_size=1, max_size=40).filter(any).map(np.array)


@settings(max_examples=200, deadline=None)
@given(MASKS, st.integers(1, 15), st.integers(1, 4), st.integers(0, 99))
def test_every_usable_row_is_used_once_an_epoch_and_no_other(usable, batch_size, epochs, seed):
    batches = make_minibatches(np.random.default_rng(seed), usable, batch_size, epochs)
    assert batches.count % epochs == 0
    per_epoch = batches.count // epochs
    assert per_epoch == int(np.ceil(usable.sum() / batch_size))
    for epoch in range(epochs):
        part = slice(epoch * per_epoch, (epoch + 1) * per_epoch)
        used = batches.rows[part][batches.weights[part] > 0]
        np.testing.assert_array_equal(np.sort(used), np.flatnonzero(usable))


@settings(max_examples=200, deadline=None)
@given(MASKS, st.integers(1, 15), st.integers(1, 4))
def test_weights_average_over_the_real_rows(usable, batch_size, epochs):
    batches = make_minibatches(np.random.default_rng(0), usable, batch_size, epochs)
    in_use, unused = batches.weights[: batches.count], batches.weights[batches.count :]
    np.testing.assert_allclose(in_use.sum(axis=1), 1.0, rtol=1e-5)
    assert not unused.any()
    for row in in_use:
        real = row[row > 0]
        np.testing.assert_allclose(real, 1.0 / len(real), rtol=1e-6)


@settings(max_examples=100, deadline=None)
@given(MASKS, st.integers(1, 15), st.integers(1, 4))
def test_the_shape_does_not_depend_on_the_mask(usable, batch_size, epochs):
    rng = np.random.default_rng(0)
    masked = make_minibatches(rng, usable, batch_size, epochs)
    full = make_minibatches(rng, np.ones_like(usable), batch_size, epochs)
    assert masked.rows.shape == full.rows.shape == masked.weights.shape == full.weights.shape
    assert len(full.rows) == full.count == n_minibatches(len(usable), batch_size, epochs)
    assert masked.rows.max() < len(usable)
    assert (masked.rows.dtype, masked.weights.dtype) == (np.int32, np.float32)


def test_epochs_are_shuffled_differently_and_reproducibly():
    def draw(seed):
        return make_minibatches(np.random.default_rng(seed), np.ones(64, bool), 64, 2).rows

    first = draw(0)
    assert not np.array_equal(first[0], first[1])
    np.testing.assert_array_equal(first, draw(0))
    assert not np.array_equal(first, draw(1))


@settings(max_examples=200, deadline=None)
@given(MASKS, st.integers(1, 15), st.sampled_from([1.0, 1e-3, 1e4]), st.sampled_from([0.0, 50.0]))
def test_advantages_are_standardised_within_each_minibatch(usable, batch_size, scale, shift):
    rng = np.random.default_rng(1)
    advantages = rng.normal(shift, scale, len(usable)).astype(np.float32)
    batches = make_minibatches(rng, usable, batch_size, 2)
    result = standardize(advantages, batches)
    assert result.dtype == np.float32
    assert np.isfinite(result).all()
    for i in range(batches.count):
        real = batches.weights[i] > 0
        values = advantages[batches.rows[i, real]].astype(np.float64)
        expected = values
        if len(values) > 1:
            expected = (values - np.mean(values)) / (np.std(values, ddof=1) + 1e-8)
        np.testing.assert_allclose(result[i, real], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n_rows", [1, 5])
def test_a_last_minibatch_of_one_row_is_finite(n_rows):
    # stable-baselines3 issues 325 and 440: the standard deviation of one number is NaN.
    batches = make_minibatches(np.random.default_rng(0), np.ones(n_rows, bool), 4, 1)
    result = standardize(np.arange(n_rows, dtype=np.float32) + 3.0, batches)
    assert (batches.weights[-1] > 0).sum() == 1
    assert np.isfinite(result).all()


def test_equal_advantages_become_zero():
    batches = make_minibatches(np.random.default_rng(0), np.ones(8, bool), 4, 1)
    assert not standardize(np.full(8, 2.5, np.float32), batches).any()


@settings(max_examples=100, deadline=None)
@given(MASKS, st.integers(1, 15), st.integers(0, 99))
def test_rows_count_by_their_weights_and_those_of_weight_zero_are_left_out(
    usable, batch_size, seed
):
    rng = np.random.default_rng(seed)
    row_weights = rng.choice([0.0, 0.25, 1.0], len(usable)).astype(np.float32)
    batches = make_minibatches(rng, usable, batch_size, 2, row_weights)
    kept = usable & (row_weights > 0)
    assert len(batches.rows) == n_minibatches(len(usable), batch_size, 2)
    used = batches.rows[batches.weights > 0]
    np.testing.assert_array_equal(np.sort(used), np.repeat(np.flatnonzero(kept), 2))
    for i in range(batches.count):
        real = batches.weights[i] > 0
        expected = row_weights[batches.rows[i, real]]
        np.testing.assert_allclose(batches.weights[i, real], expected / expected.sum(), rtol=1e-5)
    assert not batches.weights[batches.count :].any()


def test_equal_row_weights_change_nothing():
    usable = np.arange(21) % 5 > 0
    plain = make_minibatches(np.random.default_rng(3), usable, 4, 2)
    weighted = make_minibatches(np.random.default_rng(3), usable, 4, 2, np.full(21, 0.3))
    np.testing.assert_array_equal(plain.rows, weighted.rows)
    np.testing.assert_allclose(plain.weights, weighted.weights, rtol=1e-6)
