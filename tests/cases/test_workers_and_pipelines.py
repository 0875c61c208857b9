"""Public bug reports of neighbouring projects about workers and pipelines, by kind of fault."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import run_helpers
from async_helpers import ASYNC, BATCH, N_ENVS, train_async
from run_helpers import environment, settings

from msrl_accel.pipeline.async_ import AsyncTrainer
from msrl_accel.run import Run
from msrl_accel.train import main

no_curves = run_helpers.no_curves


def test_a_script_without_guard_gets_one_readable_message(tmp_path):
    """hill-a/stable-baselines#155: a wall of spawn errors."""
    script = tmp_path / "script.py"
    script.write_text(
        "from msrl_accel.api import train\n"
        "train(algo='ppo', env='CartPole-v1', tuned=False, n_envs=16, total_steps=1000, "
        f"run_dir={str(tmp_path / 'run')!r}, overrides={ASYNC!r})\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1  # of the script itself
    message = "put its code under `if __name__ == '__main__':`, or use pipeline.mode sync"
    assert done.stderr.count(message) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"script.py", "run"}  # no workers' runs


def run_main(run_dir, env, *more, **values):
    """Exit status of the command line."""
    names = {key.replace(".", "__"): value for key, value in ASYNC.items()}
    words = ["--algo", "ppo", "--env", env, "--no-tuned", "--n-envs", "16", "--quiet"]
    words += ["--total-steps", "100000000", "--run-dir", str(run_dir)]
    return main([*words, *settings(**{**names, **values}), *more])


@pytest.mark.parametrize("stepping", ["together", "apart"])
def test_an_exception_of_an_environment_arrives_with_its_traceback(tmp_path, capsys, stepping):
    """Deckard#1: a bare EOFError."""
    status = run_main(
        tmp_path / "run",
        "faulty_envs:Raising-v0",
        pipeline__stepping=stepping,
        pipeline__max_restarts=0,
        pipeline__workers=1,
    )
    assert status == 2
    error = capsys.readouterr().err
    assert "worker 0 failed 1 times in a row" in error
    assert "raise LocalError(1, 2)" in error  # the line of the environment
    assert "LocalError: local error 1 2" in error
    assert "EOFError" not in error


@pytest.mark.parametrize("stepping", ["together", pytest.param("apart", marks=pytest.mark.slow)])
def test_a_hung_environment_is_named_and_replaced(tmp_path, caplog, stepping):
    """sample-factory#316: the run hangs."""
    (tmp_path / "hang").touch()
    run = train_async(
        tmp_path / "run",
        "faulty_envs:FaultyOnce-v0",
        updates=6,
        env_kwargs={"folder": str(tmp_path)},
        pipeline__stepping=stepping,
        pipeline__hang_seconds=1,
        pipeline__workers=1,
        pipeline__max_staleness=1,
    )
    assert run.metrics["pipeline/restarts"][-1] == 1
    assert run.summary["steps"] == 6 * BATCH
    if stepping == "apart":
        assert "faulty_envs:FaultyOnce-v0: environment" in caplog.text
        assert "did not answer within 1 s (timeout)" in caplog.text
    else:
        assert "in a step of faulty_envs:FaultyOnce-v0" in caplog.text
        assert "time.sleep" in caplog.text or "in misbehave" in caplog.text


@pytest.mark.parametrize(
    ("stepping", "stale"),
    [("together", "drop"), pytest.param("apart", "down_weight", marks=pytest.mark.slow)],
)
def test_lag_is_bounded_and_reported_however_slow_the_learner_is(
    tmp_path, monkeypatch, stepping, stale
):
    """sample-factory#128: policy lag grows for ever."""
    update = AsyncTrainer._update

    def slow_update(self, batch):
        time.sleep(0.1)
        assert (self.version - batch.versions <= 2).all()
        return update(self, batch)

    monkeypatch.setattr(AsyncTrainer, "_update", slow_update)
    run = train_async(
        tmp_path / "run",
        updates=12,
        pipeline__max_staleness=2,
        pipeline__queue_size=16,
        pipeline__stepping=stepping,
        pipeline__stale=stale,
        pipeline__workers=1,
        pipeline__envs_per_worker=N_ENVS,
    )
    lag = run.metrics["staleness/lag_max"]
    assert lag[:3].tolist() == [0, 1, 2]  # it does grow at first
    assert (lag <= 2).all()
    assert (run.metrics["staleness/dropped"] == 0).all()
    assert (run.metrics["pipeline/queue_depth"] <= 3).all()


def test_a_dead_collector_ends_the_run_or_is_restarted_but_is_not_waited_for(
    tmp_path, monkeypatch, capsys
):
    """NeMo-RL#3488: the collector died, the trainer polled for hours."""
    gather = AsyncTrainer._gather

    def kill_and_gather(self):
        if self.iteration == 3:
            os.kill(self.pool.pids[0], signal.SIGKILL)
        return gather(self)

    monkeypatch.setattr(AsyncTrainer, "_gather", kill_and_gather)
    run_dir = tmp_path / "run"
    assert run_main(run_dir, "CartPole-v1", pipeline__max_restarts=0, pipeline__workers=1) == 2
    error = capsys.readouterr().err
    assert "worker 0 failed 1 times in a row" in error
    assert "was killed by SIGKILL" in error
    assert f"--resume {run_dir}" in error
    assert Run(run_dir).checkpoints.latest().step >= 3 * BATCH


def test_data_that_is_exhausted_ends_the_run_with_its_reason(tmp_path, capsys):
    """NeMo-RL#2899: a silent deadlock."""
    status = run_main(
        tmp_path / "run",
        "faulty_envs:Exhausted-v0",
        env_kwargs={"episodes": 9},
        pipeline__max_restarts=0,
        pipeline__workers=1,
    )
    assert status == 2
    error = capsys.readouterr().err
    assert "raised StopIteration in reset" in error
    steps = Run(tmp_path / "run").metrics["step"]
    np.testing.assert_array_equal(np.diff(steps), BATCH)  # what there was has been used


def test_a_run_ends_cleanly_while_more_samples_wait_than_it_needs(tmp_path):
    """Also NeMo-RL#2899: updates take a part of what there is; what is left gets no older than the
    bound."""
    run = train_async(
        tmp_path / "run", updates=12, pipeline__envs_per_worker=7, pipeline__workers=1
    )
    assert run.summary["steps"] == 12 * BATCH
    assert (run.metrics["staleness/lag_max"] <= 2).all()
    assert (run.metrics["staleness/dropped"] == 0).all()
