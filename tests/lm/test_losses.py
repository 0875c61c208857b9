"""Losses against the formulas worked out in plain Python, completion by completion."""

from __future__ import annotations

import functools
import math
import statistics

import numpy as np
import pytest
from mindspore import Tensor, jit, ops

from msrl_accel.errors import ConfigError
from msrl_accel.lm.losses import (
    PRESETS,
    LossSettings,
    PolicyLoss,
    TokenInputs,
    dual_clip,
    kl_estimate,
    log_ratio,
    loss_settings,
    weigh_tokens,
)

pytestmark = pytest.mark.usefixtures("graph_mode")

GROUPS = [0, 0, 0, 1, 1, 1]
REWARDS = [1.0, 0.0, 0.5, 0.0, 2.0, 1.0]
LENGTHS = [3, 4, 2, 4, 3, 4]
LONGEST, MAX_LENGTH = 4, 8


def ragged(seed, low, high):
    rng = np.random.default_rng(seed)
    return [rng.uniform(low, high, n).tolist() for n in LENGTHS]


OLD = ragged(0, -3.0, -0.1)
NEW = [[o + d for o, d in zip(*pair)] for pair in zip(OLD, ragged(1, -0.7, 0.7))]
REFERENCE = [[o + d for o, d in zip(*pair)] for pair in zip(OLD, ragged(2, -0.3, 0.3))]
ROLLOUT = [[o + d for o, d in zip(*pair)] for pair in zip(OLD, ragged(3, -1.5, 1.5))]


# ---- the formulas, in plain Python ----
def group(i):
    return [r for r, g in zip(REWARDS, GROUPS) if g == GROUPS[i]]


def grpo_a(i):
    return (REWARDS[i] - statistics.mean(group(i))) / (statistics.stdev(group(i)) + 1e-6)


def dr_grpo_a(i):
    return REWARDS[i] - statistics.mean(group(i))


def rloo_a(i):
    return REWARDS[i] - (sum(group(i)) - REWARDS[i]) / (len(group(i)) - 1)


def reinforce_a(i):
    returns = [r for r, n in zip(REWARDS, LENGTHS) for _ in range(n)]  # gamma 1
    return (REWARDS[i] - statistics.mean(returns)) / (statistics.pstdev(returns) + 1e-8)


def clipped(ratio, a, low, high):
    return -min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)


def tokens(new, advantage, low, high, weight=None):
    """Clipped losses of each completion's tokens."""
    return [
        [
            clipped(math.exp(new[i][t] - OLD[i][t]), advantage(i), low, high)
            * (1.0 if weight is None else weight(i, t))
            for t in range(LENGTHS[i])
        ]
        for i in range(len(LENGTHS))
    ]


def mean_of_means(losses):
    return statistics.mean(statistics.mean(row) for row in losses)


def token_mean(losses):
    return sum(map(sum, losses)) / sum(LENGTHS)


def constant_length(losses):
    return sum(map(sum, losses)) / (len(LENGTHS) * MAX_LENGTH)


def gspo(new):
    total = 0.0
    for i, n in enumerate(LENGTHS):
        ratio = math.exp(sum(new[i][t] - OLD[i][t] for t in range(n)) / n)
        total += clipped(ratio, grpo_a(i), 3e-4, 4e-4)
    return total / len(LENGTHS)


def cispo(new):
    return token_mean(
        [
            [
                # The weight is that of NEW, a constant under the gradient.
                -min(math.exp(NEW[i][t] - OLD[i][t]), 5.0) * grpo_a(i) * new[i][t]
                for t in range(LENGTHS[i])
            ]
            for i in range(len(LENGTHS))
        ]
    )


BY_HAND = {
    "grpo": lambda new: mean_of_means(tokens(new, grpo_a, 0.2, 0.2)),
    "dr_grpo": lambda new: constant_length(tokens(new, dr_grpo_a, 0.2, 0.2)),
    "dapo": lambda new: token_mean(tokens(new, grpo_a, 0.2, 0.28)),
    "gspo": gspo,
    "rloo": lambda new: constant_length(tokens(new, rloo_a, 0.2, 0.2)),
    "reinforce++": lambda new: token_mean(tokens(new, reinforce_a, 0.2, 0.2)),
    "cispo": cispo,
}


# ---- the library's way ----
def padded(rows, fill):
    array = np.full((len(LENGTHS), LONGEST), fill, np.float32)
    for i, row in enumerate(rows):
        array[i, : len(row)] = row
    return array


