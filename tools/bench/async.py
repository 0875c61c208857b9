"""Asynchronous against synchronous training on environments of a set latency, to an equal return.

CartPole-v1 whose steps take a set mean time (0, 1, 5, 15 ms), log-normal with a heavy tail
(`--spread 0` makes it constant), and CartPole-v1 as it is. Every contestant trains the same network
(64-64) on the same number of environments with the same batch: 16 steps of each of 64, 6 epochs of
minibatches of 256. Contestants:

    one      synchronous PPO that steps the environments one after the other (rate only)
    sync     synchronous PPO that steps them all at once, in threads where they wait
    async    asynchronous PPO, 2 workers of 32 environments
    impala   asynchronous V-trace actor-critic, one pass over each batch, the same workers
    sb3      stable-baselines3 PPO with SubprocVecEnv, one process an environment

Each measurement is a process of its own, in turn. steps/s leaves out the first iterations (start,
compilation); time to the threshold counts them, imports and construction not. Sample use is the
share of steps that training used rather than dropped as too old; idle is the share of its time that
the learner waits for samples.
"""

from __future__ import annotations

import argparse
import itertools
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
    ours_set_options,
    positive_int,
    present,
    run_child,
    table,
)

CONTESTANTS = {
    "one": Contestant("sync, one at a time", "msrl_accel", peer=False),
    "sync": Contestant("sync", "msrl_accel", peer=False),
    "impala": Contestant("IMPALA", "msrl_accel", peer=False),
    "async": Contestant("async", "msrl_accel", peer=False),
    "sb3": Contestant("stable-baselines3", "stable-baselines3"),
}
DELAYED = "msrl_accel.envs.delayed:Delayed-v0"
PLAIN = "plain"
LATENCIES = ("15", "5", "1", "0", PLAIN)
N_STEPS, N_EPOCHS, BATCH_SIZE = 16, 6, 256
LEARNING_RATE, GAMMA, GAE_LAMBDA = 2e-3, 0.98, 0.9
WARM_UP = 5
"""Iterations left out of the rate."""


def parser() -> argparse.ArgumentParser:
    p = make_parser(__doc__)
    p.add_argument("--latency", nargs="+", choices=LATENCIES, default=list(LATENCIES))
    p.add_argument("--spread", type=float, default=1.0, help="sigma of the log-normal latency")
    p.add_argument("--seeds", type=positive_int, default=3, help="runs of each, seeds 0, 1, ...")
    p.add_argument("--contestants", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    p.add_argument("--threshold", type=float, default=400.0, help="mean of the last 100 episodes")
    p.add_argument("--limit", type=float, default=300.0, help="seconds after which a run is ended")
    p.add_argument("--rate-seconds", type=float, default=30.0, help="length of rate-only runs")
    p.add_argument("--workers", type=positive_int, default=2)
    p.add_argument("--n-envs", type=positive_int, default=64, help="environments in all")
    p.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)  # child processes only
    return p


class Clock:
    """Follows a run iteration by iteration."""

    def __init__(self, args: argparse.Namespace, rate_only: bool) -> None:
        self.threshold = args.threshold
        self.limit = args.rate_seconds if rate_only else args.limit
        self.rate_only = rate_only
        self.begin = time.monotonic()
        self.times: list[float] = []
        self.steps: list[int] = []
        self.reached: float | None = None

    def tick(self, step: int, episodes: float, mean_return: float) -> bool:
        """Note an iteration that has ended at a step; whether the run is to go on."""
        self.times.append(time.monotonic() - self.begin)
        self.steps.append(step)
        if not self.rate_only and episodes >= 100 and mean_return >= self.threshold:
            self.reached = self.times[-1]
            return False
        return self.times[-1] < self.limit or len(self.times) < 3

    def result(self, use: float, idle: float) -> dict[str, float | None]:
        first = min(WARM_UP, len(self.times) - 2)
        seconds = self.times[-1] - self.times[first]
        return {
            "steps_per_second": (self.steps[-1] - self.steps[first]) / seconds,
            "seconds_to_threshold": self.reached,
            "steps_to_threshold": None if self.reached is None else self.steps[-1],
            "sample_use": use,
            "idle_share": idle,
        }


