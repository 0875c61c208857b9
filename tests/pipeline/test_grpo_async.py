"""GRPO with completions generated in other processes: versions, lags, faults, resuming."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import run_helpers
from text_run_helpers import PROMPTS, ROWS, grpo, metrics_rows, save_tiny

from msrl_accel.pipeline import grpo_async
from msrl_accel.train import main

no_curves = run_helpers.no_curves
EVEN = "small_rewards:even"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


def run_async(model, run_dir, *more, **values):
    settings = {
        "pipeline.mode": "async",
        "pipeline.workers": 1,
        "pipeline.hang_seconds": 600,  # busy machines compile slowly
        "rewards": EVEN,
        "scoring_workers": 0,
        "learning_rate": 1e-2,
        "recompute": False,
        **values,
    }
    return main(grpo(model, run_dir, *more, **settings))


def test_completions_of_several_versions_are_trained_on_within_the_bound(model, tmp_path):
    run_dir = tmp_path / "run"
    values = {"pipeline.max_staleness": 2, "partial_tokens": 2}
    assert run_async(model, run_dir, iterations=6, **values) == 0
    rows = metrics_rows(run_dir)
    assert [row["step"] for row in rows] == [ROWS * i for i in range(1, 7)]
    for row in rows:
        assert 0 <= row["staleness/lag_max"] <= 2
        assert row["rollout/groups"] == PROMPTS
        # The ratio of the decoupled objective is to the learner's own policy before the update.
        assert row["grpo/ratio_error"] < 1e-4
        assert row["staleness/log_prob_max"] >= 0
        if "parity/max" in row:
            assert row["parity/max"] < 1e-4
    assert max(row["staleness/lag_max"] for row in rows) > 0
    assert rows[-1]["rollout/version"] > 0


def test_without_staleness_every_token_is_of_the_present_weights(model, tmp_path):
    run_dir = tmp_path / "run"
    assert run_async(model, run_dir, iterations=3, **{"pipeline.max_staleness": 0}) == 0
    rows = metrics_rows(run_dir)
    assert [row["rollout/version"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert row["staleness/lag_max"] == row["rollout/lag"] == 0
        assert row["parity/max"] < 1e-4
        assert row["staleness/log_prob_max"] == row["parity/max"]


@pytest.mark.slow
def test_a_resumed_run_counts_versions_on(model, tmp_path):
    run_dir = tmp_path / "run"
    assert run_async(model, run_dir, iterations=3, **{"pipeline.max_staleness": 0}) == 0
    assert main(["--resume", str(run_dir), "--total-steps", str(4 * ROWS), "--quiet"]) == 0
    assert [row["rollout/version"] for row in metrics_rows(run_dir)] == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_killed_worker_is_replaced(model, tmp_path, monkeypatch):
    take = grpo_async.AsyncGRPOTrainer._take
    killed = []

    def take_and_kill(self, slot):
        if not killed:
            (pid,) = self.pool.pids
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)
        return take(self, slot)

    monkeypatch.setattr(grpo_async.AsyncGRPOTrainer, "_take", take_and_kill)
    run_dir = tmp_path / "run"
    assert run_async(model, run_dir, iterations=4, **{"pipeline.max_staleness": 1}) == 0
    rows = metrics_rows(run_dir)
    assert rows[-1]["pipeline/restarts"] == 1
    assert rows[-1]["step"] == 4 * ROWS
    assert np.isfinite(rows[-1]["grpo/loss"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"parity_gate": 1e-3}, "grpo.parity_gate = 0.001"),
        ({"pipeline.engine": "ray"}, "pipeline.engine = 'ray'"),
        ({"pipeline.stale": "down_weight"}, "pipeline.stale = 'down_weight'"),
        (
            {
                "pipeline.mode": "sync",
                "pipeline.workers": 2,
                "pipeline.hang_seconds": 60,
                "partial_tokens": 2,
            },
            "grpo.partial_tokens = 2",
        ),
    ],
)
def test_settings_that_would_do_nothing_are_refused(values, message, model, tmp_path, capsys):
    assert run_async(model, tmp_path / "run", **values) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
