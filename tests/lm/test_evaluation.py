"""Results on held-out problems, against counting."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrl_accel.envs.text import Score
from msrl_accel.lm.evaluation import pass_at_k, right_completions, text_evaluation


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(n, data):
    right, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    draws = list(itertools.combinations(range(n), k))
    share = np.mean([min(draw) < right for draw in draws])  # the first `right` are right
    assert pass_at_k(n, right, k) == pytest.approx(share)


def scores(*values):
    return [Score(v, {"task": v}, traceback="" if v is not None else "oh") for v in values]


def test_failed_completions_are_no_zeros():
    result = text_evaluation(scores(1.0, None, 0.0, 0.5), np.array([3, 9, 2, 4]), 2, False)
    assert result.mean == 0.5
    assert result.lengths.tolist() == [3, 2, 4]
    assert result.right.tolist() == [[True, False], [False, False]]
    assert (result.accuracy, result.failed) == (0.25, 1)
    assert result.pass_rates() == {1: 0.25, 2: 0.5}
    assert result.problem_means.tolist() == [1.0, 0.25]
    content = result.to_dict()
    assert content["pass@2"] == 0.5
    assert content["problems"] == 2
    assert "1 completions could not be scored" in str(result)


def test_greedy_results_have_no_pass_rates():
    result = text_evaluation(scores(1.0, 0.0, 1.0), np.array([1, 1, 1]), 1, True)
    assert not [key for key in result.to_dict() if key.startswith("pass@")]
    assert str(result) == "66.7% right of 3 held-out problems, mean reward 0.667 +- 0.653"
    assert result.ci95 == pytest.approx(1.96 * np.std([1, 0, 1], ddof=1) / np.sqrt(3))


def test_samples_that_are_no_power_of_two_have_their_rate_too():
    result = text_evaluation(scores(*[0.0] * 6), np.ones(6), 6, False)
    assert list(result.pass_rates()) == [1, 2, 4, 6]


def test_right_is_what_the_first_reward_of_the_formula_says():
    marked = [Score(1.2, {"math": 1.0, "format": 1.0}), Score(0.2, {"math": 0.0, "format": 1.0})]
    assert right_completions(marked).tolist() == [True, False]
