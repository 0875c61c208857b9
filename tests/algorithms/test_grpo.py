"""GRPO's update on real rollouts of a very small model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from text_run_helpers import GROUP, PROMPTS, ROWS, make_grpo, reset, roll

from msrl_accel.algorithms.grpo import GRPOConfig
from msrl_accel.errors import CheckpointError, ConfigError
from msrl_accel.lm.losses import PRESETS

pytestmark = pytest.mark.usefixtures("graph_mode")


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
def compiled():
    """Two epochs of three steps each, towards rewards and a reference."""
    return make_grpo(
        epochs=2,
        updates_per_epoch=PROMPTS,
        kl_coef=0.1,
        learning_rate=5e-2,
        warmup_updates=0,
        max_grad_norm=0.5,
    )


@pytest.fixture
def grouped(compiled):
    """The same, at its start."""
    algorithm, roller = compiled
    reset(algorithm)
    algorithm.start()
    return algorithm, roller


def update(algorithm, rollout):
    return algorithm.update(rollout, 0.0, np.random.default_rng(0))


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


def test_updates_move_the_model_away_from_its_reference(grouped):
    algorithm, roller = grouped
    start = algorithm.model.arrays()
    metrics = update(algorithm, roll(roller))
    assert metrics["grpo/updates"] == 2 * PROMPTS
    # Of the first step, before which nothing had moved.
    assert metrics["grpo/ratio_error"] < 1e-4
    assert metrics["parity/max"] < 1e-4
    # Of all steps.
    assert metrics["grpo/kl"] > 1e-4
    assert metrics["grpo/ratio_max"] > 1.01
    for name, array in algorithm.reference.items():
        np.testing.assert_array_equal(array, start[name])
    assert any(np.any(array != start[name]) for name, array in algorithm.model.arrays().items())


def test_rewarded_completions_become_likelier(grouped):
    algorithm, roller = grouped
    rates = []
    for seed in range(10):
        rollout = roll(roller, seed)
        rates.append(rollout.rewards.mean())
        update(algorithm, rollout)
    assert np.mean(rates[-4:]) > np.mean(rates[:4]) + 0.2


def test_groups_of_equal_rewards_are_not_computed_and_the_step_is_the_same(monkeypatch):
    algorithm, roller = make_grpo(learning_rate=1e-2, warmup_updates=0)
    rollout = roll(roller)
    rollout.scores[:GROUP] = [replace(score, value=1.0) for score in rollout.scores[:GROUP]]
    packed, steps = [], []
    pack = algorithm.learner.packer.pack
    monkeypatch.setattr(
        algorithm.learner.packer,
        "pack",
        lambda sequences, rows: packed.append(rows.tolist()) or pack(sequences, rows),
    )
    for everything in (False, True):
        reset(algorithm)
        if everything:
            monkeypatch.setattr(algorithm, "_with_gradient", lambda rows, advantage: rows)
        metrics = update(algorithm, rollout)
        assert metrics["grpo/ratio_error"] < 1e-4 and metrics["parity/max"] < 1e-4
        steps.append((metrics["grpo/grad_norm"], algorithm.learner.update.state()["moments"]))
    differ = np.repeat(np.ptp(rollout.rewards.reshape(-1, GROUP), axis=1) > 0, GROUP)
    assert 0 < differ.sum() < ROWS
    assert packed == [np.flatnonzero(differ).tolist(), list(range(ROWS))]
    assert steps[0][0] == pytest.approx(steps[1][0], rel=1e-4)
    for name, moment in steps[1][1].items():
        np.testing.assert_allclose(steps[0][1][name], moment, rtol=1e-3, atol=1e-6)


def test_a_correction_needs_the_trainer_s_log_probs_and_is_one_on_policy(grouped, monkeypatch):
    algorithm, roller = grouped
    rollout = roll(roller)
    plain = update(algorithm, rollout)
    reset(algorithm)
    monkeypatch.setattr(algorithm, "settings", algorithm.settings.replace(correction="tis"))
    assert algorithm.needs_log_probs
    log_probs = algorithm.log_probs(rollout)
    corrected = algorithm.update(rollout, 0.0, np.random.default_rng(0), log_probs)
    assert corrected["grpo/ratio_error"] < 1e-6
    assert corrected["grpo/loss"] == pytest.approx(plain["grpo/loss"], abs=1e-4)


def test_the_penalty_of_long_completions_enters_the_reward(grouped, monkeypatch):
    algorithm, roller = grouped
    rollout = roll(roller)
    settings = algorithm.settings.replace(overlong_buffer=0.5)
    monkeypatch.setattr(algorithm, "settings", settings)
    lengths = rollout.completions.lengths  # up to 4, the buffer is 2
    expected = rollout.rewards - np.maximum(lengths - 2, 0) / 2
    np.testing.assert_allclose(algorithm.rewards(rollout), expected)


def test_a_run_without_a_reference_cannot_be_resumed_with_one(compiled):
    without, _ = make_grpo()
    without.start()
    with pytest.raises(CheckpointError, match="started without a KL term"):
        compiled[0].restore(without.state())
