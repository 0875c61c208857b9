"""Wall time to solve CartPole-v1: from process start to a mean return of 475 over 100 episodes.

Contestants: msrl_accel (`python -m msrl_accel.train` as a user types it, with its tuned
configuration; once as from the second run of a configuration on, once with nothing in its cache of
compiled graphs), stable-baselines3 and sbx (the reference settings of rl-baselines3-zoo). They run
one after the other, seed by seed. Everything is counted: interpreter start, imports, compilation,
rollouts, updates, and for msrl_accel the writing of its metrics. Each contestant appends one line
a rollout to a file; the clock stops when this process reads the first line that has a full window
of 100 training episodes and the mean. msrl_accel writes its line after the update of that
rollout, the peers before theirs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from _report import (
    BenchmarkError,
    Contestant,
    begin,
    finish,
    last_lines,
    make_parser,
    ours_set_options,
    present,
    table,
)

CONTESTANTS = {
    "ours": Contestant("msrl_accel", "msrl_accel", peer=False),
    "ours_first": Contestant("msrl_accel, nothing cached", "msrl_accel", peer=False),
    "sb3": Contestant("stable-baselines3", "stable-baselines3"),
    "sbx": Contestant("sbx", "sbx-rl"),
}
OURS = ("ours", "ours_first")
ENV = "CartPole-v1"
WINDOW = 100
POLL_SECONDS = 0.01


@dataclass
class Outcome:
    """One run of one contestant."""

    seed: int
    seconds: float
    """To the threshold, or to the last rollout where it was not reached."""
    steps: int
    solved: bool
    startup: float
    """Seconds to the first line: imports, compilation and one iteration."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Resolved configuration, of msrl_accel only."""

    def __str__(self) -> str:
        return f"{'' if self.solved else '>'}{self.seconds:.2f}"


