from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from policy_helpers import gae_by_definition, vtrace_by_definition

from msrl_accel.trajectories import Trajectories, gae, vtrace

FINITE = st.floats(-10, 10, width=32)
DISCOUNTS = st.sampled_from([0.0, 0.5, 0.95, 1.0])


@settings(max_examples=200, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 8), st.integers(1, 3)),
    gamma=DISCOUNTS,
    lam=DISCOUNTS,
    data=st.data(),
)
def test_gae_equals_its_definition(shape, gamma, lam, data):
    rewards = data.draw(hnp.arrays(np.float64, shape, elements=FINITE))
    values, next_values = (
        data.draw(hnp.arrays(np.float32, shape, elements=FINITE)) for _ in range(2)
    )
    terminated, truncated = (data.draw(hnp.arrays(bool, shape)) for _ in range(2))
    arguments = (rewards, values, next_values, terminated, truncated, gamma, lam)
    result = gae(*arguments)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, gae_by_definition(*arguments), rtol=1e-5, atol=1e-4)


def test_a_truncated_step_bootstraps_and_a_terminated_one_does_not():
    ones, no, yes = np.ones((1, 1)), np.zeros((1, 1), bool), np.ones((1, 1), bool)
    assert gae(ones, 0 * ones, 10 * ones, no, yes, 0.5, 0.9)[0, 0] == 6.0
    assert gae(ones, 0 * ones, 10 * ones, yes, no, 0.5, 0.9)[0, 0] == 1.0
    assert gae(ones, 0 * ones, 10 * ones, yes, yes, 0.5, 0.9)[0, 0] == 1.0


def test_lambda_one_without_ends_is_the_discounted_return_less_the_value():
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(6, 2)), rng.normal(size=(7, 2))
    no = np.zeros((6, 2), bool)
    result = gae(rewards, values[:-1], values[1:], no, no, 0.9, 1.0)
    for t in range(6):
        discounts = 0.9 ** np.arange(6 - t)[:, None]
        returns = (discounts * rewards[t:]).sum(axis=0) + 0.9 ** (6 - t) * values[-1]
        np.testing.assert_allclose(result[t], returns - values[t], rtol=1e-5)


def test_flat_keeps_the_valid_rows_in_order():
    valid = np.array([[True, False], [True, True]])
    array = np.arange(8.0).reshape(2, 2, 2)
    fields = dict.fromkeys(
        ("raw_actions", "log_probs", "values", "rewards", "next_values", "terminated", "versions"),
        array,
    )
    trajectories = Trajectories(observations=(array,), truncated=array, valid=valid, **fields)
    np.testing.assert_array_equal(trajectories.flat(array), [[0, 1], [4, 5], [6, 7]])
    trajectories.valid = np.ones((2, 2), bool)
    np.testing.assert_array_equal(trajectories.flat(array), array.reshape(4, 2))


def steps_of(data, shape):
    """Rewards, values, next values (equal to the values that follow), ends and validity."""
    rewards = data.draw(hnp.arrays(np.float64, shape, elements=FINITE))
    values, next_values = (
        data.draw(hnp.arrays(np.float32, shape, elements=FINITE)) for _ in range(2)
    )
    terminated, truncated, fake = (data.draw(hnp.arrays(bool, shape)) for _ in range(3))
    follows = ~(terminated | truncated)[:-1] & ~fake[1:]
    next_values[:-1][follows] = values[1:][follows]
    return rewards, values, next_values, terminated, truncated, ~fake


@settings(max_examples=100, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 7), st.integers(1, 3)),
    gamma=DISCOUNTS,
    lam=DISCOUNTS,
    bars=st.sampled_from([(1.0, 1.0), (2.0, 1.0), (0.5, 3.0)]),
    data=st.data(),
)
def test_vtrace_equals_its_definition(shape, gamma, lam, bars, data):
    rewards, values, next_values, terminated, truncated, valid = steps_of(data, shape)
    log_ratios = data.draw(
        hnp.arrays(np.float32, shape, elements=st.floats(-3, 3, width=32) | st.just(-np.inf))
    )
    arguments = (rewards, values, next_values, log_ratios, terminated, truncated, valid, gamma)
    rho_bar, c_bar = bars
    result = vtrace(*arguments, trace_lambda=lam, rho_bar=rho_bar, c_bar=c_bar)
    expected = vtrace_by_definition(*arguments, lam, rho_bar, c_bar)
    for mine, reference in zip(result, expected):
        assert mine.dtype == np.float32
        np.testing.assert_allclose(mine, reference, rtol=1e-4, atol=1e-3)


