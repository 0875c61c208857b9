"""Differences, flips and divergences against definitions."""

from __future__ import annotations

import numpy as np
import pytest
from consistency_helpers import result
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_helpers import ACTION_SPACES, spec_of
from scipy import integrate, stats

from msrl_accel.consistency.compare import (
    Comparison,
    Tolerances,
    divergence,
    flips,
    ulp_distance,
)

finite = st.floats(-30, 30, width=32)


def compare(spec, expected, got, noise, tolerances=None):
    comparison = Comparison(spec, spec.output_names, tolerances or Tolerances())
    comparison.add(expected, got, np.asarray(noise, np.float32), "here")
    return comparison


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(0, 40))
def test_ulp_counts_neighbouring_floats(x, steps):
    y = np.float32(x)
    for _ in range(steps):
        y = np.nextafter(y, np.float32(np.inf))
    if np.isfinite(y):
        assert ulp_distance(np.array([x], np.float32), np.array([y])) == steps


def test_ulp_across_zero():
    tiny = np.nextafter(np.float32(0), np.float32(1))
    assert ulp_distance(np.array([-tiny]), np.array([tiny])) == 2
    assert ulp_distance(np.array([-0.0], np.float32), np.array([0.0], np.float32)) == 0


@settings(deadline=None, max_examples=50)
@given(st.lists(finite, min_size=7, max_size=7), st.lists(finite, min_size=7, max_size=7))
def test_categorical_divergence_is_the_sum_of_its_definition(p, q):
    action = spec_of(spaces.MultiDiscrete([3, 4])).action
    expected = 0.0
    for part in (slice(0, 3), slice(3, 7)):
        a, b = (np.exp(np.array(x[part]) - max(x[part])) for x in (p, q))
        expected += stats.entropy(a / a.sum(), b / b.sum())
    got = divergence(action, (np.array([p], np.float32),), (np.array([q], np.float32),))
    np.testing.assert_allclose(got, [expected], rtol=1e-6, atol=1e-7)


def test_bernoulli_divergence():
    p, q = np.array([[0.3, -2.0, 40.0]]), np.array([[1.0, -2.5, 39.0]])
    expected = 0.0
    for a, b in zip(p[0][:2], q[0][:2]):
        a, b = 1 / (1 + np.exp(-a)), 1 / (1 + np.exp(-b))
        expected += stats.entropy([a, 1 - a], [b, 1 - b])
    got = divergence(spec_of(ACTION_SPACES["multi_binary"]).action, (p,), (q,))
    np.testing.assert_allclose(got, [expected], rtol=1e-9)


def test_gaussian_divergence_against_the_integral():
    mean_p, log_p, mean_q, log_q = 0.3, -0.4, 0.5, 0.1
    p, q = stats.norm(mean_p, np.exp(log_p)), stats.norm(mean_q, np.exp(log_q))
    expected, _ = integrate.quad(lambda x: p.pdf(x) * (p.logpdf(x) - q.logpdf(x)), -8, 8)
    action = spec_of(spaces.Box(-1, 1, (1,))).action
    got = divergence(
        action,
        (np.array([[mean_p]]), np.array([log_p])),
        (np.array([[mean_q]]), np.array([log_q])),
    )
    np.testing.assert_allclose(got, [expected], rtol=1e-8)


def test_divergence_keeps_what_is_tiny():
    """A difference of 1e-9 in the mean is 5e-19 nats, below the rounding of the terms."""
    action = spec_of(spaces.Box(-1, 1, (1,))).action
    zero = np.zeros(1)
    got = divergence(action, (np.array([[0.5]]), zero), (np.array([[0.5 + 1e-9]]), zero))
    np.testing.assert_allclose(got, [5e-19], rtol=1e-6)


def test_flips_have_the_margin_of_the_choice():
    spec = spec_of(ACTION_SPACES["discrete"])
    logits = [[1.0, 1.25, 0.0, -1.0], [3.0, 0.0, 0.0, 0.0]]
    noise = np.array([[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]], np.float32)
    expected = result(raw=[1, 0], parameters=[logits])
    got = result(raw=[0, 0], parameters=[logits])
    margins, flipped = flips(spec.action, expected, got, noise)
    np.testing.assert_allclose(margins, [[0.25], [3.0]])
    assert flipped.tolist() == [[True], [False]]


def test_flips_of_bits():
    spec = spec_of(ACTION_SPACES["multi_binary"])
    logits = np.array([[0.5, -0.25, 1, 1, 1, 1]], np.float32)
    noise = np.array([[-0.4, 0, 0, 0, 0, 0]], np.float32)
    ones = np.array([[1, 0, 1, 1, 1, 1]])
    other = np.array([[0, 0, 1, 1, 1, 1]])
    margins, flipped = flips(
        spec.action,
        result(raw=ones, parameters=[logits]),
        result(raw=other, parameters=[logits]),
        noise,
    )
    np.testing.assert_allclose(margins[0, :2], [0.1, 0.25], rtol=1e-6)
    assert flipped.tolist() == [[True, False, False, False, False, False]]


@pytest.mark.parametrize(("gap", "problem"), [(5e-6, False), (1e-3, True)])
def test_a_flip_counts_where_the_choice_was_not_close(gap, problem):
    spec = spec_of(ACTION_SPACES["discrete"])
    expected = result(raw=[1], log_prob=[-1.0], parameters=[[[0.0, gap, -9, -9]]])
    got = result(raw=[0], log_prob=[-2.0], parameters=[[[0.0, gap, -9, -9]]])
    comparison = compare(spec, expected, got, [[0, 0, 0, 0]])
    assert comparison.flips.count == 1
    assert comparison.flips.smallest_margin == pytest.approx(gap, rel=1e-6)
    assert bool(comparison.problems()) is problem


def test_differences_are_judged_absolutely_near_zero_and_relatively_far_out():
    spec = spec_of(ACTION_SPACES["discrete"])
    logits = [[0.0, 1.0, 2.0, 3.0]]
    expected = result(raw=[3], value=[-500.0], parameters=[logits])
    near = result(raw=[3], value=[-500.0004], parameters=[logits])
    far = result(raw=[3], value=[-500.001], parameters=[logits])
    assert not compare(spec, expected, near, np.zeros((1, 4))).problems()
    assert "value" in compare(spec, expected, far, np.zeros((1, 4))).problems()[0]
    small = result(raw=[3], value=[1e-4], parameters=[logits])
    off = result(raw=[3], value=[1.2e-4], parameters=[logits])
    assert compare(spec, small, off, np.zeros((1, 4))).problems()


def test_exact_means_bits():
    spec = spec_of(ACTION_SPACES["discrete"])
    logits = np.array([[0.0, 1.0, 2.0, 3.0]], np.float32)
    expected = result(raw=[3], value=[0.0], parameters=[logits])
    negative = result(raw=[3], value=[-0.0], parameters=[logits])
    assert compare(spec, expected, negative, np.zeros((1, 4)), Tolerances.exact()).problems()
    assert not compare(spec, expected, expected, np.zeros((1, 4)), Tolerances.exact()).problems()


def test_not_a_number_is_a_difference():
    spec = spec_of(ACTION_SPACES["discrete"])
    expected = result(raw=[0], parameters=[[[1.0, 0.0, 0.0, 0.0]]])
    got = result(raw=[0], value=[np.nan], parameters=[[[1.0, 0.0, 0.0, np.nan]]])
    problems = compare(spec, expected, got, np.zeros((1, 4))).problems()
    assert any("value" in p for p in problems) and any("KL" in p for p in problems)
