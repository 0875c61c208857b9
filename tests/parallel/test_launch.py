"""The launcher: a run of two processes, and what it does when one of them dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from async_helpers import alive, until
from run_helpers import environment, python_m, tiny

from msrl_accel.errors import ConfigError, PipelineError
from msrl_accel.parallel.ascend import communication_variables, rank_table
from msrl_accel.parallel.beacon import Beacon, Sign, read_signs
from msrl_accel.parallel.launch import Launch, _parser, available
from msrl_accel.run import Run

needs_msrun = pytest.mark.skipif(not available(), reason="msrun is missing")


def launch(*arguments, **options):
    return python_m("msrl_accel.parallel.launch", *arguments, timeout=240, **options)


@needs_msrun
@pytest.mark.slow
def test_two_processes_train_and_one_resumes_nothing_of_the_other(tmp_path):
    arguments = tiny(tmp_path / "run", policy__normalize_observations=True)
    done = launch("-n", 2, "--", *arguments)
    assert done.returncode == 0, done.stderr
    assert "Trained ppo on CartPole-v1" in done.stdout
    run = Run(tmp_path / "run")
    assert run.config.n_envs == 16  # of all
    assert run.summary["steps"] == 4 * 128
    assert (run.metrics["parallel/processes"] == 2).all()
    ranks = [run.metrics, Run(tmp_path / "run" / "ranks" / "1").metrics]
    # The gradients are the same in both, the environments are not.
    assert (ranks[0]["ppo/grad_norm"] == ranks[1]["ppo/grad_norm"]).all()
    assert (ranks[0]["ppo/value_loss"] != ranks[1]["ppo/value_loss"]).any()


@needs_msrun
@pytest.mark.slow
def test_a_killed_rank_ends_the_run(tmp_path):
    command = [sys.executable, "-m", "msrl_accel.parallel.launch", "-n", "2", "--"]
    command += tiny(tmp_path / "run", iterations=100_000)
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "ranks" / "1" / "metrics.csv"
    until(metrics.exists, 200)
    victims = ranks_of(tmp_path / "run")
    os.kill(victims[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 1" in errors and "died" in errors
    time.sleep(1)
    assert not any(map(alive, victims))


def ranks_of(run_dir):
    """Process ids of the ranks that train into a directory, in order of rank."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and alive(entry.name):
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                variables = (entry / "environ").read_bytes().decode().split("\0")
            except OSError:
                continue
            if words[1:3] == ["-m", "msrl_accel.parallel.rank"] and str(run_dir) in words:
                values = dict(v.partition("=")[::2] for v in variables)
                if values.get("MS_ROLE") == "MS_WORKER":
                    found[int(values["MS_NODE_ID"])] = int(entry.name)
    return [found[rank] for rank in sorted(found)]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--", "--algo", "ppo", "--env", "CartPole-v1", "--seed", "-1"], "seed"),
        (["-n", "0", "--", "--algo", "ppo", "--env", "CartPole-v1"], "at least 1"),
        (
            ["--hccl-timeout", "0", "--", "--algo", "ppo", "--env", "CartPole-v1"],
            "hccl_timeout = 0",
        ),
    ],
)
def test_mistakes_are_told_before_anything_starts(tmp_path, arguments, message, capsys):
    from msrl_accel.parallel.launch import main

    assert main([*arguments, "--run-dir", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err


def watched(tmp_path, **options):
    flags = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    launch = Launch(_parser().parse_args(flags), [], tmp_path)
    launch.logs.mkdir()
    return launch


def sign(rank, stage, iteration, at):
    return Sign(rank, 1000 + rank, stage, iteration, at, None)


def test_the_rank_that_the_others_wait_for_is_named(tmp_path):
    launch = watched(tmp_path, **{"hang-seconds": 5})
    (launch.logs / "worker_1.log").write_text("what rank 1 said last")
    now = time.monotonic()
    behind = sign(1, "collect or update", 7, now - 9)
    ahead = sign(0, "agree with the others", 7, now - 6)
    with pytest.raises(PipelineError, match=r"rank 1 .*of iteration 7(.|\n)*said last"):
        launch._check_progress([ahead, behind])
    launch._check_progress([sign(0, "collect or update", 7, now), behind])
    launch._check_progress([sign(0, "evaluation", float("inf"), now - 100)])


def test_signs_of_life(tmp_path):
    Beacon(tmp_path, 1).beat("collect or update", 3)
    Beacon(tmp_path, 0).beat("end", float("inf"), 143)
    first, second = read_signs(tmp_path)
    assert (first.rank, first.status, second.stage) == (0, 143, "collect or update")
    assert (second.pid, second.iteration, second.status) == (os.getpid(), 3, None)
    Beacon(None).beat("nobody looks", 0)


def test_hccl_is_told_its_timeouts():
    variables = communication_variables(120)
    assert variables == {"HCCL_CONNECT_TIMEOUT": "120", "HCCL_EXEC_TIMEOUT": "120"}


def test_rank_tables():
    servers = {
        "10.0.0.1": [(0, "192.168.100.1"), (1, "192.168.100.2")],
        "10.0.0.2": [(3, "192.168.101.1")],
    }
    table = rank_table(servers)
    assert (table["version"], table["status"], table["server_count"]) == ("1.0", "completed", "2")
    devices = [d for server in table["server_list"] for d in server["device"]]
    assert [d["rank_id"] for d in devices] == ["0", "1", "2"]
    assert devices[2] == {"device_id": "3", "device_ip": "192.168.101.1", "rank_id": "2"}
    with pytest.raises(ConfigError, match="no IP address"):
        rank_table({"host": [(0, "192.168.100.1")]})
    with pytest.raises(ConfigError, match="different"):
        rank_table({"10.0.0.1": [(0, "192.168.100.1"), (0, "192.168.100.2")]})


def test_settings_are_divided(tmp_path):
    from msrl_accel.config import resolve_config
    from msrl_accel.parallel.trainer import share_of

    values = {"ppo.batch_size": 64}
    config = resolve_config(algo="ppo", env="CartPole-v1", tuned=False, n_envs=8, overrides=values)
    share = share_of(config, 2, accumulate=3)
    assert (share.n_envs, share.algorithm.batch_size) == (4, 96)
    with pytest.raises(ConfigError, match="n_envs = 8: not divisible by the 3 processes"):
        share_of(config, 3)
    dqn = resolve_config(algo="dqn", env="CartPole-v1", tuned=False)
    with pytest.raises(ConfigError, match="on-policy"):
        share_of(dqn, 2)
