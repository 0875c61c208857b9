"""Runs of language models: what they leave behind, resuming, and what may go wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal

import numpy as np
import pytest
import run_helpers
from run_helpers import assert_same_runs
from text_run_helpers import GROUP, PROMPTS, ROWS, grpo, language_run, metrics_rows, save_tiny

from msrl_accel.evaluate import evaluate
from msrl_accel.lm import decode
from msrl_accel.lm.generation import Generator
from msrl_accel.lm.model import CausalLM
from msrl_accel.lm.safetensors_io import write_safetensors
from msrl_accel.lm.samples import read_samples
from msrl_accel.lm.weights import load_model
from msrl_accel.pipeline import lm as pipeline_lm
from msrl_accel.pipeline.grpo import GRPOTrainer
from msrl_accel.run import Run, policy_arrays
from msrl_accel.train import main

no_curves = run_helpers.no_curves
EVEN, SOMETIMES = "small_rewards:even", "small_rewards:sometimes"
ALWAYS, RIGHT = "small_rewards:always", "small_rewards:right"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    """A run with a warm start, evaluations and every kind of state."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    assert main(everything(model, run_dir)) == 0
    return run_dir


def everything(model, run_dir, *more):
    return grpo(
        model,
        run_dir,
        *more,
        steps=40 + 3 * ROWS,
        warm_start_examples=40,
        warm_start_batch_size=4,
        kl_coef=0.05,
        epochs=2,
        learning_rate=1e-2,
        learning_rate_schedule="linear",
        rewards=EVEN,
        scoring_workers=1,
        evaluation__interval_steps=ROWS,
    )


def test_the_directory_holds_the_model_and_what_other_runs_hold(trained):
    names = {path.name for path in trained.iterdir()}
    assert names == {
        "config.yaml",
        "metrics.csv",
        "metrics.jsonl",
        "checkpoints",
        "samples.jsonl",
        "summary.json",
        "tokenizer",
        "model",
    }
    run = Run(trained)
    _, arrays = load_model(trained / "model")
    last = policy_arrays(run.checkpoints.load("last"))
    assert arrays.keys() == last.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, last[name])


def test_the_closing_evaluation_is_told_and_repeated_exactly(trained):
    run = Run(trained)
    for kind in ("deterministic", "sampled"):
        again = evaluate(run, deterministic=kind == "deterministic").to_dict()
        assert again == run.summary[kind]
    assert run.summary["deterministic"]["problems"] == PROMPTS
    assert {"pass@1", "pass@4", "accuracy", "return_ci95"} <= run.summary["sampled"].keys()
    assert run.summary["start"].keys() == {"deterministic", "sampled"}
    assert "right of held-out problems" in repr(run)


def test_metrics_of_warm_start_updates_and_evaluations(trained):
    rows = metrics_rows(trained)
    warm, updates = rows[0], rows[1:]
    assert warm["step"] == 40
    assert np.isfinite(warm["sft/loss"])
    assert [row["step"] for row in updates] == [40 + ROWS * i for i in (1, 2, 3)]
    for row in updates:
        # Rollout and training agree, so a first step on the policy's own samples has ratio 1.
        assert row["parity/max"] < 1e-4
        assert 0 <= row["parity/mean"] <= row["parity/max"]
        assert abs(row["parity/kl"]) < 1e-6
        assert row["grpo/ratio_error"] < 1e-4
        assert row["rollout/lag"] == 0
        assert row["rollout/groups"] == row["rollout/groups_trained"] == ROWS / GROUP
        assert 0 < row["episode/return"] < 1
    assert [row["rollout/version"] for row in updates] == [10, 11, 12]
    assert "eval/accuracy" in updates[-1] and "eval/pass@4" in updates[-1]
    # The reference is the model at the end of the warm start.
    assert updates[0]["grpo/kl"] < updates[-1]["grpo/kl"]


def test_completions_are_logged_as_readable_samples(trained):
    samples = read_samples(trained)
    training = [s for s in samples if s.split == "train"]
    assert {s.step for s in training} == {40 + ROWS * i for i in (1, 2, 3)}
    assert all(s.reward == len(s.completion) % 2 for s in samples)
    assert any(s.split == "held_out" for s in samples)
    assert {s.prompt for s in training}.isdisjoint(
        s.prompt for s in samples if s.split == "held_out"
    )


@pytest.mark.parametrize("iteration", [pytest.param(1, marks=pytest.mark.slow), pytest.param(3)])
def test_a_stopped_run_continues_as_if_it_had_not_been_stopped(
    trained, model, tmp_path, monkeypatch, iteration
):
    stop_in_iteration(monkeypatch, iteration)
    assert main(everything(model, tmp_path / "run")) in (130, 143)
    monkeypatch.undo()
    assert Run(tmp_path / "run").checkpoints.steps()[-1] < 40 + 3 * ROWS
    assert main(["--resume", str(tmp_path / "run"), "--quiet"]) == 0
    assert_same_runs(tmp_path / "run", trained)
    assert read_samples(tmp_path / "run") == read_samples(trained)