def environment(latency: str, spread: float) -> tuple[str, dict[str, Any]]:
    if latency == PLAIN:
        return "CartPole-v1", {}
    return DELAYED, {"env": "CartPole-v1", "mean_ms": float(latency), "spread": spread}


def our_config(name: str, args: argparse.Namespace) -> Any:
    from msrl_accel.config import build_parser, config_from_args

    (latency,) = args.latency
    env, kwargs = environment(latency, args.spread)
    algo = "impala" if name == "impala" else "ppo"
    mode = "sync" if name in ("one", "sync") else "async"
    at_once = {"one": "sync", "sync": "threads" if latency not in ("0", PLAIN) else "auto"}
    values: dict[str, Any] = {
        "env_kwargs": json.dumps(kwargs),
        "vectorization": at_once.get(name, "auto"),
        f"{algo}.n_steps": N_STEPS,
        f"{algo}.learning_rate": LEARNING_RATE,
        f"{algo}.batch_size": BATCH_SIZE,
        f"{algo}.gamma": GAMMA,
        "pipeline.workers": args.workers,
        "pipeline.envs_per_worker": args.n_envs // args.workers,
        "logging.tensorboard": False,
    }
    if algo == "ppo":
        values.update({"ppo.n_epochs": N_EPOCHS, "ppo.gae_lambda": GAE_LAMBDA})
    words = ["--algo", algo, "--env", env, "--mode", mode, "--no-tuned", "--seed", str(args.seed)]
    words += ["--n-envs", str(args.n_envs), "--total-steps", str(10**9)]
    words += [w for key, value in values.items() for w in ("--set", f"{key}={value}")]
    return config_from_args(build_parser().parse_args(words + ours_set_options(args, "--set")))


def measure_ours(name: str, args: argparse.Namespace) -> dict[str, float | None]:
    from msrl_accel.pipeline import trainer_class
    from msrl_accel.run import Run

    with tempfile.TemporaryDirectory() as folder:
        config = our_config(name, args).replace(run_dir=folder)
        trainer = trainer_class(config)(config, Run.create(config))
        clock = Clock(args, rate_only=name == "one")
        use, idle = [], []
        try:
            go_on = True
            while go_on:
                metrics = trainer.iterate()
                waited = metrics.get("time/wait_seconds", metrics.get("time/rollout_seconds", 0.0))
                idle.append(waited / (waited + metrics["time/update_seconds"]))
                use.append(1 - metrics.get("staleness/dropped", 0.0))
                episodes = metrics.get("episode/count", 0.0)
                go_on = clock.tick(trainer.step, episodes, metrics.get("episode/return", 0.0))
        finally:
            trainer.close()
    return clock.result(statistics.mean(use), statistics.mean(idle[WARM_UP:] or idle))


def measure_sb3(args: argparse.Namespace) -> dict[str, float | None]:
    import importlib

    import gymnasium
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import SubprocVecEnv

    torch.set_num_threads(1)
    (latency,) = args.latency
    env, kwargs = environment(latency, args.spread)

    def make(**given: Any) -> Any:
        module, _, env_id = env.rpartition(":")
        if module:
            importlib.import_module(module)
        return gymnasium.make(env_id, **given)

    class Watch(BaseCallback):  # type: ignore[misc]
        """Ticks at the end of each rollout; what is between two of them is the update."""

        ended = 0.0
        collecting = updating = 0.0

        def _on_rollout_start(self) -> None:
            now = time.monotonic()
            if self.ended:
                self.updating += now - self.ended
            self.started = now

        def _on_rollout_end(self) -> None:
            self.ended = time.monotonic()
            self.collecting += self.ended - self.started
            recent = [episode["r"] for episode in self.model.ep_info_buffer]
            mean = statistics.mean(recent) if recent else 0.0
            self.go_on = clock.tick(self.model.num_timesteps, len(recent), mean)

        def _on_step(self) -> bool:
            return getattr(self, "go_on", True)

    venv = make_vec_env(
        make,
        n_envs=args.n_envs,
        seed=args.seed,
        env_kwargs=kwargs,
        vec_env_cls=SubprocVecEnv,
        vec_env_kwargs={"start_method": "fork"},
    )
    model = PPO(
        "MlpPolicy",
        venv,
        n_steps=N_STEPS,
        n_epochs=N_EPOCHS,
        batch_size=BATCH_SIZE,
        learning_rate=LEARNING_RATE,
        gamma=GAMMA,
        gae_lambda=GAE_LAMBDA,
        seed=args.seed,
        device="cpu",
    )
    clock = Clock(args, rate_only=False)
    watch = Watch()
    model.learn(10**9, callback=watch)
    venv.close()
    return clock.result(1.0, watch.collecting / max(watch.collecting + watch.updating, 1e-9))