def parser() -> argparse.ArgumentParser:
    p = make_parser(__doc__)
    p.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    p.add_argument("--threshold", type=float, default=475.0, help="mean return that counts")
    p.add_argument("--contestants", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    p.add_argument("--ours-n-envs", type=int, metavar="N", help="instead of the tuned number")
    p.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # child processes only
    return p


def command(name: str, seed: int, args: argparse.Namespace, folder: Path) -> tuple[list[str], Path]:
    """Command line of one run, and the file of its rows."""
    if name in OURS:
        run = folder / "run"
        words = [sys.executable, "-m", "msrl_accel.train", "--algo", "ppo", "--env", ENV]
        words += ["--seed", str(seed), "--run-dir", str(run)]
        if args.ours_n_envs is not None:
            words += ["--n-envs", str(args.ours_n_envs)]
        words += ours_set_options(args, "--set")
        if name == "ours_first":
            words += ["--set", "runtime.compile_cache=false"]
        return words, run / "metrics.jsonl"
    rows = folder / "rows.jsonl"
    words = [args.peer_python, __file__, "--contestant", name, "--seeds", str(seed)]
    return [*words, "--rows", str(rows)], rows


class RowReader:
    """Reads the complete lines that another process has appended since the last call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    def __call__(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self.offset += len(complete)
        return [json.loads(line) for line in complete.splitlines()]


def is_solved(row: dict[str, Any], threshold: float) -> bool:
    return bool(row.get("episode/count", 0) >= WINDOW and row["episode/return"] >= threshold)


def read_settings(rows: Path) -> dict[str, Any]:
    """What msrl_accel saved beside its metrics; empty for the peers."""
    file = rows.parent / "config.yaml"
    if not file.exists():
        return {}
    import yaml  # here, because the peers' environment may lack it

    settings: dict[str, Any] = yaml.safe_load(file.read_text())
    return settings


def time_to_solve(name: str, seed: int, args: argparse.Namespace) -> Outcome:
    """Run one contestant until it has solved the task or ended.

    Raises:
        BenchmarkError: its process failed.
    """
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        words, rows = command(name, seed, args, folder)
        reader, log = RowReader(rows), folder / "log"
        seconds, steps, startup = 0.0, 0, 0.0
        with log.open("w") as output:
            start = time.perf_counter()
            process = subprocess.Popen(words, stdout=output, stderr=output, cwd=folder)
            try:
                running = True
                while running:
                    running = process.poll() is None  # before reading: the last rows count
                    for row in reader():
                        seconds, steps = time.perf_counter() - start, int(row["step"])
                        startup = startup or seconds
                        if is_solved(row, args.threshold):
                            return Outcome(seed, seconds, steps, True, startup, read_settings(rows))
                    time.sleep(POLL_SECONDS)
            finally:
                process.kill()
                process.wait()
        if process.returncode or not steps:
            raise BenchmarkError(f"{name}, seed {seed}, failed:\n{last_lines(log.read_text())}")
        return Outcome(seed, seconds, steps, False, startup, read_settings(rows))


def train_peer(name: str, seed: int, rows: Path) -> None:
    """Child process: rl-baselines3-zoo's PPO settings for CartPole-v1, on one thread."""
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    if name == "sbx":
        from sbx import PPO
    else:
        from stable_baselines3 import PPO

    torch.set_num_threads(1)

    class WriteRows(BaseCallback):  # type: ignore[misc]
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            returns = [episode["r"] for episode in self.model.ep_info_buffer]
            if returns:
                row = {
                    "step": self.num_timesteps,
                    "episode/count": len(returns),
                    "episode/return": float(sum(returns) / len(returns)),
                }
                with rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")

    model = PPO(
        "MlpPolicy",
        make_vec_env(ENV, n_envs=8, seed=seed),
        n_steps=32,
        batch_size=256,
        gae_lambda=0.8,
        gamma=0.98,
        n_epochs=20,
        ent_coef=0.0,
        learning_rate=lambda remaining: 1e-3 * remaining,
        clip_range=lambda remaining: 0.2 * remaining,
        seed=seed,
        device="cpu",
    )
    model.learn(100_000, callback=WriteRows())


def report(outcomes: dict[str, list[Outcome]], reference: str = "sb3") -> str:
    """Table of seconds a seed, their mean and its ratio to `reference`, start-up and steps."""
    base = outcomes.get(reference)
    rows = []
    for name, runs in outcomes.items():
        mean = statistics.mean(run.seconds for run in runs)
        ratio = "-"
        if base is not None:
            ratio = f"{mean / statistics.mean(run.seconds for run in base):.2f}"
        steps = f"{statistics.mean(run.steps for run in runs):,.0f}"
        startup = f"{statistics.mean(run.startup for run in runs):.2f}"
        label = CONTESTANTS[name].label
        rows.append([label, *map(str, runs), f"{mean:.2f}", ratio, startup, steps])
    seeds = [f"seed {run.seed}, s" for run in next(iter(outcomes.values()))]
    header = ["", *seeds, "mean, s", f"ratio to {reference}", "first rollout, s", "mean steps"]
    text = table(header, rows)
    if not all(run.solved for runs in outcomes.values() for run in runs):
        text += "\n> not reached by the end of the run: means and ratios with it are bounds"
    return text


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    if args.contestant is not None:
        train_peer(args.contestant, args.seeds[0], args.rows)
        return
    facts = begin(args, ["stable-baselines3", "sbx-rl", "torch", "jax", "gymnasium", "numpy"])
    chosen = present({name: CONTESTANTS[name] for name in args.contestants}, args.peer_python)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in chosen}
    if "ours" in chosen:
        time_to_solve("ours", args.seeds[0], args)  # fills its cache
    for seed in args.seeds:
        for name in chosen:
            outcome = time_to_solve(name, seed, args)
            outcomes[name].append(outcome)
            print(f"{chosen[name].label}, seed {seed}: {outcome} s, {outcome.steps:,} steps")
            sys.stdout.flush()
    print(f"\nTime to a mean return of {args.threshold:g} on {ENV}, from process start\n")
    print(report(outcomes))
    ours = [runs[0] for name, runs in outcomes.items() if name in OURS]
    if ours:
        settings = ours[0].settings
        pairs = ", ".join(f"{key} {value}" for key, value in settings["ppo"].items())
        print(f"\nmsrl_accel: n_envs {settings['n_envs']}, {pairs}")
    results = {name: [asdict(run) for run in runs] for name, runs in outcomes.items()}
    finish(args, facts, results)


if __name__ == "__main__":
    main()
