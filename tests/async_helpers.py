"""What the tests of asynchronous runs share."""

from __future__ import annotations

import os
import time
from pathlib import Path

from run_helpers import TINY

from msrl_accel.run import Run
from msrl_accel.shared_memory import PREFIX
from msrl_accel.train import train

ASYNC = {
    **TINY,
    "pipeline.mode": "async",
    "pipeline.envs_per_worker": 8,
    "checkpoint.interval_seconds": 1000,
}
N_ENVS = 16
BATCH = 8 * N_ENVS
"""Environment steps of one update."""


def train_async(run_dir, env="CartPole-v1", *, updates=6, algo="ppo", **values) -> Run:
    """A tiny asynchronous run in this process; a double underscore stands for the dot."""
    settings = {name.replace("__", "."): value for name, value in values.items()}
    own = {key: value for key, value in ASYNC.items() if not key.startswith("ppo.")}
    return train(
        algo=algo,
        env=env,
        tuned=False,
        quiet=True,
        run_dir=str(run_dir),
        n_envs=N_ENVS,
        total_steps=updates * BATCH,
        overrides={**(ASYNC if algo == "ppo" else own), **settings},
    )


def weights(run_dir):
    """Bytes of what the last checkpoint of a run has trained."""
    arrays = Run(run_dir).checkpoints.load("last").arrays
    return {name: x.tobytes() for name, x in arrays.items() if name.startswith("policy/")}


def alive(pid) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid) -> list[int]:
    """Living processes that a process started, and those they started."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and alive(entry.name):
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(stat[1]), []).append(int(entry.name))
    found = []
    new = [pid]
    while new:
        new = [child for parent in new for child in parents.get(parent, [])]
        found += new
    return found


def is_worker(pid) -> bool:
    """Of the processes that a learner has: Python's own resource tracker is none."""
    return "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()


def shared_segments() -> set[str]:
    """Named shared memory of this library, which a crash could leave behind."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(PREFIX)}


def mapped_segments(pid="self") -> list[str]:
    """Shared memory of this library that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in lines if f"memfd:{PREFIX}" in line]


def until(condition, seconds=60.0, what="it did not happen"):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
