from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from policy_helpers import gae_by_definition

from msrl_accel.trajectories import Trajectories, gae

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
