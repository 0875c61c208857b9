"""Environment steps per second of PPO training, updates included.

Every contestant collects 32 steps from each environment and updates with 4 epochs of 4 minibatches
(hidden layers 64-64). msrl_accel steps 8, 64 and 1024 environments; stable-baselines3 steps 8, on
one torch thread, in its default DummyVecEnv. CartPole-v1 at all sizes, HalfCheetah-v5 at 8. Each
measurement is a process of its own, in turn, several rounds. Start, imports, compilation and the
first iterations (`--warmup`) are excluded and shown apart. Logging and checkpoints are off on both
sides.
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
    untuned_config,
)

CONTESTANTS = {
    "ours": Contestant("msrl_accel", "msrl_accel", peer=False),
    "sb3": Contestant("stable-baselines3", "stable-baselines3"),
}
CARTPOLE, CHEETAH = "CartPole-v1", "HalfCheetah-v5"
CASES = [
    ("ours", CARTPOLE, 8),
    ("ours", CARTPOLE, 64),
    ("ours", CARTPOLE, 1024),
    ("sb3", CARTPOLE, 8),
    ("ours", CHEETAH, 8),
    ("sb3", CHEETAH, 8),
]
N_STEPS, N_EPOCHS, N_MINIBATCHES = 32, 4, 4


def parser() -> argparse.ArgumentParser:
    p = make_parser(__doc__)
    p.add_argument("--rounds", type=positive_int, default=3, help="measurements of each case")
    p.add_argument("--seconds", type=float, default=5.0, help="length of a measurement")
    p.add_argument("--warmup", type=positive_int, default=3, help="iterations before it")
    p.add_argument("--envs", nargs="+", choices=[CARTPOLE, CHEETAH], default=[CARTPOLE, CHEETAH])
    p.add_argument("--env", default=CARTPOLE, help=argparse.SUPPRESS)  # child processes only
    p.add_argument("--n-envs", type=positive_int, default=8, help=argparse.SUPPRESS)
    return p


def measure_ours(args: argparse.Namespace) -> dict[str, float]:
    from msrl_accel.pipeline.sync import SyncTrainer
    from msrl_accel.run import Run

    with tempfile.TemporaryDirectory() as folder:
        config = untuned_config(
            args.env,
            args.n_envs,
            args,
            n_steps=N_STEPS,
            n_epochs=N_EPOCHS,
            batch_size=N_STEPS * args.n_envs // N_MINIBATCHES,
        ).replace(run_dir=folder)
        start = time.perf_counter()
        trainer = SyncTrainer(config, Run.create(config))
        for _ in range(args.warmup):
            trainer.iterate()
        times = [time.perf_counter()]
        while times[-1] - times[0] < args.seconds:
            trainer.iterate()
            times.append(time.perf_counter())
        trainer.close()
    return _rate(args, times, times[0] - start)


def measure_sb3(args: argparse.Namespace) -> dict[str, float]:
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)
    starts: list[float] = []

    class Clock(BaseCallback):  # type: ignore[misc]
        """Notes when each iteration begins; stops at the first step after the time is over."""

        def _on_rollout_start(self) -> None:
            starts.append(time.perf_counter())

        def _on_step(self) -> bool:
            measured = starts[args.warmup :]
            return not measured or measured[-1] - measured[0] < args.seconds

    start = time.perf_counter()
    model = PPO(
        "MlpPolicy",
        make_vec_env(args.env, n_envs=args.n_envs, seed=0),
        n_steps=N_STEPS,
        n_epochs=N_EPOCHS,
        batch_size=N_STEPS * args.n_envs // N_MINIBATCHES,
        seed=0,
        device="cpu",
    )
    model.learn(10**9, callback=Clock())
    times = starts[args.warmup :]
    return _rate(args, times, times[0] - start)


def _rate(args: argparse.Namespace, times: list[float], warmup: float) -> dict[str, float]:
    """Rate over whole iterations that began at `times`."""
    steps = (len(times) - 1) * N_STEPS * args.n_envs
    return {"steps_per_second": steps / (times[-1] - times[0]), "warmup_seconds": warmup}


MEASURE: dict[str, Callable[[argparse.Namespace], dict[str, float]]] = {
    "ours": measure_ours,
    "sb3": measure_sb3,
}


def available_cases(args: argparse.Namespace) -> list[tuple[str, str, int]]:
    """The cases asked for that can run; says which cannot, and why."""
    chosen = present(CONTESTANTS, args.peer_python)
    cases = [case for case in CASES if case[0] in chosen and case[1] in args.envs]
    if CHEETAH not in args.envs:
        return cases
    mujoco = {
        name: Contestant(f"{CHEETAH} of {c.label}", "mujoco", c.peer) for name, c in chosen.items()
    }
    kept = present(mujoco, args.peer_python)
    return [case for case in cases if case[1] != CHEETAH or case[0] in kept]


def report(results: list[dict[str, Any]]) -> str:
    """Table of medians; ratios are to stable-baselines3 at 8 of the same environment."""
    base = {
        r["env"]: statistics.median(r["steps_per_second"])
        for r in results
        if r["contestant"] == "sb3"
    }
    rows = []
    for r in results:
        rate = r["steps_per_second"]
        ratio = f"{statistics.median(rate) / base[r['env']]:.2f}" if r["env"] in base else "-"
        label = CONTESTANTS[r["contestant"]].label
        warmup = f"{statistics.median(r['warmup_seconds']):.1f}"
        rows.append([label, r["env"], str(r["n_envs"]), median_and_range(rate), ratio, warmup])
    header = ["", "env", "n_envs", "steps/s, median (range)", "ratio to sb3", "warm-up, s"]
    return table(header, rows)


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    if args.contestant is not None:
        print(json.dumps(MEASURE[args.contestant](args)))
        return
    facts = begin(args, ["stable-baselines3", "torch", "gymnasium", "mujoco", "numpy"])
    cases = available_cases(args)
    results: list[dict[str, Any]] = [
        {"contestant": c, "env": e, "n_envs": n, "steps_per_second": [], "warmup_seconds": []}
        for c, e, n in cases
    ]
    for round_ in range(args.rounds):
        for result in results:
            name, env, n = result["contestant"], result["env"], str(result["n_envs"])
            python = args.peer_python if CONTESTANTS[name].peer else sys.executable
            options = ["--contestant", name, "--env", env, "--n-envs", n]
            options += ["--seconds", str(args.seconds), "--warmup", str(args.warmup)]
            options += ours_set_options(args)
            measured = run_child(python, __file__, options)
            for key, value in measured.items():
                result[key].append(value)
            rate = measured["steps_per_second"]
            print(f"round {round_ + 1}: {name} {env} {n}: {rate:,.0f} steps/s", flush=True)
    print(f"\nPPO, {N_STEPS} steps, {N_EPOCHS} epochs of {N_MINIBATCHES} minibatches\n")
    print(report(results))
    finish(args, facts, results)


if __name__ == "__main__":
    main()
