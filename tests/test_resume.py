"""Runs that are stopped, killed or damaged, and go on."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
import run_helpers
from run_helpers import (
    BATCH,
    STOPPED,
    assert_same_runs,
    environment,
    interrupt_in_iteration,
    rows,
    settings,
    state,
    tiny,
)

from msrl_accel.errors import CheckpointError, ConfigError
from msrl_accel.run import Run
from msrl_accel.train import main, train

no_curves = run_helpers.no_curves

EVERYTHING = {
    "policy__normalize_observations": True,
    "reward__normalize": True,
    "ppo__learning_rate_schedule": "linear",
    "ppo__clip_range_schedule": "linear",
    "ppo__target_kl": 0.02,
    "checkpoint__interval_seconds": 0,
}
"""Settings with every kind of state there is."""


def run_main(*arguments):
    assert main([*map(str, arguments), "--quiet"]) == 0


def run_main_until_stopped(*arguments):
    assert main([*map(str, arguments), "--quiet"]) in STOPPED


@pytest.fixture
def copy(tmp_path):
    """Copies a run directory, so that a test may change it."""

    def make(run_dir):
        target = tmp_path / "copy"
        shutil.copytree(run_dir, target)
        return target

    return make


def pendulum(run_dir):
    """Command line with every kind of state, episodes that are cut off, and evaluations."""
    more = {"evaluation__interval_steps": BATCH, "env_kwargs__max_episode_steps": 11}
    return tiny(run_dir, env="Pendulum-v1", **EVERYTHING, **more)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A run of four iterations."""
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    run_main(*pendulum(run_dir))
    return run_dir


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The same run, stopped by Ctrl-C in its third iteration."""
    run_dir = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.MonkeyPatch.context() as patch:
        interrupt_in_iteration(patch, 3)
        run_main_until_stopped(*pendulum(run_dir))
    assert Run(run_dir).checkpoints.steps()[-1] == 3 * BATCH
    assert not Run(run_dir).summary
    return run_dir


def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(uninterrupted, stopped, copy):
    run_dir = copy(stopped)
    run_main("--resume", run_dir)
    assert_same_runs(uninterrupted, run_dir)


@pytest.mark.parametrize("file", ["arrays.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_passed_over(uninterrupted, stopped, copy, file):
    run_dir = copy(stopped)
    damaged = run_dir / "checkpoints" / f"{3 * BATCH:012d}" / file
    damaged.write_bytes(damaged.read_bytes()[:-20])
    with pytest.warns(UserWarning, match=rf"{3 * BATCH:012d}/{file} is damaged .*one before"):
        run_main("--resume", run_dir)
    assert_same_runs(uninterrupted, run_dir)
    assert Run(run_dir).checkpoints.steps()[-3:] == [2 * BATCH, 3 * BATCH, 4 * BATCH]


def test_damage_to_all_checkpoints_is_one_line(stopped, copy, capsys):
    run_dir = copy(stopped)
    for file in run_dir.glob("checkpoints/*/state.json"):
        file.write_text("{}")
    with pytest.warns(UserWarning, match="is damaged"):
        assert main(["--resume", str(run_dir)]) == 2
    assert "no intact checkpoint" in capsys.readouterr().err
    assert len(list(run_dir.glob("checkpoints/0*"))) == 3  # for the user to repair


def test_resuming_a_complete_run_says_that_nothing_is_left(uninterrupted, copy, capsys):
    run_dir = copy(uninterrupted)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    assert main(["--resume", str(run_dir)]) == 0
    output = capsys.readouterr().out
    assert "Nothing to do: this run is already complete" in output
    assert f"--resume {run_dir} --total-steps" in output
    assert before == {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


def test_a_closing_evaluation_that_was_killed_is_made_up_for(uninterrupted, copy):
    run_dir = copy(uninterrupted)
    (run_dir / "summary.json").unlink()
    run_main("--resume", run_dir)
    assert_same_runs(uninterrupted, run_dir)


def test_a_larger_total_continues_counters_and_metrics(tmp_path, capsys):
    whole, extended = tmp_path / "whole", tmp_path / "extended"
    run_main(*tiny(whole))
    run_main(*tiny(extended, iterations=2))
    first = rows(extended)
    run_main("--resume", extended, "--total-steps", 4 * BATCH)
    assert rows(extended)[:2] == first
    assert [row["step"] for row in rows(extended)] == [BATCH, 2 * BATCH, 3 * BATCH, 4 * BATCH]
    assert_same_runs(whole, extended)
    # The new total is the run's own from now on.
    assert Run(extended).config.total_steps == 4 * BATCH
    assert Run(extended).summary["steps"] == 4 * BATCH
    assert main(["--resume", str(extended)]) == 0
    assert "Nothing to do" in capsys.readouterr().out


def test_an_extended_run_that_is_stopped_goes_on_to_its_new_total(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    run_main(*tiny(run_dir, iterations=1))
    with monkeypatch.context() as patch:
        interrupt_in_iteration(patch, 1)
        run_main_until_stopped("--resume", run_dir, "--total-steps", 3 * BATCH)
    assert not Run(run_dir).summary  # the old one is of another policy
    run_main("--resume", run_dir)
    assert Run(run_dir).summary["steps"] == 3 * BATCH


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["--seed", "1"], "seed = 1: the run in"),
        (["--env", "CartPole-v1"], "env = 'CartPole-v1': the run in"),
        (["--n-envs", "8"], "n_envs = 8: the run in"),
        (["--set", "env_kwargs.g=9.8"], "env_kwargs = {"),
        (["--set", "policy.hidden_sizes=[9]"], "policy.hidden_sizes = (9,): the run in"),
        (["--set", "policy.normalize_observations=false"], "policy.normalize_observations = F"),
    ],
)
def test_a_run_cannot_be_resumed_as_another(stopped, capsys, change, named):
    before = state(stopped), rows(stopped)
    assert main(["--resume", str(stopped), *change]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line
    assert "start a new run" in line
    assert before == (state(stopped), rows(stopped))


def test_a_run_cannot_be_resumed_in_another_directory(stopped, tmp_path, capsys):
    elsewhere = tmp_path / "elsewhere"
    assert main(["--resume", str(stopped), "--run-dir", str(elsewhere)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"run_dir = {str(elsewhere)!r}" in line and "leave it out" in line
    with pytest.raises(ConfigError, match="run_dir = "):
        train(resume=stopped, run_dir=str(elsewhere))
    assert not elsewhere.exists()


def test_a_run_cannot_be_resumed_with_another_algorithm(stopped, capsys, monkeypatch):
    monkeypatch.setitem(
        sys.modules["msrl_accel.algorithms"].ALGORITHMS, "other", "msrl_accel.algorithms.ppo:PPO"
    )
    assert main(["--resume", str(stopped), "--algo", "other"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "algo = 'other': the run in" in line
    with pytest.raises(CheckpointError, match="algo = 'other': the run in"):
        train(resume=stopped, algo="other")


def test_ctrl_c_in_the_first_iteration_leaves_a_checkpoint(tmp_path, monkeypatch, capsys):
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patch:
        interrupt_in_iteration(patch, 1)
        assert main(tiny(run_dir, iterations=2)) in STOPPED
    output = capsys.readouterr().out
    assert "Stopped as asked, checkpoint written" in output
    assert f"python -m msrl_accel.train --resume {run_dir}" in output
    assert Run(run_dir).checkpoints.steps() == [BATCH]
    assert rows(run_dir)[-1]["step"] == BATCH


def test_a_run_killed_before_its_first_checkpoint_starts_anew(tmp_path, monkeypatch, capsys):
    """A second Ctrl-C does not wait for the iteration."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_main(*tiny(whole, iterations=2))
    with monkeypatch.context() as patch:
        interrupt_in_iteration(patch, 1, signal.SIGINT, signal.SIGINT)
        assert main(tiny(killed, iterations=2)) == 130
    output = capsys.readouterr()
    assert f"--resume {killed}" in output.out
    assert "Traceback" not in output.err
    assert not Run(killed).checkpoints.steps()
    run_main("--resume", killed)
    assert_same_runs(whole, killed)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("long") / "run"
    run_main(*tiny(run_dir, iterations=25, **EVERYTHING))
    return run_dir


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_signal_from_outside_loses_nothing(long_run, tmp_path, name):
    run_dir = tmp_path / "run"
    arguments = tiny(run_dir, iterations=25, **EVERYTHING)
    with start(arguments) as process:
        wait_for_rows(process, run_dir, 4)
        process.send_signal(getattr(signal, name))
        output, errors = process.communicate(timeout=60)
    if name == "SIGKILL":
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode in (STOPPED if name == "SIGINT" else (143,)), errors
        assert "Stopped as asked, checkpoint written" in output
        assert Run(run_dir).checkpoints.steps()[-1] == rows(run_dir)[-1]["step"]
    assert 4 * BATCH <= rows(run_dir)[-1]["step"] < 25 * BATCH
    run_main("--resume", run_dir)
    assert_same_runs(long_run, run_dir)


