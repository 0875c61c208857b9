"""Asynchronous runs: equal to synchronous ones where they must be, and all that they report."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import run_helpers
from async_helpers import ASYNC, BATCH, N_ENVS, mapped_segments, train_async, weights
from run_helpers import rows, state

from msrl_accel.config import resolve_config
from msrl_accel.errors import CheckpointError, ConfigError
from msrl_accel.evaluation import evaluate_run_policy
from msrl_accel.pipeline.async_ import AsyncTrainer
from msrl_accel.pipeline.slots import slot_version
from msrl_accel.pipeline.stepping import check_config
from msrl_accel.run import Run
from msrl_accel.train import train

no_curves = run_helpers.no_curves

NORMALIZED = {"policy__normalize_observations": True, "reward__normalize": True}


def at_iteration(monkeypatch, actions):
    """Call actions[k](trainer) before iteration k."""
    iterate = AsyncTrainer.iterate

    def act_and_iterate(self):
        action = actions.get(self.iteration)
        if action is not None and self.started:
            action(self)
        return iterate(self)

    monkeypatch.setattr(AsyncTrainer, "iterate", act_and_iterate)


def test_one_worker_without_lag_equals_synchronous_training_bit_for_bit(tmp_path):
    train_async(tmp_path / "sync", pipeline__mode="sync", **NORMALIZED)
    train_async(
        tmp_path / "async",
        pipeline__workers=1,
        pipeline__envs_per_worker=N_ENVS,
        pipeline__max_staleness=0,
        **NORMALIZED,
    )
    assert weights(tmp_path / "sync") == weights(tmp_path / "async")
    ours, theirs = rows(tmp_path / "async"), rows(tmp_path / "sync")
    assert len(ours) == len(theirs) == 6
    for row, reference in zip(ours, theirs):
        assert {k: row[k] for k in reference} == reference
    assert all(row["staleness/lag_max"] == 0 for row in ours)
    summaries = [Run(tmp_path / name).summary for name in ("sync", "async")]
    assert summaries[0]["sampled"] == summaries[1]["sampled"]


@pytest.mark.slow
def test_several_workers_without_lag_are_reproducible_and_draw_from_different_streams(tmp_path):
    found = []
    for name in ("one", "two"):
        run_dir = tmp_path / name
        train_async(
            run_dir,
            "msrl_accel.envs.toy:IdentityDiscrete-v0",
            pipeline__max_staleness=0,
            updates=3,
        )
        lag = [row["staleness/lag_max"] for row in rows(run_dir)]
        returns = [row.get("episode/return") for row in rows(run_dir)]
        found.append((weights(run_dir), state(run_dir)[1], lag, returns))
    assert found[0] == found[1]
    assert found[0][2] == [0, 0, 0]


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    """A run with everything reported, stopped and resumed; what was seen of its processes."""
    run_dir = tmp_path_factory.mktemp("observed") / "run"
    seen = {}

    def look(trainer):
        seen["learner"] = allowed_cores(os.getpid())
        seen["workers"] = [allowed_cores(pid) for pid in trainer.pool.pids]
        seen["pids"] = trainer.pool.pids
        seen["maps"] = [Path(f"/proc/{pid}/maps").read_text() for pid in trainer.pool.pids]

    def stop(trainer):
        os.kill(os.getpid(), signal.SIGTERM)

    before = allowed_cores(os.getpid())
    with pytest.MonkeyPatch.context() as patch:
        at_iteration(patch, {2: look, 3: stop})
        train_async(
            run_dir,
            updates=40,
            pipeline__trace=True,
            pipeline__placement="separate",
            logging__tensorboard=True,
            reward__normalize=True,
        )
    stopped_at = Run(run_dir).checkpoints.latest().step
    first = Run(run_dir).checkpoints.load("last").meta["state"]["trainer"]
    train(
        resume=run_dir,
        total_steps=8 * BATCH,
        overrides={"pipeline.workers": 1, "pipeline.envs_per_worker": 5},
    )
    seen["after"] = allowed_cores(os.getpid())
    seen["before"] = before
    return run_dir, stopped_at, first, seen


def allowed_cores(pid):
    """Cores that each thread of a process may run on."""
    return {tuple(sorted(os.sched_getaffinity(int(t)))) for t in os.listdir(f"/proc/{pid}/task")}


def test_a_stopped_run_goes_on_where_it_was(observed):
    run_dir, stopped_at, first, _ = observed
    assert stopped_at < 8 * BATCH
    steps = Run(run_dir).metrics["step"]
    np.testing.assert_array_equal(steps, BATCH * np.arange(1, 9))  # none twice, none left out
    np.testing.assert_array_equal(Run(run_dir).metrics["pipeline/version"], np.arange(1, 9))
    assert first["version"] == stopped_at // BATCH
    last = Run(run_dir).checkpoints.load("last").meta["state"]["trainer"]
    assert last["version"] == 8
    assert last["attempt"] > first["attempt"]  # other random streams
    # The scale of rewards goes on, too.
    assert last["reward_statistics"]["0"][2] > first["reward_statistics"]["0"][2] > 10
    assert Run(run_dir).summary["steps"] == 8 * BATCH


def test_a_run_cannot_be_resumed_in_the_other_mode(observed):
    run_dir, *_ = observed
    with pytest.raises(CheckpointError, match=r"pipeline.mode = 'sync'"):
        train(resume=run_dir, overrides={"pipeline.mode": "sync"}, total_steps=10 * BATCH)


METRICS = (
    "pipeline/rollout_steps_per_second",
    "pipeline/worker_idle_share",
    "pipeline/worker_blocked_share",
    "pipeline/inference_share",
    "pipeline/inference_ms",
    "pipeline/inference_ms_max",
    "pipeline/inference_rows",
    "pipeline/version",
    "pipeline/queue_depth",
    "pipeline/learner_idle_share",
    "pipeline/restarts",
    "pipeline/discarded",
    "pipeline/memory_share",
    "staleness/lag_mean",
    "staleness/lag_max",
    "staleness/lag_0",
    "staleness/dropped",
    "staleness/down_weighted",
    "time/wait_seconds",
    "time/take_seconds",
    "time/update_seconds",
    "time/publish_seconds",
    "time/steps_per_second",
)


def test_the_pipeline_is_reported_in_csv_json_lines_and_tensorboard(observed):
    run_dir, *_ = observed
    table = Run(run_dir).metrics
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    events = b"".join(f.read_bytes() for f in (run_dir / "tensorboard").iterdir())
    for name in METRICS:
        assert np.isfinite(table[name]).all(), name
        np.testing.assert_array_equal(table[name], [line[name] for line in lines])
        if importlib.util.find_spec("tensorboardX"):
            assert name.encode() in events
    for name in METRICS:
        if name.endswith("_share"):
            assert ((table[name] >= 0) & (table[name] <= 1)).all(), name
    histogram = np.stack([table[f"staleness/lag_{i}"] for i in range(8)])
    np.testing.assert_allclose(histogram.sum(axis=0), 1)
    assert (table["staleness/lag_max"] <= 4).all()
    assert (table["staleness/dropped"] == 0).all()
    assert (table["pipeline/inference_rows"][:2] == 8).all()


def test_separate_placement_pins_all_threads_to_disjoint_cores_while_the_run_lasts(observed):
    *_, seen = observed
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core")
    learner = {core for cores in seen["learner"] for core in cores}
    workers = {core for threads in seen["workers"] for cores in threads for core in cores}
    assert learner and workers
    assert not learner & workers
    assert seen["after"] == seen["before"]


def test_workers_do_without_mindspore_where_another_engine_acts(observed):
    *_, seen = observed
    for libraries in seen["maps"]:
        assert "onnxruntime" in libraries
        assert "mindspore" not in libraries


def test_the_trace_holds_all_stages_of_all_parts_of_the_run(observed):
    from msrl_accel.pipeline.timeline import read_timeline

    events = read_timeline(observed[0] / "trace.json")
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = {(names[e["pid"], e["tid"]], e["name"]) for e in events if e["ph"] == "X"}
    assert {("learner", "update"), ("learner", "publish"), ("learner", "take")} <= spans
    assert {("worker 0", "collect"), ("worker 1", "collect")} <= spans
    assert {e["pid"] for e in events} == {1, 2}
    updates = [e for e in events if e["ph"] == "X" and e["name"] == "update"]
    assert len(updates) == 8


def test_nothing_is_left_of_a_run_in_the_process(observed):
    *_, seen = observed
    assert not any(Path(f"/proc/{pid}").exists() for pid in seen["pids"])
    assert mapped_segments() == []


@pytest.mark.slow
def test_slow_environments_go_apart_and_uneven_updates_are_made_of_what_arrives(
    tmp_path, monkeypatch
):
    """IMPALA, a queue that is too long, environments that wait, down-weighting."""
    evaluated = []
    monkeypatch.setattr(
        "msrl_accel.pipeline.async_.evaluate_run_policy",
        lambda runtime, config, *args, **kwargs: (
            evaluated.append(config.vectorization)
            or evaluate_run_policy(runtime, config, *args, **kwargs)
        ),
    )
    run = train_async(
        tmp_path / "run",
        "msrl_accel.envs.delayed:Delayed-v0",
        algo="impala",
        updates=6,
        env_kwargs={"env": "CartPole-v1", "mean_ms": 3, "spread": 1.0},
        impala__n_steps=8,
        pipeline__envs_per_worker=5,
        pipeline__workers=2,
        pipeline__stale="down_weight",
        pipeline__trace=True,
    )
    metrics = run.metrics
    np.testing.assert_array_equal(metrics["step"], BATCH * np.arange(1, 7))
    assert np.isfinite(metrics["impala/policy_loss"]).all()
    assert (metrics["pipeline/inference_rows"] < 5).all()  # never all at once
    assert set(evaluated) == {"threads"}  # nor one after the other in the evaluation
    assert 'worker 1, environment 4"' in (run.path / "trace.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("stepping", ["together", "apart"])
def test_workers_can_roll_out_with_the_training_graph(tmp_path, stepping):
    run = train_async(
        tmp_path / "run",
        runtime__rollout="graph",
        pipeline__stepping=stepping,
        updates=5,
    )
    assert run.metrics["pipeline/version"][-1] == 5
    assert (run.metrics["staleness/dropped"] == 0).all()


def test_a_signal_ends_the_run_within_seconds_and_saves(tmp_path, monkeypatch):
    at = {}

    def interrupt(trainer):
        at["pids"] = trainer.pool.pids
        os.kill(os.getpid(), signal.SIGTERM)
        at["sent"] = time.monotonic()

    at_iteration(monkeypatch, {2: interrupt})
    run = train_async(tmp_path / "run", updates=10_000)
    assert time.monotonic() - at["sent"] < 5
    assert run.summary == {}
    assert run.checkpoints.latest().step == run.metrics["step"][-1] == 2 * BATCH
    assert not any(Path(f"/proc/{pid}").exists() for pid in at["pids"])


def test_the_oldest_slots_are_used_first_whoever_filled_them(tmp_path, monkeypatch):
    """What is left of an update's last slot must not get older than the bound."""
    used = []
    take = AsyncTrainer._take

    def note(self, slots):
        used.append([(slot_version(s), s.producer) for s in slots])
        return take(self, slots)

    monkeypatch.setattr(AsyncTrainer, "_take", note)
    train_async(tmp_path / "run", updates=12, pipeline__envs_per_worker=5)
    assert any(len({producer for _, producer in slots}) == 2 for slots in used)
    assert all(slots == sorted(slots) for slots in used)