def stop_in_iteration(monkeypatch, iteration):
    """Ctrl-C in the middle of an iteration, the first being 1."""
    iterate = GRPOTrainer.iterate

    def iterate_and_interrupt(self):
        if self.iteration + 1 == iteration:
            os.kill(os.getpid(), signal.SIGINT)
        return iterate(self)

    monkeypatch.setattr(GRPOTrainer, "iterate", iterate_and_interrupt)


@pytest.mark.slow
def test_supervised_training_learns_and_packs(model, tmp_path):
    run_dir = tmp_path / "run"
    arguments = language_run(
        "sft",
        model,
        run_dir,
        steps=640,
        batch_size=16,
        learning_rate=1e-2,
        warmup_updates=0,
        updates_per_iteration=10,
        token_budget=64,
    )
    assert main(arguments) == 0
    rows = metrics_rows(run_dir)
    assert rows[-1]["sft/loss"] < 0.85 * rows[0]["sft/loss"]
    assert json.loads((run_dir / "summary.json").read_text())["algo"] == "sft"


@pytest.mark.slow
def test_a_warm_start_ends_at_the_accuracy_asked_for(model, tmp_path):
    values = {"warm_start_examples": 60, "warm_start_batch_size": 4, "rewards": RIGHT}
    values.update(warm_start_accuracy=1.0, scoring_workers=1)
    assert main(grpo(model, tmp_path / "run", steps=62, **values)) == 0
    rows = metrics_rows(tmp_path / "run")
    assert rows[0]["sft/accuracy"] == 1.0
    assert [row["step"] for row in rows] == [40, 52, 64]


# What may go wrong