MASK = np.arange(LONGEST) < np.array(LENGTHS)[:, None]


def loss_inputs(settings, old=OLD):
    weighted = weigh_tokens(
        settings,
        np.array(REWARDS),
        np.array(GROUPS),
        MASK,
        MAX_LENGTH,
        padded(OLD, 0),
        padded(ROLLOUT, -np.inf),
        padded(REFERENCE, np.nan),
    )
    sequence = np.where(MASK, np.arange(len(LENGTHS))[:, None], 0).astype(np.int32)
    columns = (
        padded(old, -np.inf),
        padded(REFERENCE, 200.0),
        weighted.advantage,
        weighted.weight,
        sequence,
        MASK / np.array(LENGTHS, np.float32)[:, None],
    )
    return TokenInputs(*(Tensor(np.ravel(c)) for c in columns))


@functools.cache
def compiled(settings):
    return ops.value_and_grad(PolicyLoss(settings), 0)


def loss_and_gradient(settings, new, fill=200.0):
    """Masked log-probabilities are `fill`: they must not matter."""
    loss, gradient = compiled(settings)(
        Tensor(padded(new, fill).reshape(-1)), *loss_inputs(settings)
    )
    return float(loss.asnumpy()), gradient.asnumpy().reshape(MASK.shape)


def finite_differences(function, new, step=1e-5):
    gradient = np.zeros(MASK.shape)
    for i, t in np.argwhere(MASK):
        ends = []
        for sign in (1, -1):
            moved = [list(row) for row in new]
            moved[i][t] += sign * step
            ends.append(function(moved))
        gradient[i, t] = (ends[0] - ends[1]) / (2 * step)
    return gradient


def check(settings, by_hand, new=NEW):
    loss, gradient = loss_and_gradient(settings, new)
    assert loss == pytest.approx(by_hand(new), rel=2e-5, abs=1e-6)
    np.testing.assert_allclose(gradient, finite_differences(by_hand, new), rtol=2e-4, atol=2e-6)


def test_every_preset_has_a_formula():
    assert set(BY_HAND) == set(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_loss_and_gradient_of_each_preset(preset):
    check(PRESETS[preset], BY_HAND[preset])


@pytest.mark.parametrize("preset", PRESETS)
def test_masked_infinities_change_nothing(preset):
    expected = loss_and_gradient(PRESETS[preset], NEW, 0.0)
    for fill in (-np.inf, 200.0, np.nan):
        loss, gradient = loss_and_gradient(PRESETS[preset], NEW, fill)
        assert loss == expected[0]
        np.testing.assert_array_equal(gradient, expected[1])


def test_the_data_reach_every_branch():
    """Both clips bind and both are passed, with advantages of both signs."""
    seen = {
        (a > 0, "low" if r < 0.8 else "high" if r > 1.28 else "inside")
        for i, n in enumerate(LENGTHS)
        for t in range(n)
        for a, r in [(dr_grpo_a(i), math.exp(NEW[i][t] - OLD[i][t]))]
        if a
    }
    assert seen == {(sign, place) for sign in (True, False) for place in ("low", "high", "inside")}


def test_no_clip_is_the_plain_ratio():
    settings = loss_settings("dr_grpo", clip="none", aggregation="token_mean")
    check(settings, lambda new: token_mean(tokens(new, dr_grpo_a, math.inf, math.inf)))


def test_dual_clip_bounds_the_loss_of_bad_completions():
    ratio = Tensor(np.array([4.0, 2.5, 0.5, 4.0], np.float32))
    advantage = Tensor(np.array([-2.0, -2.0, -2.0, 2.0], np.float32))
    result = jit(dual_clip)(ratio, advantage, 0.2, 0.2, 3.0).asnumpy()
    np.testing.assert_allclose(result, [6.0, 5.0, 1.6, -2.4], rtol=1e-6)

    def by_hand(new):
        losses = tokens(new, grpo_a, 0.2, 0.2)
        return mean_of_means(
            [
                [min(x, -1.5 * grpo_a(i)) if grpo_a(i) < 0 else x for x in row]
                for i, row in enumerate(losses)
            ]
        )

    check(loss_settings("grpo", clip="dual", dual_clip=1.5), by_hand)


@pytest.mark.parametrize(("correction", "cap"), [("tis", 2.0), ("decoupled", 5.0)])
def test_corrections_weigh_each_token_by_a_truncated_ratio(correction, cap):
    def weight(i, t):
        return min(math.exp(OLD[i][t] - ROLLOUT[i][t]), cap)

    check(
        loss_settings("dapo", correction=correction),
        lambda new: token_mean(tokens(new, grpo_a, 0.2, 0.28, weight)),
    )


def test_corrections_need_both_log_probabilities():
    settings = loss_settings("grpo", correction="tis")
    with pytest.raises(ConfigError, match="correction = 'tis' needs"):
        weigh_tokens(settings, np.array(REWARDS), np.array(GROUPS), MASK, MAX_LENGTH)


ESTIMATES = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
}