def config_of(algo="ppo", **overrides):
    return resolve_config(
        algo, "CartPole-v1", tuned=False, n_envs=16, overrides={**ASYNC_ONLY, **overrides}
    )


ASYNC_ONLY = {k: v for k, v in ASYNC.items() if k.startswith("pipeline")}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"algo": "dqn"}, "dqn learns from a replay.*use pipeline.mode sync"),
        ({"runtime.rollout": "lite"}, "runtime.rollout = 'lite'.*onnx or graph"),
        (
            {"pipeline.publish_interval": 6},
            r"publish_interval = 6.*max_staleness = 2 drops them",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(overrides, words):
    with pytest.raises(ConfigError, match=words) as caught:
        check_config(config_of(overrides.pop("algo", "ppo"), **overrides))
    assert "\n" not in str(caught.value)


def test_off_policy_training_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match="dqn learns from a replay"):
        train(
            algo="dqn",
            env="CartPole-v1",
            run_dir=str(tmp_path / "run"),
            overrides={"pipeline.mode": "async"},
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("size", "warned"), [(16, False), (17, True)])
def test_a_queue_above_16_updates_is_warned_of(size, warned, caplog):
    check_config(config_of(**{"pipeline.queue_size": size}))
    assert ("learning oscillates" in caplog.text) == warned
