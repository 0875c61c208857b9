"""Benchmark, sweep and soak of asynchronous training: bookkeeping, and short runs as slow."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

TOOLS = Path(__file__).parents[1] / "tools"
sys.path.insert(0, str(TOOLS / "bench"))


def load(path: str) -> Any:
    """A script as a module; `async` is no name to import."""
    name = "tool_" + Path(path).stem
    spec = importlib.util.spec_from_file_location(name, TOOLS / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


bench = load("bench/async.py")
chaos = load("soak/chaos.py")
sweep = load("learning/async_queue.py")


def run(script: str, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOLS / script), *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
    )


# The benchmark.


def arguments(*words: str) -> Any:
    return bench.parser().parse_args(list(words))


def test_the_clock_leaves_the_start_out_of_the_rate_and_stops_at_the_threshold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter([0.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0])
    monkeypatch.setattr(bench.time, "monotonic", lambda: next(now))
    clock = bench.Clock(arguments("--threshold", "90", "--limit", "1000"), rate_only=False)
    for i in range(1, 8):
        assert clock.tick(100 * i, episodes=150, mean_return=10.0 * i)
    assert not clock.tick(800, episodes=150, mean_return=95.0)
    assert clock.result(0.9, 0.5) == {
        "steps_per_second": 100.0,
        "seconds_to_threshold": 17.0,
        "steps_to_threshold": 800,
        "sample_use": 0.9,
        "idle_share": 0.5,
    }


def test_the_clock_wants_a_full_window_and_ends_at_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter([0.0, 1.0, 2.0, 3.0])
    monkeypatch.setattr(bench.time, "monotonic", lambda: next(now))
    clock = bench.Clock(arguments("--limit", "2.5"), rate_only=False)
    assert clock.tick(1, episodes=99, mean_return=500)
    assert clock.tick(2, episodes=0, mean_return=0)
    assert not clock.tick(3, episodes=0, mean_return=0)
    assert clock.result(1, 0)["seconds_to_threshold"] is None


@pytest.mark.parametrize(
    ("name", "latency", "mode", "vectorization", "algo"),
    [
        ("one", "15", "sync", "sync", "ppo"),
        ("sync", "15", "sync", "threads", "ppo"),
        ("sync", "plain", "sync", "auto", "ppo"),
        ("async", "5", "async", "auto", "ppo"),
        ("impala", "0", "async", "auto", "impala"),
    ],
)
def test_contestants_differ_in_nothing_but_what_they_are(
    name: str, latency: str, mode: str, vectorization: str, algo: str
) -> None:
    config = bench.our_config(name, arguments("--latency", latency, "--seed", "2"))
    assert (config.pipeline.mode, config.vectorization, config.algo) == (mode, vectorization, algo)
    assert (config.n_envs, config.seed, config.algorithm.n_steps) == (64, 2, 16)
    assert config.pipeline.workers * config.pipeline.envs_per_worker == config.n_envs
    assert (config.algorithm.batch_size, config.algorithm.gamma) == (256, 0.98)
    if latency != "plain":
        expected = {"env": "CartPole-v1", "mean_ms": float(latency), "spread": 1.0}
        assert config.env_kwargs == expected


def outcome(rate: float, seconds: float | None, steps: int | None = 50_000) -> dict[str, Any]:
    return {
        "steps_per_second": rate,
        "seconds_to_threshold": seconds,
        "steps_to_threshold": steps if seconds else None,
        "sample_use": 0.95,
        "idle_share": 0.25,
    }


def test_ratios_are_to_our_synchronous_mode() -> None:
    text = bench.report(
        {
            "one": [outcome(50, None)],
            "sync": [outcome(500, 100.0), outcome(700, 140.0)],
            "async": [outcome(3000, 20.0), outcome(3000, 40.0)],
            "sb3": [outcome(300, 200.0), outcome(300, None)],
        }
    )
    one, sync, ours, sb3 = (line.split() for line in text.splitlines()[2:])
    assert sync[1:] == ["600", "1.00", "120.0", "1.00", "50", "95%", "25%"]
    assert ours[1:] == ["3,000", "5.00", "30.0", "4.00", "50", "95%", "25%"]
    assert " ".join(sb3) == "stable-baselines3 300 0.50 not in 1 of 2 - - 95% 25%"
    assert "not in 1 of 1" in " ".join(one)


@pytest.mark.slow
def test_a_short_benchmark_reaches_a_low_threshold(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = run(
        "bench/async.py",
        *("--latency", "1", "--contestants", "one", "sync", "async", "impala", "--seeds", 1),
        *("--threshold", 25, "--rate-seconds", 2, "--n-envs", 16, "--json", file),
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(file.read_text())["results"]["1"]
    assert results["one"][0]["seconds_to_threshold"] is None
    for name in ("sync", "async", "impala"):
        assert results[name][0]["seconds_to_threshold"] > 0
        assert results[name][0]["steps_per_second"] > 0
    assert "speed-up" in done.stdout


# The sweep over the length of the queue.


def test_queue_zero_is_synchronous_training(tmp_path: Path) -> None:
    assert "--mode" not in sweep.command("CartPole-v1", 0, tmp_path, "clipped", 0, None)
    words = sweep.command("CartPole-v1", 3, tmp_path, "vtrace", 8, 1000)
    text = " ".join(words)
    assert "--mode async --queue-size 8 --max-staleness 18" in text
    assert "--set ppo.objective=vtrace" in text
    assert "--seed 3" in text


def test_the_sweep_is_summarised_and_drawn(tmp_path: Path) -> None:
    rows = [
        {"objective": o, "queue": q, "seed": s, "final": 100.0 + s, "area": 50.0, "lag": q + 1.0}
        for o, q in [("sync", 0), ("clipped", 1), ("clipped", 32), ("decoupled", 1)]
        for s in range(2)
    ]
    text = sweep.summarize(rows)
    assert "| clipped | 32 | 33.0 | 50 | 100 (100, 101) |" in text
    assert "| sync | - | 1.0 |" in text
    sweep.plot(rows, "CartPole-v1", tmp_path / "plot.png")
    with Image.open(tmp_path / "plot.png") as image:
        image.load()


@pytest.mark.slow
def test_a_short_sweep_writes_its_table_and_reads_it_again(tmp_path: Path) -> None:
    words = ["--queues", 1, 2, "--objectives", "decoupled", "--seeds", 1, "--total-steps", 4000]
    words += ["--out", tmp_path, "--plot", tmp_path / "plot.png"]
    done = run("learning/async_queue.py", *words)
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "results.md").read_text()
    assert run("learning/async_queue.py", *words).returncode == 0
    assert (tmp_path / "results.md").read_text() == table
    assert (tmp_path / "plot.png").exists()


# The soak.


def observed(**changes: Any) -> Any:
    rows = [
        {
            "step": 1024 * i,
            "pipeline/version": i,
            "pipeline/restarts": min(i, 8),
            "ppo/policy_loss": 0.1,
            "episode/return": 480.0,
        }
        for i in range(1, 41)
    ]
    seen = chaos.Observed(
        rows=rows,
        faults=["kill"] * 9,
        longest_gap=10.0,
        memory=[500.0 + min(i, 20) for i in range(100)],
        end_seconds=2.0,
        exit_status=143,
        checkpoint_step=1024 * 40,
    )
    return replace(seen, **changes)


def judged(seen: Any) -> set[str]:
    return set(chaos.judge(seen, patience=60, target=450, growth_mb=20))


def test_a_run_that_holds_is_not_complained_of() -> None:
    assert judged(observed()) == set()


def rows_with(index: int, **values: Any) -> list[dict[str, Any]]:
    rows = observed().rows
    rows[index] = {**rows[index], **{k.replace("__", "/"): v for k, v in values.items()}}
    return rows


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"rows": []}, "training"),
        ({"longest_gap": 61.0}, "hang"),
        ({"rows": rows_with(5, pipeline__version=7)}, "versions"),
        ({"rows": observed().rows[:3] + observed().rows[4:]}, "versions"),
        ({"rows": rows_with(5, ppo__policy_loss=None)}, "numbers"),
        ({"rows": rows_with(-1, pipeline__restarts=2)}, "restarts"),
        ({"rows": rows_with(-1, pipeline__restarts=12)}, "restarts"),
        ({"memory": list(np.linspace(500, 600, 100))}, "memory"),
        ({"rows": rows_with(-1, episode__return=100.0)}, "return"),
        ({"end_seconds": 6.0}, "end"),
        ({"exit_status": 1}, "end"),
        ({"checkpoint_step": 1024}, "checkpoint"),
        ({"orphans": [17]}, "orphans"),
        ({"segments": ["msrl_x"]}, "segments"),
    ],
)
def test_what_does_not_hold_is_found(changes: dict[str, Any], check: str) -> None:
    assert judged(observed(**changes)) == {check}


@pytest.mark.slow
def test_a_short_soak_holds(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    words = ["--minutes", 0.7, "--every", 6, "--target", 15, "--growth", 100, "--json", file]
    done = run("soak/chaos.py", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all holds" in done.stdout
    assert len(json.loads(file.read_text())["faults"]) > 0