@pytest.mark.parametrize("kind", ESTIMATES)
def test_kl_estimates_and_their_loss(kind):
    d = np.array([-0.5, 0.0, 0.3], np.float32)
    np.testing.assert_allclose(
        jit(kl_estimate)(kind, Tensor(d)).asnumpy(), [ESTIMATES[kind](x) for x in d], atol=1e-6
    )

    def by_hand(new):
        kl = [
            [ESTIMATES[kind](new[i][t] - REFERENCE[i][t]) for t in range(n)]
            for i, n in enumerate(LENGTHS)
        ]
        return mean_of_means(tokens(new, grpo_a, 0.2, 0.2)) + 0.3 * mean_of_means(kl)

    check(loss_settings("grpo", kl=kind, kl_coef=0.3), by_hand)


def test_kl_in_the_reward_lowers_returns_not_the_loss():
    settings = loss_settings("reinforce++", kl_coef=0.1)
    returns = [
        [REWARDS[i] - 0.1 * sum(OLD[i][u] - REFERENCE[i][u] for u in range(t, n)) for t in range(n)]
        for i, n in enumerate(LENGTHS)
    ]
    flat = [x for row in returns for x in row]
    mean, deviation = statistics.mean(flat), statistics.pstdev(flat) + 1e-8

    def by_hand(new):
        return token_mean(
            [
                [
                    clipped(
                        math.exp(new[i][t] - OLD[i][t]),
                        (returns[i][t] - mean) / deviation,
                        0.2,
                        0.2,
                    )
                    for t in range(n)
                ]
                for i, n in enumerate(LENGTHS)
            ]
        )

    check(settings, by_hand)
    with pytest.raises(ConfigError, match="kl_in_reward needs"):
        weigh_tokens(settings, np.array(REWARDS), np.array(GROUPS), MASK, MAX_LENGTH)


@pytest.mark.parametrize("preset", PRESETS)
def test_on_policy_the_ratio_is_one_and_the_gradient_that_of_reinforce(preset):
    """-A grad log pi, weighted: whatever the clip, it does not bind."""
    settings = PRESETS[preset]
    inputs = loss_inputs(settings)
    _, gradient = loss_and_gradient(settings, OLD)
    expected = -(inputs.advantage.asnumpy() * inputs.weight.asnumpy()).reshape(MASK.shape)
    if settings.ratio == "sequence":  # A is the same for all tokens of a completion
        np.testing.assert_allclose(gradient.sum(1), expected.sum(1), rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-8)


def test_huge_log_ratios_stay_finite():
    log_prob = Tensor(np.array([0.0, -400.0, 1.0], np.float32))
    other = Tensor(np.array([-300.0, 0.0, 1.0], np.float32))
    mask = Tensor(np.array([True, True, True]))
    np.testing.assert_array_equal(
        jit(log_ratio)(log_prob, other, mask).asnumpy(), [20.0, -20.0, 0.0]
    )


def test_presets_can_be_overridden():
    settings = loss_settings("dapo", clip_high=0.3, kl_coef=None)
    assert (settings.clip_low, settings.clip_high, settings.kl_coef) == (0.2, 0.3, 0.0)
    assert settings.aggregation == "token_mean" and settings.filter_groups
    assert loss_settings("grpo") == LossSettings()


def test_bad_settings_are_errors():
    with pytest.raises(ConfigError, match=r"preset = 'ppo': use one of grpo, dr_grpo"):
        loss_settings("ppo")
    with pytest.raises(ConfigError, match="clip_hihg"):
        loss_settings("grpo", clip_hihg=0.3)
    with pytest.raises(ConfigError, match="clip_high"):
        loss_settings("grpo", clip_high=-0.3)
    with pytest.raises(ConfigError, match="set kl_in_reward to false"):
        loss_settings("grpo", kl_in_reward=True)
