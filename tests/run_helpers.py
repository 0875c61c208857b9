"""What the tests of whole runs share: settings that train in a second, comparisons of runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from msrl_accel.run import Run

BATCH = 128
"""Environment steps of one iteration of `tiny`."""

STOPPED = (130, 143)
"""Exit statuses after Ctrl-C: once it has run a graph, MindSpore turns SIGINT into SIGTERM."""

TINY = {
    "ppo.n_steps": 8,
    "ppo.batch_size": 32,
    "ppo.n_epochs": 2,
    "policy.hidden_sizes": [8],
    "evaluation.episodes": 4,
    "logging.tensorboard": False,
}


def settings(**values):
    """`--set` arguments; a double underscore stands for the dot."""
    pairs = {name.replace("__", "."): value for name, value in values.items()}
    return [
        word for key, value in pairs.items() for word in ("--set", f"{key}={json.dumps(value)}")
    ]


def tiny(run_dir, *more, env="CartPole-v1", iterations=4, n_envs=16, **values):
    """Command line that trains a very small policy."""
    command = ["--algo", "ppo", "--env", env, "--no-tuned", "--run-dir", str(run_dir)]
    command += ["--n-envs", str(n_envs), "--total-steps", str(iterations * 8 * n_envs)]
    return [*command, *settings(**TINY), *settings(**values), *map(str, more)]


def environment():
    """Of child processes: they find the helper modules of the tests."""
    tests = Path(__file__).parent
    path = [str(tests), str(tests / "envs"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def python_m(module, *arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment(),
        **options,
    )


def rows(run_dir):
    """Rows of metrics without what a clock measured."""
    lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if not key.startswith("time/")}
        for line in lines
    ]


def state(run_dir, which="last"):
    """Everything a checkpoint holds but the seconds: bytes of arrays, and the rest."""
    checkpoint = Run(run_dir).checkpoints.load(which)
    arrays = {
        name: (str(array.dtype), array.shape, array.tobytes())
        for name, array in checkpoint.arrays.items()
    }
    meta = json.loads(json.dumps(checkpoint.meta))
    del meta["state"]["trainer"]["seconds"]
    return checkpoint.step, arrays, meta, repr(checkpoint.score)


def assert_same_runs(one, other):
    """Weights, moments, statistics, random states and metrics are equal, bit for bit."""
    assert rows(one) == rows(other)
    assert state(one) == state(other)
    results = [Run(run_dir).summary for run_dir in (one, other)]
    for result in results:
        del result["seconds"]
    assert results[0] == results[1]


@pytest.fixture(scope="module", autouse=True)
def no_curves():
    """For modules that import it: drawing takes as long as a tiny run, and is tested elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "save_plot", lambda run: None)
        yield


def interrupt_in_iteration(monkeypatch, iteration, *signals):
    """Send this process signals in the middle of an iteration, the first being 1."""
    from msrl_accel.rollout import Collector

    collect = Collector.collect
    count = 0

    def collect_and_interrupt(self):
        nonlocal count
        count += 1
        if count == iteration:
            for number in signals or (signal.SIGINT,):
                os.kill(os.getpid(), number)
        return collect(self)

    monkeypatch.setattr(Collector, "collect", collect_and_interrupt)