@settings(max_examples=100, deadline=None)
@given(shape=st.tuples(st.integers(1, 7), st.integers(1, 3)), lam=DISCOUNTS, data=st.data())
def test_vtrace_on_the_policys_own_steps_is_gae(shape, lam, data):
    rewards, values, next_values, terminated, truncated, _ = steps_of(data, shape)
    valid = np.ones(shape, bool)
    arguments = (rewards, values, next_values)
    result = vtrace(
        *arguments, np.zeros(shape), terminated, truncated, valid, 0.9, trace_lambda=lam
    )
    expected = gae(*arguments, terminated, truncated, 0.9, lam)
    np.testing.assert_allclose(result.corrections, expected, rtol=1e-4, atol=1e-4)


def test_vtrace_clips_the_ratio_once_and_never_overflows():
    one, no, yes = np.ones((1, 1)), np.zeros((1, 1), bool), np.ones((1, 1), bool)
    for log_ratio, rho in ((np.log(0.5), 0.5), (np.log(3.0), 2.0), (800.0, 2.0), (-800.0, 0.0)):
        result = vtrace(one, 0 * one, 0 * one, log_ratio * one, no, no, yes, 0.9, rho_bar=2.0)
        assert abs(result.advantages[0, 0] - rho) < 1e-6
        assert abs(result.corrections[0, 0] - rho) < 1e-6


def test_vtrace_bootstraps_a_truncated_step_from_its_final_observation():
    column = np.array([[1.0], [1.0]])
    no, yes = np.zeros((2, 1), bool), np.ones((2, 1), bool)
    arguments = (column, 0 * column, 10 * column, 0 * column)
    truncated = vtrace(*arguments, no, yes, yes, 0.5)
    np.testing.assert_allclose(truncated.corrections, [[6.0], [6.0]])
    terminated = vtrace(*arguments, yes, no, yes, 0.5)
    np.testing.assert_allclose(terminated.corrections, [[1.0], [1.0]])


def test_fake_steps_hold_anything():
    valid = np.array([[True], [False], [True]])
    ones = np.ones((3, 1))
    truncated = np.array([[True], [False], [False]])
    results = []
    for rubbish in (0.0, np.nan):
        steps = np.where(valid, ones, rubbish)
        results.append(vtrace(steps, steps, steps, steps, ~valid & False, truncated, valid, 0.9))
    for first, second in zip(*results):
        np.testing.assert_array_equal(first, second)
        assert first[1] == 0


def test_other_values_reach_the_step_before_them_where_the_episode_goes_on():
    rng = np.random.default_rng(0)
    shape = (5, 2)
    ends = np.zeros((2, *shape), bool)
    ends[0, 1, 0] = ends[1, 3, 1] = True  # terminated, truncated
    fields = dict.fromkeys(("raw_actions", "log_probs", "rewards"), rng.normal(size=shape))
    trajectories = Trajectories(
        observations=(rng.normal(size=(*shape, 3)),),
        values=rng.normal(size=shape),
        next_values=rng.normal(size=shape),
        terminated=ends[0],
        truncated=ends[1],
        valid=np.ones(shape, bool),
        versions=np.zeros(shape, np.int32),
        **fields,
    )
    old_next = trajectories.next_values.copy()
    values = rng.normal(size=shape)
    changed = trajectories.with_values(values)
    assert changed.values is values
    for t in range(5):
        for n in range(2):
            kept = t == 4 or ends[:, t, n].any()
            expected = old_next[t, n] if kept else values[t + 1, n]
            assert changed.next_values[t, n] == expected
    np.testing.assert_array_equal(trajectories.next_values, old_next)
