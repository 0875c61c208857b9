"""The diagnosis table, row by row, on metrics made to show each symptom."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from msrl_accel import trace as trace_module
from msrl_accel.config import resolve_config
from msrl_accel.errors import MsrlError
from msrl_accel.metrics import MetricsLogger
from msrl_accel.pipeline.diagnosis import diagnose
from msrl_accel.pipeline.timeline import Timeline
from msrl_accel.run import Run

ROWS = 10
HEALTHY = {
    "time/wait_seconds": 0.01,
    "time/take_seconds": 0.005,
    "time/update_seconds": 0.1,
    "time/publish_seconds": 0.001,
    "time/steps_per_second": 5000.0,
    "episode/return": 20.0,
    "episode/return_std": 3.0,
    "pipeline/worker_idle_share": 0.02,
    "pipeline/worker_blocked_share": 0.02,
    "pipeline/inference_share": 0.2,
    "pipeline/inference_ms": 0.1,
    "pipeline/inference_ms_max": 0.5,
    "pipeline/inference_rows": 32.0,
    "pipeline/queue_depth": 0.5,
    "pipeline/rollout_steps_per_second": 5200.0,
    "pipeline/restarts": 0.0,
    "staleness/lag_mean": 1.0,
    "staleness/lag_max": 2.0,
    "staleness/dropped": 0.0,
    "staleness/down_weighted": 0.0,
    "ppo/behaviour_kl": 0.01,
    "ppo/grad_exploding": 0.0,
}


def metrics_of(**changes):
    values = {**HEALTHY, **{k.replace("__", "/"): v for k, v in changes.items()}}
    columns = {name: np.full(ROWS, float(value)) for name, value in values.items()}
    columns["time/wait_seconds"][0] = 100.0  # the start counts for nothing
    return {"step": 1024 * np.arange(1, ROWS + 1), **columns}


def config_of(mode="async", **overrides):
    options = {k.replace("__", "."): v for k, v in overrides.items()}
    return resolve_config("ppo", "CartPole-v1", overrides={"pipeline.mode": mode, **options})


def test_a_run_in_which_all_keep_pace_has_nothing_to_change():
    found = diagnose(metrics_of(), config_of())
    assert found.bottleneck.startswith("none")
    assert found.findings == []
    assert sum(found.learner.values()) == pytest.approx(1)
    assert sum(found.workers.values()) == pytest.approx(1)
    assert found.learner["updates"] == pytest.approx(0.1 / 0.116)


@pytest.mark.parametrize(
    ("changes", "bottleneck", "setting"),
    [
        # starved learner, by what starves it
        (
            {"time__wait_seconds": 0.3, "pipeline__inference_share": 0.8},
            "starved inference: 32.0 rows a call",
            "pipeline.envs_per_worker",
        ),
        ({"time__wait_seconds": 0.3}, "78% on the environments", "pipeline.workers"),
        (
            {"time__wait_seconds": 0.3, "pipeline__worker_blocked_share": 0.5},
            "bounds on lag",
            "pipeline.max_staleness",
        ),
        ({"pipeline__worker_blocked_share": 0.9}, "the learner", "fewer epochs"),
    ],
)
def test_the_bottleneck_is_named_with_the_setting_to_change(changes, bottleneck, setting):
    found = diagnose(metrics_of(**changes), config_of())
    assert bottleneck in found.bottleneck
    assert setting in found.remedy


@pytest.mark.parametrize(
    ("changes", "symptom", "setting"),
    [
        ({"time__publish_seconds": 0.05}, "publishing takes", "raise pipeline.publish_interval"),
        ({"ppo__behaviour_kl": 0.5}, "0.50 nats", "lower pipeline.queue_size"),
        ({"staleness__dropped": 0.3}, "30% of the samples", "raise pipeline.max_staleness"),
        ({"staleness__down_weighted": 0.3}, "30% of the samples", "pipeline.max_staleness"),
        ({"pipeline__queue_depth": 3.8}, "3.8 updates' worth", "lower pipeline.queue_size = 4"),
        ({"pipeline__inference_ms_max": 50}, "slowest inference call", "placement = separate"),
        ({"pipeline__restarts": 3}, "3 workers were replaced", "mend the environment"),
        ({"ppo__grad_exploding": 2}, "2 gradients exploded", "ppo.kl_coef"),
    ],
)
def test_each_symptom_of_the_table_is_found_alone(changes, symptom, setting):
    (finding,) = diagnose(metrics_of(**changes), config_of()).findings
    assert symptom in finding.symptom
    assert setting in finding.remedy
    assert finding.cause


def test_a_full_queue_that_makes_samples_too_old_is_told_from_slow_trajectories():
    old, long = diagnose(
        metrics_of(pipeline__queue_depth=4, staleness__dropped=0.2), config_of()
    ).findings
    assert old.remedy == "lower pipeline.queue_size = 4"
    assert "queue that is too long" in long.cause


@pytest.mark.parametrize(
    ("rollout", "bottleneck", "remedy"),
    [
        (0.4, "collecting: training waits 80%", "pipeline.mode = async lets both overlap"),
        (0.01, "updates: collecting is 9%", "little can be gained"),
    ],
)
def test_synchronous_runs_are_told_what_async_would_bring(rollout, bottleneck, remedy):
    metrics = {
        "step": np.arange(1, 6),
        "time/rollout_seconds": np.full(5, rollout),
        "time/update_seconds": np.full(5, 0.1),
        "time/steps_per_second": np.full(5, 1.0),
    }
    found = diagnose(metrics, config_of("sync"))
    assert bottleneck in found.bottleneck
    assert remedy in found.remedy
    assert found.workers == {}


def test_too_few_metrics_are_said_so():
    short = {name: values[:1] for name, values in metrics_of().items()}
    with pytest.raises(MsrlError, match="at least two updates"):
        diagnose(short, config_of())


@pytest.mark.parametrize("timeline", [True, False])
def test_the_command_prints_the_diagnosis_and_draws(tmp_path, capsys, timeline):
    run = Run.create(config_of().replace(run_dir=str(tmp_path / "run")))
    table = metrics_of(pipeline__queue_depth=3.8)
    with MetricsLogger(run.path, tensorboard=False) as log:
        for i in range(ROWS):
            log.log(table["step"][i], {k: v[i] for k, v in table.items() if k != "step"})
    if timeline:
        made = Timeline(run.path, True)
        for i in range(ROWS):
            made.span("learner", "update", i, i + 0.5)
            made.span("worker 0, environment 3", "collect", i, i + 0.9)
        made.close()
    assert trace_module.main([str(run.path)]) == 0
    printed = capsys.readouterr().out
    assert "updates 86%" in printed
    assert "bottleneck:" in printed
    assert "-> lower pipeline.queue_size = 4" in printed
    assert ("ui.perfetto.dev" in printed) == timeline
    assert ("--trace" in printed) != timeline
    with Image.open(run.path / "trace.png") as image:
        image.load()
        assert min(image.size) > 300


def test_a_folder_without_run_is_refused_in_one_line(tmp_path, capsys):
    assert trace_module.main([str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "not a run directory" in line
