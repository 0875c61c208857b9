from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrl_accel.checkpoint import CheckpointStore, flatten_state, unflatten_state
from msrl_accel.errors import CheckpointError, MsrlError
from msrl_accel.metrics import EpisodeStats, MetricsLogger, read_metrics


def json_lines(run_dir):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    text = (run_dir / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def tensorboard_scalars(run_dir):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_columns_widen_and_values_come_back_exactly(tmp_path):
    with MetricsLogger(tmp_path, tensorboard=False) as logger:
        logger.log(10, {"loss": 0.1})
        logger.log(20, {"eval/return, mean": np.float32(0.3), "loss": 1e-300})
        logger.log(np.int64(30), {"count": 3})
    assert (tmp_path / "metrics.csv").read_text().splitlines() == [
        'step,loss,"eval/return, mean",count',
        "10,0.1,,",
        f"20,1e-300,{float(np.float32(0.3))!r},",
        "30,,,3.0",
    ]
    metrics = read_metrics(tmp_path)
    assert metrics["step"].dtype == np.int64
    np.testing.assert_array_equal(metrics["step"], [10, 20, 30])
    np.testing.assert_array_equal(metrics["loss"], [0.1, 1e-300, math.nan])
    np.testing.assert_array_equal(metrics["count"], [math.nan, math.nan, 3.0])
    assert json_lines(tmp_path)[1]["eval/return, mean"] == float(np.float32(0.3))


def test_non_finite_values_are_null_in_json(tmp_path):
    with MetricsLogger(tmp_path) as logger:
        logger.log(1, {"a": math.nan, "b": -math.inf, "c": 2.0})
    assert json_lines(tmp_path) == [{"step": 1, "a": None, "b": None, "c": 2.0}]
    metrics = read_metrics(tmp_path)
    assert math.isnan(metrics["a"][0])
    assert metrics["b"][0] == -math.inf
    assert tensorboard_scalars(tmp_path) == {"c": [(1, 2.0)]}


def test_resume_drops_later_rows_everywhere(tmp_path):
    with MetricsLogger(tmp_path) as logger:
        for step in (10, 20, 30, 40):
            logger.log(step, {"loss": step})
    with MetricsLogger(tmp_path, resume_step=20) as logger:
        logger.log(30, {"loss": 300})
        logger.log(40, {"loss": 400, "extra": 1})
    np.testing.assert_array_equal(read_metrics(tmp_path)["step"], [10, 20, 30, 40])
    np.testing.assert_array_equal(read_metrics(tmp_path)["loss"], [10, 20, 300, 400])
    assert [line["loss"] for line in json_lines(tmp_path)] == [10, 20, 300, 400]
    assert tensorboard_scalars(tmp_path)["loss"] == [(10, 10), (20, 20), (30, 300), (40, 400)]


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(1, 40))
def test_torn_last_line_is_tolerated(tmp_path_factory, cut):
    run_dir = tmp_path_factory.mktemp("torn")
    with MetricsLogger(run_dir, tensorboard=False) as logger:
        for step in (10, 20, 30):
            logger.log(step, {"loss": step + 0.125, "other": 0.25})
    for name in ("metrics.csv", "metrics.jsonl"):
        content = (run_dir / name).read_bytes()
        (run_dir / name).write_bytes(content[:-cut])
    for _ in range(2):
        metrics = read_metrics(run_dir)
        rows = len(metrics["step"])
        assert rows in (0, 1, 2)
        np.testing.assert_array_equal(metrics["loss"], [10.125, 20.125, 30.125][:rows])
        MetricsLogger(run_dir, tensorboard=False, resume_step=100).close()
    with MetricsLogger(run_dir, tensorboard=False, resume_step=10) as logger:
        logger.log(11, {"loss": 1.5})
    assert read_metrics(run_dir)["loss"][-1] == json_lines(run_dir)[-1]["loss"] == 1.5


def test_each_row_is_on_disk_before_a_kill(tmp_path):
    code = """
import os, sys
from msrl_accel.metrics import MetricsLogger
logger = MetricsLogger(sys.argv[1], tensorboard=False)
logger.log(1, {"a": 1.0})
logger.log(2, {"b": 2.0})
os.kill(os.getpid(), 9)
"""
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    np.testing.assert_array_equal(read_metrics(tmp_path)["step"], [1, 2])
    assert json_lines(tmp_path) == [{"step": 1, "a": 1.0}, {"step": 2, "b": 2.0}]


