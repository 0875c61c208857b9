"""`python -m msrl_accel.train`: what a run leaves behind and what it tells."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex

import numpy as np
import pytest
from PIL import Image
from run_helpers import BATCH, assert_same_runs, python_m, rows, tiny

from msrl_accel import evaluate
from msrl_accel.config import load_config, resolve_config
from msrl_accel.errors import ConfigError
from msrl_accel.run import Run
from msrl_accel.train import main, train

SECTIONS = {
    "ppo": {"n_steps": 8, "batch_size": 32, "n_epochs": 2},
    "policy": {"hidden_sizes": [8]},
    "evaluation": {"episodes": 4, "interval_steps": 2 * BATCH},
    "checkpoint": {"interval_seconds": 0, "keep_last": 2},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Run directory and output of one run from the command line."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    result = python_m(
        "msrl_accel.train",
        *tiny(
            run_dir,
            "--seed=7",
            evaluation__interval_steps=2 * BATCH,
            checkpoint__interval_seconds=0,
            checkpoint__keep_last=2,
            logging__tensorboard=True,
        ),
    )
    assert result.returncode == 0, result.stderr
    return run_dir, result


def test_the_directory_holds_the_documented_files(trained):
    run_dir, _ = trained
    names = {path.name for path in run_dir.iterdir()}
    assert names - {"tensorboard"} == {
        "config.yaml",
        "metrics.csv",
        "metrics.jsonl",
        "checkpoints",
        "learning_curve.png",
        "summary.json",
    }
    with Image.open(run_dir / "learning_curve.png") as image:
        image.load()
        assert image.format == "PNG"
        assert min(image.size) > 200


def test_the_saved_config_is_the_one_resolved(trained):
    run_dir, _ = trained
    asked = resolve_config(
        "ppo",
        "CartPole-v1",
        tuned=False,
        seed=7,
        n_envs=16,
        total_steps=4 * BATCH,
        run_dir=str(run_dir),
        **SECTIONS,
    )
    assert load_config(run_dir / "config.yaml") == asked == Run(run_dir).config


def test_metrics_agree_in_all_forms(trained):
    run_dir, _ = trained
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    metrics = Run(run_dir).metrics
    assert [line["step"] for line in lines] == [BATCH, 2 * BATCH, 3 * BATCH, 4 * BATCH]
    assert metrics["step"].tolist() == [line["step"] for line in lines]
    for name in {name for line in lines for name in line}:
        column = [line.get(name) for line in lines]
        expected = [np.nan if value is None else value for value in column]
        np.testing.assert_array_equal(metrics[name], expected, err_msg=name)
    assert {"episode/return", "ppo/approx_kl", "ppo/grad_norm", "time/steps_per_second"} <= set(
        metrics
    )
    assert np.isfinite(metrics["eval/return"]).tolist() == [False, True, False, True]
    np.testing.assert_allclose(metrics["ppo/updates"], [8, 16, 24, 32])
    # Before its first step an update sees the policy that acted.
    assert np.all(metrics["ppo/ratio_error"] < 1e-5)


def test_the_last_checkpoints_are_kept_and_the_best(trained):
    run_dir, _ = trained
    store = Run(run_dir).checkpoints
    assert store.steps()[-2:] == [3 * BATCH, 4 * BATCH]
    assert len(store.steps()) <= 3
    best = store.best()
    assert best.score == max(store.load(step).score for step in store.steps())


@pytest.mark.skipif(not importlib.util.find_spec("tensorboardX"), reason="needs tensorboardX")
def test_tensorboard_events_are_written(trained):
    run_dir, _ = trained
    (file,) = (run_dir / "tensorboard").iterdir()
    assert "tfevents" in file.name
    assert b"episode/return" in file.read_bytes()


def test_progress_and_summary_say_what_was_reached_and_what_to_type_next(trained, capsys):
    run_dir, result = trained
    summary = Run(run_dir).summary
    assert f"{4 * BATCH}/{4 * BATCH} steps (100%)" in result.stderr
    assert "Trained ppo on CartPole-v1" in result.stdout
    reached = f"{summary['deterministic']['return_mean']:.1f}"
    assert f"return, deterministic: {reached} +-" in result.stdout
    assert str(run_dir) in result.stdout
    command = re.search(r"evaluate again: +python -m msrl_accel.evaluate (.*)", result.stdout)
    assert evaluate.main([*shlex.split(command.group(1)), "--episodes=4", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["returns"] == summary["deterministic"]["returns"]


def test_the_saved_config_alone_reproduces_the_run(trained, tmp_path, capfd):
    run_dir, _ = trained
    other = tmp_path / "other"
    arguments = ["--config", str(run_dir / "config.yaml"), "--run-dir", str(other), "--quiet"]
    assert main(arguments) == 0
    assert_same_runs(run_dir, other)
    output = capfd.readouterr()
    assert output.out == ""
    # Only the library's own silence is asked for: MindSpore may log to the descriptor.
    assert not [line for line in output.err.splitlines() if not line.startswith("[")]


def test_whole_batches_reach_the_total_and_rows_come_at_their_interval(tmp_path):
    arguments = tiny(tmp_path / "run", "--quiet", logging__interval_iterations=2)
    arguments[arguments.index("--total-steps") + 1] = str(2 * BATCH + 1)
    assert main(arguments) == 0
    run = Run(tmp_path / "run")
    assert [row["step"] for row in rows(run.path)] == [2 * BATCH, 3 * BATCH]
    assert run.checkpoints.steps() == [3 * BATCH]
    assert run.summary["steps"] == 3 * BATCH


def test_the_default_directory_names_environment_algorithm_and_seed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = tiny("unused", "--quiet", "--seed=3", iterations=1, n_envs=2)
    at = arguments.index("--run-dir")
    assert main(arguments[:at] + arguments[at + 2 :]) == 0
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert run_dir.name.startswith("CartPole-v1-ppo-seed3-")
    assert Run(run_dir).config.run_dir == f"runs/{run_dir.name}"


def test_a_config_and_values_are_not_mixed_silently():
    config = resolve_config("ppo", "CartPole-v1")
    with pytest.raises(ConfigError, match="seed: given besides a whole config"):
        train(config, seed=1)
