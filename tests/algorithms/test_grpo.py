"""GRPO's update on real rollouts of a very small model."""

from __future__ import annotations

import numpy as np
import pytest
from text_run_helpers import GROUP, PROMPTS, ROWS, make_grpo, roll

from msrl_accel.algorithms.grpo import GRPOConfig
from msrl_accel.errors import CheckpointError, ConfigError
from msrl_accel.lm.losses import PRESETS

pytestmark = [pytest.mark.usefixtures("graph_mode"), pytest.mark.slow]


@pytest.mark.parametrize("preset", PRESETS)
def test_the_loss_is_the_preset_unless_a_part_is_set(preset):
    assert GRPOConfig(preset=preset).loss() == PRESETS[preset]
    changed = GRPOConfig(preset=preset, clip_high=0.5, kl_coef=0.01).loss()
    assert changed == PRESETS[preset].replace(clip_high=0.5, kl_coef=0.01)


def test_only_advantages_within_a_group_need_one():
    with pytest.raises(ConfigError, match="group_size = 1"):
        GRPOConfig(group_size=1).loss()
    assert GRPOConfig(group_size=1, preset="reinforce++").loss()


@pytest.fixture(scope="module")
def grouped():
    """Two epochs of three steps each, towards rewards and a reference."""
    return make_grpo(epochs=2, updates_per_epoch=PROMPTS, kl_coef=0.1, learning_rate=5e-2)


def test_each_step_takes_whole_groups_and_each_epoch_takes_all(grouped):
    algorithm, roller = grouped
    rollout = roll(roller)
    parts = list(algorithm._parts(rollout, np.random.default_rng(0)))
    assert len(parts) == 2 * PROMPTS
    for epoch in (parts[:PROMPTS], parts[PROMPTS:]):
        assert sorted(np.concatenate(epoch).tolist()) == list(range(ROWS))
    for part in parts:
        assert len(set(rollout.completions.prompt_index[part])) == 1
        assert len(part) == GROUP


def test_updates_count_move_the_model_and_leave_the_reference(grouped):
    algorithm, roller = grouped
    algorithm.start()
    start = algorithm.model.arrays()
    first = algorithm.update(roll(roller), 0.0, np.random.default_rng(0))
    assert first["grpo/updates"] == 2 * PROMPTS
    assert first["grpo/ratio_error"] < 1e-4
    assert first["grpo/kl"] > 0  # of the later steps
    later = algorithm.update(roll(roller, 1), 0.5, np.random.default_rng(0))
    assert later["grpo/kl"] > first["grpo/kl"]
    for name, array in algorithm.reference.items():
        np.testing.assert_array_equal(array, start[name])
    assert any(np.any(array != start[name]) for name, array in algorithm.model.arrays().items())


def test_rewarded_completions_become_likelier():
    algorithm, roller = make_grpo(learning_rate=2e-2, warmup_updates=0, kl_coef=0.0)
    rates = []
    for seed in range(12):
        rollout = roll(roller, seed)
        rates.append(rollout.rewards.mean())
        algorithm.update(rollout, 0.0, np.random.default_rng(0))
    assert np.mean(rates[-4:]) > np.mean(rates[:4]) + 0.2


def test_the_penalty_of_long_completions_enters_the_reward():
    algorithm, roller = make_grpo(preset="dapo", overlong_buffer=0.5)
    rollout = roll(roller)
    lengths = rollout.completions.lengths  # up to 4, the buffer is 2
    expected = rollout.rewards - np.maximum(lengths - 2, 0) / 2
    np.testing.assert_allclose(algorithm.rewards(rollout), expected)


def test_a_correction_is_one_where_the_rollout_is_the_trainer_s():
    algorithm, roller = make_grpo(correction="tis")
    assert algorithm.needs_log_probs
    rollout = roll(roller)
    log_probs = algorithm.log_probs(rollout)
    metrics = algorithm.update(rollout, 0.0, np.random.default_rng(0), log_probs)
    assert metrics["grpo/ratio_error"] < 1e-5
    assert metrics["parity/max"] < 1e-4


def test_a_run_without_a_reference_cannot_be_resumed_with_one():
    algorithm, _ = make_grpo()
    algorithm.start()
    state = algorithm.state()
    other, _ = make_grpo(kl_coef=0.1)
    with pytest.raises(CheckpointError, match="started without a KL term"):
        other.restore(state)