def test_missing_tensorboardx_warns_once_and_csv_goes_on(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with MetricsLogger(tmp_path) as logger:
            logger.log(1, {"a": 1.0})
            logger.log(2, {"a": 2.0})
    assert len(caught) == 1
    assert "msrl_accel[tensorboard]" in str(caught[0].message)
    assert caught[0].filename == __file__
    np.testing.assert_array_equal(read_metrics(tmp_path)["a"], [1.0, 2.0])
    assert not (tmp_path / "tensorboard").exists()


def test_old_metrics_are_not_overwritten(tmp_path):
    with MetricsLogger(tmp_path, tensorboard=False) as logger:
        logger.log(1, {"a": 1.0})
    with pytest.raises(MsrlError, match=r"already holds metrics.csv: resume that run"):
        MetricsLogger(tmp_path, tensorboard=False)
    assert len(read_metrics(tmp_path)["step"]) == 1


def test_misuse_is_named(tmp_path):
    with pytest.raises(MsrlError, match="does not exist"):
        read_metrics(tmp_path / "nowhere")
    logger = MetricsLogger(tmp_path, tensorboard=False)
    with pytest.raises(MsrlError, match="metric name"):
        logger.log(1, {"two\nlines": 1.0})
    logger.close()
    logger.close()
    with pytest.raises(MsrlError, match="closed"):
        logger.log(1, {"a": 1.0})
    (tmp_path / "metrics.csv").write_text("step,a\n1,2,3\n")
    with pytest.raises(MsrlError, match="line 2 is damaged: 3 fields instead of 2"):
        read_metrics(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(MsrlError, match="choose a writable run directory"):
        MetricsLogger(tmp_path / "file", tensorboard=False)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_is_named(tmp_path):
    logger = MetricsLogger(tmp_path, tensorboard=False)
    logger.log(1, {"a": 1.0})
    logger._csv.close()
    logger._csv = open("/dev/full", "ab", buffering=0)  # noqa: SIM115 (the logger closes it)
    with pytest.raises(MsrlError, match="No space left on device; free disk space"):
        logger.log(2, {"a": 1.0})
    logger.close()
    np.testing.assert_array_equal(read_metrics(tmp_path)["step"], [1])


@settings(max_examples=60, deadline=None)
@given(
    num_envs=st.integers(1, 5),
    window=st.integers(1, 7),
    steps=st.integers(0, 40),
    seed=st.integers(0, 999),
)
def test_episode_statistics_against_plain_lists(num_envs, window, steps, seed):
    generator = np.random.default_rng(seed)
    stats = EpisodeStats(num_envs, window)
    running = [[] for _ in range(num_envs)]
    finished = []
    for _ in range(steps):
        rewards = generator.integers(-5, 6, num_envs).astype(np.float64)
        dones = generator.random(num_envs) < 0.3
        valid = generator.random(num_envs) < 0.8
        stats.update(rewards, dones, valid)
        for env in np.flatnonzero(valid):
            running[env].append(rewards[env])
            if dones[env]:
                finished.append(running[env])
                running[env] = []
    assert stats.episodes == len(finished)
    recent = finished[-window:]
    summary = stats.summary()
    if not recent:
        assert math.isnan(stats.return_mean)
        assert math.isnan(stats.length_mean)
        assert summary == {"episode/count": 0.0}
        return
    returns = [sum(episode) for episode in recent]
    assert stats.return_mean == pytest.approx(np.mean(returns))
    assert stats.length_mean == pytest.approx(np.mean([len(episode) for episode in recent]))
    assert summary["episode/return_std"] == pytest.approx(np.std(returns))
    assert summary["episode/return_min"] == min(returns)
    assert summary["episode/return_max"] == max(returns)


def test_episode_statistics_resume_exactly(tmp_path):
    def run(stats, generator, steps):
        for _ in range(steps):
            stats.update(
                generator.normal(size=4), generator.random(4) < 0.2, generator.random(4) < 0.9
            )

    whole, generator = EpisodeStats(4, 10), np.random.default_rng(3)
    run(whole, generator, 37)
    store = CheckpointStore(tmp_path)
    store.save(1, *flatten_state({"stats": whole.state(), "rng": generator.bit_generator.state}))
    run(whole, generator, 50)
    saved = store.load()
    state = unflatten_state(saved.arrays, saved.meta)
    resumed, other = EpisodeStats(4, 10), np.random.default_rng(0)
    resumed.restore(state["stats"])
    other.bit_generator.state = state["rng"]
    run(resumed, other, 50)
    assert resumed.summary() == whole.summary()
    with pytest.raises(CheckpointError, match="same number of environments"):
        EpisodeStats(5, 10).restore(state["stats"])
