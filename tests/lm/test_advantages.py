"""Advantages, penalties and weights against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrl_accel.errors import ConfigError
from msrl_accel.lm import advantages as adv

R = np.array([1.0, 0.0, 0.0, 1.0])
ONE = np.zeros(4, int)


def test_advantages_of_a_group():
    s = 0.5 / (math.sqrt(1 / 3) + 1e-6)  # 0.866
    np.testing.assert_allclose(adv.grpo_advantages(R, ONE), [s, -s, -s, s], rtol=1e-12)
    p = 0.5 / (0.5 + 1e-6)
    np.testing.assert_allclose(adv.grpo_advantages(R, ONE, True), [p, -p, -p, p], rtol=1e-12)
    np.testing.assert_allclose(adv.dr_grpo_advantages(R, ONE), [0.5, -0.5, -0.5, 0.5])
    t = 2 / 3
    np.testing.assert_allclose(adv.rloo_advantages(R, ONE), [t, -t, -t, t])


GROUPED = (adv.grpo_advantages, adv.dr_grpo_advantages, adv.rloo_advantages)


@pytest.mark.parametrize("function", GROUPED)
def test_groups_do_not_mix_and_their_order_does_not_matter(function):
    groups = np.array([7, 3, 7, 3, 7, 3, 7, 3])
    rewards = np.array([1.0, 5.0, 0.0, 9.0, 0.0, 5.0, 1.0, 5.0])
    result = function(rewards, groups)
    np.testing.assert_array_equal(result[groups == 7], function(R, ONE))
    np.testing.assert_array_equal(result[groups == 3], function(rewards[groups == 3], ONE))


@pytest.mark.parametrize("function", GROUPED)
@given(st.floats(-1e6, 1e6), st.integers(2, 9))
@settings(max_examples=30, deadline=None)
def test_equal_rewards_give_exactly_zero(function, reward, n):
    rewards = np.full(2 * n, reward)
    assert np.all(function(rewards, np.repeat([0, 1], n)) == 0.0)
    assert not adv.informative(rewards, np.repeat([0, 1], n)).any()


@pytest.mark.parametrize("function", GROUPED)
def test_a_completion_alone_in_its_group_is_an_error(function):
    with pytest.raises(ConfigError, match=r"completion 2 is alone .* group_size of at least 2"):
        function(np.array([1.0, 2.0, 3.0]), np.array([0, 0, 1]))


@pytest.mark.parametrize("function", GROUPED)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_reward_that_is_not_finite_is_an_error(function, bad):
    with pytest.raises(ConfigError, match=f"reward of completion 2 is {bad}"):
        function(np.array([1.0, 2.0, bad, 0.0]), ONE)


def test_groups_of_other_length_than_rewards_are_an_error():
    with pytest.raises(ConfigError, match="4 rewards but 3 group numbers"):
        adv.grpo_advantages(R, np.zeros(3, int))


def test_informative_groups_are_those_with_differing_rewards():
    rewards = np.array([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    np.testing.assert_array_equal(
        adv.informative(rewards, np.array([0, 0, 1, 1, 2, 2])), [0, 0, 1, 1, 0, 0]
    )


def test_returns_pass_over_tokens_the_model_did_not_choose():
    mask = np.array([[1, 1, 0, 0, 1, 1]], bool)
    rewards = np.array([[0.0, 0, 0, 0, 0, 1]])
    np.testing.assert_array_equal(adv.returns_to_go(rewards, mask, 1.0), [[1, 1, 0, 0, 1, 1]])
    np.testing.assert_allclose(adv.returns_to_go(rewards, mask, 0.5), [[0.125, 0.25, 0, 0, 0.5, 1]])


def test_reinforce_gives_the_reward_at_the_last_chosen_token_and_whitens():
    mask = np.array([[1, 1, 0, 1, 0], [1, 1, 0, 0, 0]], bool)
    # Returns 2, 2, 2 and 0, 0: mean 1.2, deviation sqrt(0.96).
    high, low = 0.8 / math.sqrt(0.96), -1.2 / math.sqrt(0.96)
    np.testing.assert_allclose(
        adv.reinforce_advantages(np.array([2.0, 0.0]), mask),
        [[high, high, 0, high, 0], [low, low, 0, 0, 0]],
        rtol=1e-7,
    )


def test_reinforce_subtracts_a_penalty_of_each_token():
    mask = np.array([[1, 1], [1, 0]], bool)
    penalty = np.array([[0.5, 0.25], [0.0, np.nan]])
    # Rewards -0.5, 0.75 and 0: returns 0.25, 0.75 and 0.
    values = np.array([0.25, 0.75, 0.0])
    expected = (values - values.mean()) / values.std()
    result = adv.reinforce_advantages(np.array([1.0, 0.0]), mask, 1.0, penalty)
    np.testing.assert_allclose(result, [expected[:2], [expected[2], 0.0]], rtol=1e-6)


def test_whitening_of_equal_or_no_values_is_zero():
    ones = np.ones((2, 3))
    assert not adv.whiten(0.1 * ones, ones > 0).any()
    assert not adv.whiten(ones, ones < 0).any()


def test_overlong_penalty_grows_over_the_buffer():
    lengths = np.array([0, 80, 85, 90, 95, 100, 120])
    np.testing.assert_allclose(
        adv.overlong_penalty(lengths, 100, 20), [0, 0, -0.25, -0.5, -0.75, -1, -1]
    )
    with pytest.raises(ConfigError, match="overlong buffer = 0"):
        adv.overlong_penalty(lengths, 100, 0)


MASK = np.arange(10) < np.array([[10], [6]])


def test_ten_and_six_tokens_divide_by_sixteen():
    np.testing.assert_allclose(adv.token_weights("token_mean", MASK, 20), MASK / 16)
    # Two processes, one completion each.
    for row in MASK:
        np.testing.assert_allclose(
            adv.token_weights("token_mean", row[None], 20, n_tokens=16), row[None] / 16
        )


def test_weights_of_the_other_aggregations():
    np.testing.assert_allclose(
        adv.token_weights("sequence_mean", MASK, 20), MASK / np.array([[20], [12]])
    )
    np.testing.assert_allclose(adv.token_weights("constant_length", MASK, 20), MASK / 40)
    with pytest.raises(ConfigError, match="aggregation = 'mean'"):
        adv.token_weights("mean", MASK, 20)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant_length"])
def test_completions_without_chosen_tokens_change_nothing(aggregation):
    more = np.concatenate([MASK, np.zeros((3, 10), bool)])
    np.testing.assert_array_equal(
        adv.token_weights(aggregation, more, 20)[:2], adv.token_weights(aggregation, MASK, 20)
    )
    assert not adv.token_weights(aggregation, np.zeros((2, 3), bool), 20).any()


def test_correction_weights_are_truncated_ratios():
    log_probs = np.log(np.array([[0.5, 0.9, 0.1, 0.5]]))
    rollout = np.log(np.array([[0.25, 0.1, 0.2, 0.5]]))
    mask = np.array([[True, True, True, False]])
    rollout[0, 3] = -np.inf
    np.testing.assert_allclose(
        adv.correction_weights(log_probs, rollout, mask, 2.0), [[2.0, 2.0, 0.5, 1.0]]
    )