def test_sigterm_to_the_group_stops_a_run_with_workers(tmp_path):
    """As a scheduler sends it to every process of a job."""
    run_dir = tmp_path / "run"
    arguments = tiny(run_dir, iterations=100_000, n_envs=2)
    arguments += settings(vectorization="async")
    with start(arguments, start_new_session=True) as process:
        wait_for_rows(process, run_dir, 2)
        os.killpg(process.pid, signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert "Stopped as asked, checkpoint written" in output
    assert Run(run_dir).checkpoints.steps() == [rows(run_dir)[-1]["step"]]
    assert not [p for p in psutil.process_iter() if group_of(p) == process.pid]


def test_environments_that_cannot_be_saved_start_new_episodes(tmp_path, monkeypatch, caplog):
    run_dir = tmp_path / "run"
    toy = "msrl_accel.envs.toy:IdentityDiscrete-v0"
    with monkeypatch.context() as patch:
        interrupt_in_iteration(patch, 1)
        run_main_until_stopped(*tiny(run_dir, env=toy, iterations=3, n_envs=2))
    run_main("--resume", run_dir)
    assert "cannot save its state: its environments start new episodes" in caplog.text
    assert [row["step"] for row in rows(run_dir)] == [16, 32, 48]
    assert [row["ppo/updates"] for row in rows(run_dir)] == [2, 4, 6]


def test_a_run_goes_on_with_another_kind_of_vectorisation(tmp_path, monkeypatch, caplog):
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patch:
        interrupt_in_iteration(patch, 1)
        run_main_until_stopped(*tiny(run_dir, iterations=2))
    run_main("--resume", run_dir, *settings(vectorization="sync"))
    assert "start new episodes" in caplog.text
    assert Run(run_dir).summary["steps"] == 2 * BATCH


def start(arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "msrl_accel.train", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        **options,
    )


def wait_for_rows(process, run_dir, count):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            if len(rows(run_dir)) >= count:
                return
        time.sleep(0.002)
    process.kill()
    pytest.fail(f"no {count} rows of metrics: {process.communicate()}")


def group_of(process):
    """Process group of one that runs."""
    try:
        return None if process.status() == psutil.STATUS_ZOMBIE else os.getpgid(process.pid)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None
