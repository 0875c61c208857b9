"""Replay at 1,000,000 transitions: microseconds of one `add`, and transitions sampled a second.

Transitions are HalfCheetah's (17 float32 observations, 6 actions), of one environment, batches of
256. Each contestant is a process of its own; they take turns. A turn fills the whole replay by
`add`, one transition a call, then times calls that sample, in blocks, and gives the median block.

- uniform, n-step 3, shared (each observation stored once), files (memory-mapped, in --folder).
- prioritised: `sample` and `update_priorities` of all that was sampled, both counted; also n-step 3
  and shared, and over four shards (`ShardedReplay`, 4 environments).
- stable-baselines3: its `ReplayBuffer` on the CPU, uniform, one step; `sample` gives torch tensors.

"k = 8" draws eight batches in one call, as several gradient steps in one update do. Ratios are
taken turn by turn, and are of speeds: above 1 is faster than stable-baselines3.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _report import (
    Contestant,
    begin,
    finish,
    make_parser,
    median_and_range,
    positive_int,
    present,
    run_child,
    table,
)

BATCH, STACKED = 256, 8
BASELINE = "sb3"
KINDS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "n_step": {"n_step": 3},
    "shared": {"share_next": True},
    "files": {"folder": True},
    "prioritized": {"prioritized": True},
    "prioritized_n_step": {"prioritized": True, "n_step": 3, "share_next": True},
    "sharded": {"prioritized": True, "shards": 4},
}
LABELS = {
    "uniform": "uniform",
    "n_step": "n-step 3",
    "shared": "shared",
    "files": "files",
    "prioritized": "prioritised",
    "prioritized_n_step": "prioritised, n-step 3, shared",
    "sharded": "prioritised, 4 shards",
}
CONTESTANTS = {
    **{kind: Contestant(label, "msrl_accel", peer=False) for kind, label in LABELS.items()},
    BASELINE: Contestant("stable-baselines3", "stable-baselines3"),
}


def parser() -> argparse.ArgumentParser:
    p = make_parser(__doc__)
    p.add_argument("--rounds", type=positive_int, default=3, help="turns of each contestant")
    p.add_argument("--transitions", type=positive_int, default=10**6, help="size of the replay")
    p.add_argument("--blocks", type=positive_int, default=11, help="timed blocks in a turn")
    p.add_argument("--calls", type=positive_int, default=100, help="calls in a block")
    p.add_argument("--folder", help="where 'files' has its files (default: the temporary one)")
    p.add_argument(
        "--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS), metavar="NAME"
    )
    return p


def per_call(call: Callable[[], Any], blocks: int, calls: int) -> float:
    """Seconds of one call, the median over blocks after one that warms up."""
    seconds = []
    for _ in range(blocks + 1):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        seconds.append((time.perf_counter() - start) / calls)
    return statistics.median(seconds[1:])


def measure(
    add: Callable[[], Any], samplers: dict[str, Callable[[], Any]], args: argparse.Namespace, n: int
) -> dict[str, float]:
    """Fill by `add`, n transitions a call, then time each sampler."""
    start = time.perf_counter()
    steps = args.transitions // n
    for _ in range(steps):
        add()
    found = {"add": (time.perf_counter() - start) / steps * 1e6}
    for name, sample in samplers.items():
        batches = STACKED if name == "stacked" else 1
        found[name] = BATCH * batches / per_call(sample, args.blocks, args.calls)
    return found


def measure_ours(args: argparse.Namespace) -> dict[str, float]:
    from gymnasium import spaces

    from msrl_accel.replay import PrioritySettings, Replay, ReplayBuffer, ShardedReplay
    from msrl_accel.spaces import PolicySpec

    kind = dict(KINDS[args.contestant])
    n = kind.pop("shards", 1)
    spec = PolicySpec.from_spaces(
        spaces.Box(-np.inf, np.inf, (17,), np.float32), spaces.Box(-1, 1, (6,), np.float32)
    )
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        options: dict[str, Any] = {
            "gamma": 0.99,
            **kind,
            "prioritized": PrioritySettings() if kind.get("prioritized") else None,
            "folder": folder if kind.get("folder") else None,
        }
        size = (spec, args.transitions, n)
        replay: Replay = (
            ReplayBuffer(*size, **options) if n == 1 else ShardedReplay.create(n, *size, **options)
        )
        step = (
            (rng.standard_normal((n, 17)).astype(np.float32),),
            rng.uniform(-1, 1, (n, 6)).astype(np.float32),
            rng.standard_normal(n),
            (rng.standard_normal((n, 17)).astype(np.float32),),
            np.zeros(n, bool),
            np.zeros(n, bool),
            np.ones(n, bool),
        )
        errors = rng.standard_exponential((STACKED, BATCH))

        def sample(k: int) -> None:
            batch = replay.sample(rng, BATCH, k)
            replay.update_priorities(batch.indices, errors[:k])

        samplers = {"single": lambda: sample(1), "stacked": lambda: sample(STACKED)}
        found = measure(lambda: replay.add(*step), samplers, args, n)
        replay.close()
        return found


def measure_sb3(args: argparse.Namespace) -> dict[str, float]:
    import torch
    from gymnasium import spaces
    from stable_baselines3.common.buffers import ReplayBuffer

    torch.set_num_threads(1)
    replay = ReplayBuffer(
        args.transitions,
        spaces.Box(-np.inf, np.inf, (17,), np.float32),
        spaces.Box(-1, 1, (6,), np.float32),
        device="cpu",
    )
    rng = np.random.default_rng(0)
    observation, following = rng.standard_normal((2, 1, 17)).astype(np.float32)
    action = rng.uniform(-1, 1, (1, 6)).astype(np.float32)
    reward, done, infos = rng.standard_normal(1), np.zeros(1, bool), [{}]
    return measure(
        lambda: replay.add(observation, following, action, reward, done, infos),
        {"single": lambda: replay.sample(BATCH)},
        args,
        1,
    )


def report(results: dict[str, list[dict[str, float]]]) -> str:
    """Table of medians over turns."""
    baseline = results.get(BASELINE)
    rows = []
    for name, turns in results.items():
        ratio = (
            median_and_range(
                [ours["single"] / theirs["single"] for ours, theirs in zip(turns, baseline)], 2
            )
            if baseline
            else "-"
        )
        stacked = [turn["stacked"] for turn in turns if "stacked" in turn]
        rows.append(
            [
                CONTESTANTS[name].label,
                median_and_range([turn["add"] for turn in turns], 1),
                median_and_range([turn["single"] for turn in turns]),
                ratio,
                median_and_range(stacked) if stacked else "-",
            ]
        )
    header = ["", "us/add", "samples/s, k = 1", "ratio", f"samples/s, k = {STACKED}"]
    return table(header, rows)


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    if args.contestant is not None:
        measured = measure_sb3(args) if args.contestant == BASELINE else measure_ours(args)
        print(json.dumps(measured))
        return
    facts = begin(args, ["stable-baselines3", "torch", "numpy"])
    chosen = present({name: CONTESTANTS[name] for name in args.contestants}, args.peer_python)
    results: dict[str, list[dict[str, float]]] = {}
    for round_ in range(args.rounds):
        for name, contestant in chosen.items():
            python = args.peer_python if contestant.peer else sys.executable
            options = ["--contestant", name, "--transitions", str(args.transitions)]
            options += ["--blocks", str(args.blocks), "--calls", str(args.calls)]
            options += ["--folder", str(Path(args.folder).absolute())] if args.folder else []
            turn = run_child(python, __file__, options)
            results.setdefault(name, []).append(turn)
            print(
                f"round {round_ + 1}: {contestant.label}: {turn['single']:,.0f} samples/s",
                flush=True,
            )
    print(f"\nReplay of {args.transitions:,} transitions, batches of {BATCH}\n")
    print(report(results))
    finish(args, facts, results)


if __name__ == "__main__":
    main()
