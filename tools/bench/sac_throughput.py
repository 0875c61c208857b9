"""Environment steps per second of SAC training on HalfCheetah-v5, one gradient step a step.

Networks of 256-256 and batches of 256 for everyone, one environment, all cores. A measurement is a
process of its own: after the warm-up (random steps, compilation and the first updates) it counts
the steps of a span of time. Logging and checkpoints are off on both sides. Ratios are taken round
by round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from _report import (
    Contestant,
    begin,
    finish,
    make_parser,
    median_and_range,
    ours_set_options,
    positive_int,
    present,
    run_child,
    table,
)

CONTESTANTS = {
    "ours": Contestant("msrl_accel", "msrl_accel", peer=False),
    "sb3": Contestant("stable-baselines3", "stable-baselines3"),
    "sbx": Contestant("sbx", "sbx-rl"),
}
ENV, WARM_UP = "HalfCheetah-v5", 600


def parser() -> argparse.ArgumentParser:
    p = make_parser(__doc__)
    p.add_argument("--rounds", type=positive_int, default=3, help="measurements of each contestant")
    p.add_argument("--seconds", type=float, default=15.0, help="length of a measurement")
    return p


def measure_ours(args: argparse.Namespace) -> float:
    from msrl_accel.config import build_parser, config_from_args
    from msrl_accel.pipeline.off_policy import OffPolicyTrainer
    from msrl_accel.run import Run

    words = ["--algo", "sac", "--env", ENV, "--no-tuned", "--total-steps", str(10**9)]
    config = config_from_args(build_parser().parse_args([*words, *ours_set_options(args, "--set")]))
    with tempfile.TemporaryDirectory() as folder:
        config = config.replace(run_dir=folder)
        trainer = OffPolicyTrainer(config, Run.create(config))
        while trainer.step < WARM_UP:
            trainer.iterate()
        first, start = trainer.step, time.perf_counter()
        while time.perf_counter() - start < args.seconds:
            trainer.iterate()
        rate = (trainer.step - first) / (time.perf_counter() - start)
        trainer.close()
    return rate


def measure_peer(args: argparse.Namespace) -> float:
    import importlib

    from stable_baselines3.common.callbacks import BaseCallback

    module = {"sb3": "stable_baselines3", "sbx": "sbx"}[args.contestant]
    sac = importlib.import_module(module).SAC

    class Clock(BaseCallback):  # type: ignore[misc]
        """Notes the time of the first step after the warm-up; stops once the span is over."""

        start = 0.0

        def _on_step(self) -> bool:
            if self.num_timesteps == WARM_UP:
                self.start = time.perf_counter()
            return self.num_timesteps < WARM_UP or (time.perf_counter() - self.start < args.seconds)

    clock = Clock()
    model = sac("MlpPolicy", ENV, seed=0, buffer_size=100_000)
    model.learn(10**9, callback=clock)
    steps: int = clock.num_timesteps - WARM_UP
    return steps / (time.perf_counter() - clock.start)


MEASURE: dict[str, Callable[[argparse.Namespace], float]] = {
    "ours": measure_ours,
    "sb3": measure_peer,
    "sbx": measure_peer,
}


def report(results: dict[str, list[float]]) -> str:
    """Table of medians, and of our rate over each peer's in the same round."""
    rows = []
    for name, rates in results.items():
        ratios = [ours / theirs for ours, theirs in zip(results.get("ours", []), rates)]
        ratio = f"{statistics.median(ratios):.2f}" if ratios and name != "ours" else "-"
        rows.append([CONTESTANTS[name].label, median_and_range(rates), ratio])
    return table(["", "steps/s, median (range)", "msrl_accel's ratio to it"], rows)


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    if args.contestant is not None:
        print(json.dumps({"steps_per_second": MEASURE[args.contestant](args)}))
        return
    facts = begin(args, ["stable-baselines3", "sbx-rl", "torch", "jax", "mujoco", "numpy"])
    chosen = present(CONTESTANTS, args.peer_python)
    results: dict[str, list[float]] = {name: [] for name in chosen}
    for round_ in range(args.rounds):
        for name, contestant in chosen.items():
            python = args.peer_python if contestant.peer else sys.executable
            options: list[Any] = ["--contestant", name, "--seconds", str(args.seconds)]
            rate = run_child(python, __file__, [*options, *ours_set_options(args)])
            results[name].append(rate["steps_per_second"])
            print(f"round {round_ + 1}: {name}: {results[name][-1]:,.0f} steps/s", flush=True)
    print(f"\nSAC on {ENV}, one gradient step a step\n")
    print(report(results))
    finish(args, facts, results)


if __name__ == "__main__":
    main()
