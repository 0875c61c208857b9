"""Workers as Ray actors: with a stand-in that keeps to Ray's documentation, and with Ray itself."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from async_helpers import descendants, train_async, until, weights
from ray_helpers import StandIn
from run_helpers import environment, no_curves, tiny  # noqa: F401

from msrl_accel.errors import ConfigError, EnvError
from msrl_accel.pipeline import ray_ as ray_module
from msrl_accel.pipeline import ray_actor
from msrl_accel.pipeline.async_ import AsyncTrainer
from msrl_accel.pipeline.ray_workers import connect
from msrl_accel.run import Run


@pytest.fixture
def ray(monkeypatch):
    stand_in = StandIn()
    monkeypatch.setattr(ray_module, "import_ray", lambda: stand_in)
    return stand_in


def test_a_run_with_the_stand_in(tmp_path, ray):
    run = train_async(tmp_path / "run", pipeline__engine="ray")
    assert run.summary["steps"] == 6 * 128
    assert (run.metrics["staleness/lag_max"] <= 4).all()
    assert not ray.actors and not ray.initialized
    assert ray.puts == 1 + 6  # the first version, and one an update
    assert ray.options["_node_ip_address"] == "127.0.0.1"


@pytest.mark.slow
def test_environments_that_go_apart(tmp_path, ray):
    run = train_async(tmp_path / "run", pipeline__engine="ray", pipeline__stepping="apart")
    assert run.summary["steps"] == 6 * 128


@pytest.mark.slow
def test_no_lag_is_the_run_without_ray(tmp_path, ray):
    settings = {"pipeline__max_staleness": 0, "updates": 3}
    train_async(tmp_path / "local", **settings)
    train_async(tmp_path / "ray", pipeline__engine="ray", **settings)
    assert weights(tmp_path / "local") == weights(tmp_path / "ray")


@pytest.mark.slow
def test_a_lost_worker_is_replaced(tmp_path, ray, monkeypatch):
    iterate = AsyncTrainer.iterate

    def lose_one(self):
        metrics = iterate(self)
        if self.iteration == 2 and len(ray.killed) == 0:
            victim = ray.actors.pop(0)
            ray.killed.append(victim)
            victim.die()
        return metrics

    monkeypatch.setattr(AsyncTrainer, "iterate", lose_one)
    run = train_async(tmp_path / "run", updates=12, pipeline__engine="ray", pipeline__queue_size=1)
    assert run.summary["steps"] == 12 * 128
    assert run.metrics["pipeline/restarts"][-1] == 1


def test_a_worker_that_always_fails_ends_the_run_with_its_traceback(tmp_path, ray, monkeypatch):
    def fail(self):
        raise OSError("no licence for the simulator")

    monkeypatch.setattr(ray_actor.Worker, "_make_env", fail)
    with pytest.raises(EnvError, match=r"(?s)failed 1 times in a row.*Traceback.*no licence"):
        train_async(tmp_path / "run", pipeline__engine="ray", pipeline__max_restarts=0)
    assert not ray.actors


def test_a_cluster_to_join(ray):
    assert connect(ray, "auto", 4)
    assert ray.options["address"] == "auto"
    assert not connect(ray, None, 4)  # joined already


def test_the_inference_server_is_of_one_host(tmp_path, ray):
    with pytest.raises(ConfigError, match=r"pipeline\.inference = 'server'"):
        train_async(tmp_path / "run", pipeline__engine="ray", pipeline__inference="server")


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_ray_is_an_extra(tmp_path):
    with pytest.raises(ConfigError, match=r"pip install 'msrl_accel\[ray\]'"):
        train_async(tmp_path / "run", pipeline__engine="ray")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_two_ray_workers_train_and_a_killed_one_is_replaced(tmp_path):
    """In a network of its own, where there is nothing but loopback."""
    command = [sys.executable, "-m", "msrl_accel.train"]
    command += tiny(
        tmp_path / "run",
        *("--mode", "async", "--engine", "ray", "--workers", "2", "--envs-per-worker", "8"),
        iterations=60,
    )
    if shutil.which("unshare"):
        inner = 'ip link set lo up; exec "$@"'
        command = ["unshare", "-rn", "bash", "-c", inner, "bash", *command]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.stat().st_size, 250)
    os.kill(actors_of(process.pid)[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=250)
    assert process.returncode == 0, errors
    run = Run(tmp_path / "run")
    assert run.summary["steps"] >= 60 * 128
    assert run.metrics["pipeline/restarts"][-1] >= 1


def actors_of(pid):
    """Processes of Ray actors that descend from a process."""
    titles = {p: Path(f"/proc/{p}/cmdline").read_bytes() for p in descendants(pid)}
    return [p for p, title in titles.items() if title.startswith(b"ray::WorkerActor")]
