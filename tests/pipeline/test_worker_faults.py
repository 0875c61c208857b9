"""Workers and learners that die, raise, hang, are stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import run_helpers
from async_helpers import (
    ASYNC,
    BATCH,
    alive,
    descendants,
    is_worker,
    mapped_segments,
    shared_segments,
    train_async,
    until,
)
from run_helpers import STOPPED, environment, settings
from test_async import at_iteration

from msrl_accel.errors import EnvError
from msrl_accel.run import Run

no_curves = run_helpers.no_curves


def test_every_kind_of_failed_worker_is_replaced_and_training_ends_well(
    tmp_path, monkeypatch, caplog
):
    """In one run: SIGKILL, SIGSTOP, an exception, an exit and a hang of an environment."""
    faults = tmp_path / "faults"
    faults.mkdir()
    seen = {}

    def replaced(trainer, reason):
        """Wait until a failure was noticed and all workers run again."""

        def done():
            trainer.pool.supervise()
            return reason in caplog.text and len(trainer.pool.pids) == 2

        until(done, what=f"not noticed: {reason}")

    def kill(trainer):
        seen["killed"] = trainer.pool.pids[0]
        os.kill(seen["killed"], signal.SIGKILL)

    def stop(trainer):
        replaced(trainer, "was killed by SIGKILL in")
        seen["stopped"] = trainer.pool.pids[1]
        os.kill(seen["stopped"], signal.SIGSTOP)

    def misbehave(name, before):
        def act(trainer):
            replaced(trainer, before)
            (faults / name).touch()

        return act

    def last(trainer):
        replaced(trainer, "and was killed; its stacks:")

    plan = [
        kill,
        stop,
        misbehave("raise", "gave no sign of life for"),
        misbehave("exit", "LocalError: local error 1 2"),
        misbehave("hang", "ended with exit code 7 in a step of faulty_envs:FaultyOnce-v0"),
        last,
    ]
    at_iteration(monkeypatch, {2 + 2 * i: action for i, action in enumerate(plan)})
    run = train_async(
        tmp_path / "run",
        "faulty_envs:FaultyOnce-v0",
        updates=16,
        env_kwargs={"folder": str(faults)},
        pipeline__hang_seconds=2,
        pipeline__max_staleness=1,
    )
    metrics = run.metrics
    np.testing.assert_array_equal(metrics["step"], BATCH * np.arange(1, 17))
    np.testing.assert_array_equal(metrics["pipeline/version"], np.arange(1, 17))
    assert metrics["pipeline/restarts"][-1] >= 5  # on a machine that is busy, another may seem hung
    assert np.isfinite(metrics["ppo/policy_loss"]).all()
    assert (metrics["staleness/lag_max"] <= 2).all()  # those of the slow may be dropped
    # Counter's reward tells the step, and every episode has 4: nothing partial was trained on.
    assert set(metrics["episode/return"][2:]) == {10.0}
    assert "in a step of faulty_envs:FaultyOnce-v0 and was killed; its stacks:" in caplog.text
    assert 'faulty_envs.py"' in caplog.text  # the very line of the environment
    assert not alive(seen["killed"])
    assert not alive(seen["stopped"])
    assert mapped_segments() == []


def test_after_too_many_failures_the_run_ends_with_the_traceback_and_a_checkpoint(tmp_path):
    run_dir = tmp_path / "run"
    with pytest.raises(EnvError) as caught:
        train_async(
            run_dir,
            "faulty_envs:FailsLater-v0",
            updates=1000,
            env_kwargs={"episodes": 6},
            pipeline__workers=1,
            pipeline__max_restarts=0,
        )
    message = str(caught.value)
    assert "worker 0 failed 1 times in a row (pipeline.max_restarts = 0)" in message
    assert "raise LocalError(3, 4)" in message  # the child's line
    assert "faulty_envs:FailsLater-v0: environment 0 raised LocalError" in message
    step = Run(run_dir).checkpoints.latest().step
    assert step == Run(run_dir).metrics["step"][-1] > 0
    assert f"The checkpoint of step {step:,} is kept" in message
    assert f"--resume {run_dir}" in message


def command(run_dir, *more):
    values = {key.replace(".", "__"): value for key, value in ASYNC.items()}
    return [
        *(sys.executable, "-m", "msrl_accel.train", "--algo", "ppo", "--env", "CartPole-v1"),
        *("--no-tuned", "--n-envs", "16", "--total-steps", "100000000", "--run-dir", str(run_dir)),
        *settings(**values),
        *more,
    ]


@pytest.fixture
def started(tmp_path):
    """Starts a run in a process group of its own; ends what is left of it."""
    learners = []

    def start(words):
        learner = subprocess.Popen(
            words,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
            cwd=tmp_path,
        )
        learners.append(learner)
        return learner

    yield start
    for learner in learners:
        if learner.poll() is None:
            os.killpg(learner.pid, signal.SIGKILL)
        learner.wait()
        learner.stdout.close()


def rows_of(run_dir):
    file = run_dir / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.mark.slow
def test_ctrl_c_ends_all_and_a_killed_learner_leaves_nothing(tmp_path, started):
    """Ctrl-C reaches the whole process group, as from a terminal. Then resumed, and killed."""
    segments = shared_segments()
    run_dir = tmp_path / "run"
    learner = started(command(run_dir))
    until(lambda: rows_of(run_dir) >= 3)
    everyone = descendants(learner.pid)
    workers = [pid for pid in everyone if is_worker(pid)]
    assert len(workers) == 2
    os.killpg(learner.pid, signal.SIGINT)
    until(lambda: not any(map(alive, workers)), 5, "the workers did not end")
    output, _ = learner.communicate(timeout=60)  # draws the learning curve, too
    assert learner.returncode in STOPPED, output
    until(lambda: not any(map(alive, everyone)), 5, "orphans")
    assert "Stopped as asked, checkpoint written" in output
    assert "Traceback" not in output
    reached = Run(run_dir).checkpoints.latest().step
    assert reached >= 3 * BATCH

    rows = rows_of(run_dir)
    learner = started([sys.executable, "-m", "msrl_accel.train", "--resume", str(run_dir)])
    until(lambda: rows_of(run_dir) >= rows + 2)
    everyone = descendants(learner.pid)
    stopped = next(pid for pid in everyone if is_worker(pid))
    os.kill(stopped, signal.SIGSTOP)  # it cannot look after itself
    learner.kill()
    learner.wait()
    until(lambda: not any(map(alive, everyone)), 5, "orphans")
    assert shared_segments() == segments
    steps = Run(run_dir).metrics["step"]
    assert (np.diff(steps) > 0).all()


@pytest.mark.slow
def test_environments_in_processes_of_their_own_end_with_their_worker(tmp_path, monkeypatch):
    seen = {}

    def kill(trainer):
        worker = trainer.pool.pids[0]
        seen["environments"] = descendants(worker)
        os.kill(worker, signal.SIGKILL)

    def look(trainer):
        seen["later"] = [pid for w in trainer.pool.pids for pid in descendants(w)]

    at_iteration(monkeypatch, {2: kill, 7: look})
    train_async(
        tmp_path / "run",
        updates=9,
        pipeline__max_staleness=1,
        vectorization="async",
        pipeline__workers=1,
        pipeline__envs_per_worker=3,
    )
    assert len(seen["environments"]) >= 3
    assert len(seen["later"]) >= 3
    until(lambda: not any(map(alive, [*seen["environments"], *seen["later"]])), 10, "orphans")