@pytest.fixture
def refused(capsys):
    """Runs a command line that must fail with status 2; returns what it says."""

    def run(arguments):
        assert main(arguments) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.startswith("python -m msrl_accel.train: ")
        return output.err

    return run


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"group_size": 1}, "group_size = 1: advantage = 'grpo' compares"),
        ({"clip_low": -1.0}, "clip_low = -1.0: must be > 0"),
        ({"preset": "gpo"}, "expected one of grpo, dr_grpo, dapo"),
        ({"warm_start_examples": 1000}, "the warm start alone takes 1000"),
        ({"prompt": "chat"}, "the tokenizer has no chat template"),
        ({"max_prompt_tokens": 40}, "max_prompt_tokens + max_new_tokens = 44"),
        ({"max_prompt_tokens": 2}, "no held-out problems with prompts of at most"),
        ({"rewards": "tsk"}, "reward 'tsk' is not known"),
        ({"rewards": "small_rewards:odd"}, "a scoring worker cannot start"),
        ({"reward_kwargs": {"math": {}}}, "'math' is not in the formula"),
        ({"n_envs": 4}, "n_envs = 4: grpo does not use it"),
        ({"policy.activation": "relu"}, "policy.activation = 'relu': grpo does not use it"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_and_leaves_no_run(
    model, tmp_path, refused, values, message
):
    top = {k: values.pop(k) for k in ("n_envs",) if k in values}
    flags = [f"--n-envs={top['n_envs']}"] if top else []
    assert message in refused(grpo(model, tmp_path / "run", *flags, **values))
    assert not (tmp_path / "run").exists()


def spoil(folder, kind):
    """Spoil a model folder."""
    if kind == "missing tensor":
        _, arrays = load_model(folder)
        del arrays["model.norm.weight"]
        rewrite(folder, arrays)
    elif kind == "wrong shape":
        _, arrays = load_model(folder)
        arrays["model.norm.weight"] = np.ones(3, np.float32)
        rewrite(folder, arrays)
    elif kind == "unknown architecture":
        config = json.loads((folder / "config.json").read_text())
        changed = {**config, "model_type": "mamba", "architectures": ["MambaForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(changed))
    elif kind == "no weights":
        (folder / "model.safetensors").unlink()
    elif kind == "cut off":
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def rewrite(folder, arrays):
    (folder / "model.safetensors").unlink()
    write_safetensors(folder / "model.safetensors", arrays, "float32")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing tensor", "lacks model.norm.weight"),
        ("wrong shape", "has model.norm.weight of shape (3,)"),
        ("unknown architecture", "'mamba' are not supported"),
        ("no weights", "has neither model.safetensors nor"),
        ("cut off", "was cut off"),
    ],
)
def test_a_bad_model_folder_is_refused(model, tmp_path, refused, kind, message):
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    spoil(folder, kind)
    assert message in refused(grpo(folder, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_no_model_there_or_no_data(model, tmp_path, refused):
    assert "no language model at nowhere" in refused(grpo("nowhere", tmp_path / "run"))
    (tmp_path / "empty.jsonl").write_text("\n")
    env = f"jsonl:{tmp_path / 'empty.jsonl'}"
    arguments = language_run("sft", model, tmp_path / "run", steps=16, env=env)
    assert "is empty; it needs lines with prompt and answer" in refused(arguments)


def test_groups_with_a_verifier_that_fails_are_left_out_and_nothing_is_lost(
    model, tmp_path, caplog
):
    run_dir = tmp_path / "run"
    values = {"rewards": SOMETIMES, "scoring_workers": 1, "scoring_timeout": 20.0}
    faults = {SOMETIMES: {"fault": "nan"}}
    assert main(grpo(model, run_dir, iterations=3, reward_kwargs=faults, **values)) == 0
    rows = metrics_rows(run_dir)
    assert sum(row["rollout/failed"] for row in rows) > 0
    for row in rows:
        failed = [s for s in read_samples(run_dir) if s.step == row["step"] and s.reward is None]
        assert len([s for s in failed if s.split == "train"]) == row["rollout/failed"]
        assert row["rollout/groups_trained"] == row["rollout/groups"] - len(
            {s.prompt for s in failed if s.split == "train"}
        )
        assert 0 <= row["episode/return"] <= 1
    assert "could not be scored" in caplog.text
    assert "the reward is nan" in caplog.text


def always_failing(model, run_dir, fault):
    """Command line of a run in which no completion can be scored; its warm start takes 8 steps."""
    values = {"rewards": ALWAYS, "reward_kwargs": {ALWAYS: {"fault": fault}}}
    values.update(scoring_workers=2, scoring_timeout=0.2, group_size=2, prompts_per_iteration=1)
    return grpo(model, run_dir, steps=100, warm_start_examples=8, warm_start_batch_size=8, **values)


@pytest.mark.parametrize("fault", ["raise", pytest.param("hang", marks=pytest.mark.slow)])
def test_a_reward_that_always_fails_ends_the_run_before_training(model, tmp_path, refused, fault):
    message = refused(always_failing(model, tmp_path / "run", fault))
    assert "evaluation: 3 of 3 completions could not be scored" in message
    assert {"raise": "cannot judge", "hang": "no answer within 0.2 s"}[fault] in message
    assert Run(tmp_path / "run").checkpoints.steps() == [8]


def test_a_reward_that_fails_from_some_time_on_ends_the_run_with_its_reason_and_a_checkpoint(
    model, tmp_path, refused, monkeypatch
):
    monkeypatch.setattr(GRPOTrainer, "_evaluate_start", lambda trainer: {"accuracy": 0.5})
    message = refused(always_failing(model, tmp_path / "run", "raise"))
    assert (
        "3 iterations left nothing to train on: 2 of 2 completions could not be scored" in message
    )
    assert "cannot judge" in message
    assert Run(tmp_path / "run").checkpoints.steps()[-1] == 12


@pytest.mark.slow
def test_groups_that_are_all_equal_are_sampled_anew_up_to_a_bound(model, tmp_path, refused):
    run_dir = tmp_path / "run"
    values = {"preset": "dapo", "max_resamples": 2, "rewards": EVEN, "scoring_workers": 1}
    assert main(grpo(model, run_dir, steps=60, **values, overlong_buffer=0.0)) == 0
    for row in metrics_rows(run_dir):
        assert row["rollout/groups"] <= 9
        assert row["rollout/groups_trained"] <= 3
    # No completion of this model is ever right.
    message = refused(
        grpo(
            model,
            tmp_path / "none",
            steps=1000,
            **{**values, "rewards": "exact"},
            overlong_buffer=0.0,
            max_new_tokens=1,
        )
    )
    assert "in each of 9 groups all rewards are equal (their mean is 0)" in message


def test_the_gate_names_weights_that_generation_has_not_the_same(
    model, tmp_path, refused, monkeypatch
):
    def generator_of_another(model, *arguments, **options):
        other = CausalLM(model.config, seed=None)
        arrays = model.arrays()
        arrays["model.layers.0.mlp.up_proj.weight"][3, 5] += 0.5
        other.load_arrays(arrays)
        return Generator(other, *arguments, **options)

    monkeypatch.setattr(pipeline_lm, "Generator", generator_of_another)
    message = refused(grpo(model, tmp_path / "run", "--parity-gate", "1e-5"))
    assert "more than parity_gate = 1e-05" in message
    assert "weights: generation has other ones: 1 of 11" in message
    assert "model.layers.0.mlp.up_proj.weight, by up to 0.5" in message


def test_the_gate_names_positions_tokens_and_layer(model, tmp_path, refused, monkeypatch):
    tables = decode.rope_tables

    def one_position_off(config, length):
        return tuple(np.roll(table, -1, axis=0) for table in tables(config, length))

    monkeypatch.setattr(decode, "rope_tables", one_position_off)
    message = refused(grpo(model, tmp_path / "run", "--parity-gate", "1e-5"))
    # The first token comes from the prompt alone, which both read in the same way.
    positions = [int(n) for n in re.findall(r"position (\d+): token", message)]
    assert positions
    assert 0 not in positions
    assert re.search(
        r"position \d+: token \d+ '.*', -\d\.\d+ in generation, -\d\.\d+ in tr", message
    )
    assert "part in layer 0 (model.layers.0)" in message


@pytest.mark.slow
def test_a_gate_that_holds_lets_the_run_be(model, tmp_path):
    arguments = grpo(model, tmp_path / "run", "--parity-gate", "1e-4", iterations=1)
    assert main(arguments) == 0
