from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrl_accel.checkpoint import CheckpointStore, flatten_state, unflatten_state
from msrl_accel.errors import CheckpointError
from msrl_accel.normalize import RewardNormalizer, RunningMeanStd


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(sum),
    shape=st.sampled_from([(), (3,), (2, 2)]),
    offset=st.sampled_from([0.0, 1e6]),
    dtype=st.sampled_from(["float32", "float64", "uint8"]),
    seed=st.integers(0, 1000),
)
def test_batches_equal_their_concatenation(sizes, shape, offset, dtype, seed):
    generator = np.random.default_rng(seed)
    scale = 40.0 if dtype == "uint8" else 1.0
    shift = 128.0 if dtype == "uint8" else offset
    batches = [
        np.clip(generator.normal(shift, scale, (n, *shape)), 0, 255).astype(dtype)
        if dtype == "uint8"
        else generator.normal(shift, scale, (n, *shape)).astype(dtype)
        for n in sizes
    ]
    statistics = RunningMeanStd(shape)
    for batch in batches:
        statistics.update(batch)
    everything = np.concatenate(batches).astype(np.float64)
    assert statistics.count == len(everything)
    assert statistics.mean.shape == statistics.var.shape == shape
    np.testing.assert_allclose(statistics.mean, everything.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(statistics.var, everything.var(0), rtol=1e-7, atol=1e-8)


def test_first_batch_of_one_is_finite():
    statistics = RunningMeanStd((2,))
    np.testing.assert_array_equal(statistics.var, [1.0, 1.0])
    statistics.update(np.array([[3.0, -1.0]]))
    np.testing.assert_array_equal(statistics.mean, [3.0, -1.0])
    np.testing.assert_array_equal(statistics.var, [0.0, 0.0])


def test_wrong_shape_is_named():
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        RunningMeanStd((2,)).update(np.zeros(3))


def rollout(seed: int, steps: int, num_envs: int):
    generator = np.random.default_rng(seed)
    for _ in range(steps):
        yield generator.normal(2.0, 5.0, num_envs), generator.random(num_envs) < 0.1


def test_rewards_by_hand():
    """Return R = gamma R + r; Welford's recurrence over all R with a prior of 1e-4 samples."""
    normalizer = RewardNormalizer(2, gamma=0.9, clip=10.0)
    returns, seen = np.zeros(2), []
    for rewards, dones in rollout(0, 60, 2):
        returns = 0.9 * returns + rewards
        seen.extend(returns)
        count = len(seen) + 1e-4
        mean = sum(seen) / count
        var = (1e-4 * (1 + mean**2) + sum((r - mean) ** 2 for r in seen)) / count
        expected = np.clip(rewards / np.sqrt(var + 1e-8), -10, 10)
        np.testing.assert_allclose(normalizer(rewards, dones), expected, rtol=1e-9)
        returns = np.where(dones, 0.0, returns)


def test_rewards_as_gymnasium_normalises_them():
    class Scripted(gymnasium.Env):
        observation_space = action_space = gymnasium.spaces.Discrete(2)

        def __init__(self, seed):
            self.script = iter(list(rollout(seed, 80, 1)))

        def reset(self, *, seed=None, options=None):
            return 0, {}

        def step(self, action):
            rewards, dones = next(self.script)
            return 0, float(rewards[0]), False, bool(dones[0]), {}

    vector = gymnasium.vector.SyncVectorEnv(
        [lambda seed=seed: Scripted(seed) for seed in range(3)],
        autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP,
    )
    reference = gymnasium.wrappers.vector.NormalizeReward(vector, gamma=0.97)
    reference.reset()
    normalizer = RewardNormalizer(3, gamma=0.97, clip=np.inf)
    for steps in zip(*(rollout(seed, 80, 1) for seed in range(3))):
        rewards = np.array([step[0][0] for step in steps])
        dones = np.array([step[1][0] for step in steps])
        _, expected, *_ = reference.step(np.zeros(3, int))
        # Gymnasium keeps the discounted return in float32.
        np.testing.assert_allclose(normalizer(rewards, dones), expected, rtol=1e-5)
    reference.close()


def test_constant_first_rewards_are_clipped_not_nan():
    result = RewardNormalizer(4, gamma=0.99, clip=10.0)(np.ones(4), np.zeros(4, bool))
    np.testing.assert_array_equal(result, np.full(4, 10.0))


def test_masked_steps_leave_no_trace():
    plain, masked = (RewardNormalizer(2, gamma=0.9) for _ in range(2))
    for rewards, dones in rollout(1, 30, 2):
        expected = plain(rewards, dones)
        nothing = masked(np.full(2, np.nan), np.ones(2, bool), np.zeros(2, bool))
        np.testing.assert_array_equal(nothing, [0.0, 0.0])
        np.testing.assert_array_equal(masked(rewards, dones, np.ones(2, bool)), expected)


def test_restored_from_disk_continues_bit_for_bit(tmp_path):
    whole, resumed = RewardNormalizer(3, gamma=0.9), RewardNormalizer(3, gamma=0.9)
    steps = list(rollout(2, 50, 3))
    for rewards, dones in steps[:25]:
        whole(rewards, dones)
    store = CheckpointStore(tmp_path)
    store.save(1, *flatten_state(whole.state()))
    saved = store.load()
    resumed.restore(unflatten_state(saved.arrays, saved.meta))
    for rewards, dones in steps[25:]:
        assert whole(rewards, dones).tobytes() == resumed(rewards, dones).tobytes()
    with pytest.raises(CheckpointError, match="same environment and number of environments"):
        RewardNormalizer(4, gamma=0.9).restore(whole.state())
