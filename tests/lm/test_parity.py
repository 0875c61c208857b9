"""Agreement of generation and training, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from msrl_accel.lm.culprit import forcing_noise
from msrl_accel.lm.parity import differences, parity

ROLLOUT = np.array([[-1.0, -2.0, 0.0], [-0.5, -np.inf, -7.0]], np.float32)
MASK = np.array([[True, True, False], [True, False, False]])


def test_largest_mean_and_divergence_over_the_chosen_tokens():
    training = np.array([[-1.1, -1.9, 5.0], [-0.5, 3.0, np.nan]], np.float32)
    found = parity(training, ROLLOUT, MASK)
    d = np.array([-0.1, 0.1, 0.0])
    assert found.max == pytest.approx(0.1, abs=1e-6)
    assert found.mean == pytest.approx(0.2 / 3, abs=1e-6)
    assert found.kl == pytest.approx(np.mean(np.exp(d) - 1 - d), abs=1e-6)
    assert set(found.metrics()) == {"parity/max", "parity/mean", "parity/kl"}


def test_the_divergence_is_that_of_the_distributions():
    rng = np.random.default_rng(0)
    p, q = (np.exp(x) / np.exp(x).sum() for x in rng.standard_normal((2, 6)))
    drawn = rng.choice(6, 200_000, p=p)
    found = parity(np.log(q)[drawn], np.log(p)[drawn], np.ones(drawn.shape, bool))
    assert found.kl == pytest.approx(np.sum(p * np.log(p / q)), rel=0.02)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_infinitely_far(bad):
    training = np.where(MASK, ROLLOUT, 0).astype(np.float32)
    training[1, 0] = bad
    assert differences(training, ROLLOUT, MASK)[1, 0] == np.inf
    assert parity(training, ROLLOUT, MASK).max == np.inf


def test_nothing_chosen_agrees():
    assert parity(ROLLOUT, ROLLOUT, np.zeros_like(MASK)) == (0, 0, 0)


@pytest.mark.parametrize("vocab_size", [14, 512, 513, 49152])
def test_forcing_noise_makes_given_tokens_the_likeliest(vocab_size):
    tokens = np.array([0, vocab_size - 1, 7, 7, vocab_size // 2], np.int32)
    noise = forcing_noise(tokens, vocab_size).dense(vocab_size)
    assert noise.shape == (5, 1, vocab_size)
    np.testing.assert_array_equal(noise[:, 0].argmax(axis=1), tokens)
    assert np.count_nonzero(noise) == 5