MEASURE: dict[str, Callable[[argparse.Namespace], dict[str, float | None]]] = {
    **{
        name: lambda args, name=name: measure_ours(name, args)
        for name in ("one", "sync", "impala", "async")
    },
    "sb3": measure_sb3,
}

Results = dict[str, list[dict[str, Any]]]


def report(results: Results) -> str:
    """Means over the seeds; ratios to `sync`, of rates and of times (larger is better)."""
    base = results.get("sync", [])
    rows = [_row(CONTESTANTS[name].label, runs, base) for name, runs in results.items() if runs]
    header = ["", "steps/s", "ratio", "s to threshold", "speed-up", "k steps", "use", "idle"]
    return table(header, rows)


def _row(label: str, runs: list[dict[str, Any]], base: list[dict[str, Any]]) -> list[str]:
    rate = _mean(runs, "steps_per_second")
    seconds, theirs = _mean(runs, "seconds_to_threshold"), _mean(base, "seconds_to_threshold")
    base_rate, steps = _mean(base, "steps_per_second"), _mean(runs, "steps_to_threshold")
    missed = sum(run["seconds_to_threshold"] is None for run in runs)
    return [
        label,
        f"{rate:,.0f}",
        f"{rate / base_rate:.2f}" if base_rate else "-",
        f"{seconds:.1f}" if seconds else f"not in {missed} of {len(runs)}",
        f"{theirs / seconds:.2f}" if seconds and theirs else "-",
        f"{steps / 1000:.0f}" if steps else "-",
        f"{_mean(runs, 'sample_use'):.0%}",
        f"{_mean(runs, 'idle_share'):.0%}",
    ]


def _mean(runs: list[dict[str, Any]], key: str) -> float | None:
    """Over all runs; None where one has no such number."""
    values = [run[key] for run in runs]
    return None if not values or None in values else statistics.mean(values)


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    if args.contestant is not None:
        print(json.dumps(MEASURE[args.contestant](args)))
        return
    facts = begin(args, ["stable-baselines3", "torch", "gymnasium", "numpy"])
    chosen = present({n: CONTESTANTS[n] for n in args.contestants}, args.peer_python)
    results: dict[str, Results] = {lat: {name: [] for name in chosen} for lat in args.latency}
    common = ["--spread", str(args.spread), "--threshold", str(args.threshold)]
    common += ["--limit", str(args.limit), "--rate-seconds", str(args.rate_seconds)]
    common += ["--workers", str(args.workers), "--n-envs", str(args.n_envs)]
    common += ours_set_options(args)
    for latency, seed, name in itertools.product(args.latency, range(args.seeds), chosen):
        if name == "one" and (seed or latency == PLAIN):
            continue  # a rate needs no second seed
        python = args.peer_python if CONTESTANTS[name].peer else sys.executable
        options = ["--contestant", name, "--latency", latency, "--seed", str(seed), *common]
        measured = run_child(python, __file__, options)
        results[latency][name].append(measured)
        seconds = measured["seconds_to_threshold"]
        print(
            f"{latency} ms, seed {seed}, {name}: {measured['steps_per_second']:,.0f} steps/s, "
            f"threshold {'not reached' if seconds is None else f'after {seconds:.1f} s'}",
            flush=True,
        )
    for latency, found in results.items():
        what = "CartPole-v1 as it is" if latency == PLAIN else f"{latency} ms"
        print(f"\n{what}, {args.n_envs} environments, return {args.threshold:g}\n")
        print(report(found))
    finish(args, facts, results)


if __name__ == "__main__":
    main()
