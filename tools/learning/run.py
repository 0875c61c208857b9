"""Learning curves of the shipped configurations against their targets.

    python tools/learning/run.py                       # every task, all its seeds: two hours
    python tools/learning/run.py --algo ppo            # 20 minutes
    python tools/learning/run.py --tasks CartPole-v1 --seeds 0

Each run is `python -m msrl_accel.train` in a process of its own with the configuration shipped for
the task; what counts is the deterministic evaluation over 20 separate episodes at its end. Results
go to `--out`: results.json, results.md (the table) and curves.png.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Task:
    algo: str
    env: str
    target: float
    """Least deterministic return."""
    within: int
    """Environment steps allowed."""
    seeds: int = 3
    extra: tuple[str, ...] = ()
    mode: str = "sync"

    @property
    def label(self) -> str:
        """Of the algorithm and its mode."""
        return self.algo if self.mode == "sync" else f"{self.algo}, {self.mode}"


TASKS = (
    Task("ppo", "CartPole-v1", 500, 101_000),
    Task("ppo", "Acrobot-v1", -90, 510_000),
    Task("ppo", "Pendulum-v1", -250, 305_000),
    Task("ppo", "LunarLander-v3", 200, 1_010_000),
    Task("ppo", "HalfCheetah-v5", 2000, 1_010_000, seeds=1),
    Task("ppo", "CartPole-v1", 500, 101_000, mode="async"),
    Task("ppo", "Acrobot-v1", -90, 510_000, mode="async"),
    Task("dqn", "CartPole-v1", 500, 100_000),
    Task("impala", "CartPole-v1", 500, 200_000),
    Task("sac", "Pendulum-v1", -180, 20_000),
    Task("sac", "LunarLander-v3", 200, 300_000),
    Task("sac", "HalfCheetah-v5", 5000, 300_000, seeds=1, extra=("--total-steps", "300000")),
)


def run(task: Task, seed: int, out: Path) -> dict[str, Any]:
    """Train once (or read what an earlier call trained) and return the row of the table."""
    name = task.label.replace(", ", "-")
    run_dir = out / f"{name}-{task.env}-seed{seed}"
    if not (run_dir / "summary.json").exists():
        command = [sys.executable, "-m", "msrl_accel.train", "--algo", task.algo, "--env", task.env]
        command += ["--mode", task.mode, "--seed", str(seed), "--run-dir", str(run_dir)]
        command += task.extra
        if run_dir.exists():
            command = [sys.executable, "-m", "msrl_accel.train", "--resume", str(run_dir)]
        subprocess.run(command, check=True)
    summary = json.loads((run_dir / "summary.json").read_text())
    deterministic, sampled = summary["deterministic"], summary["sampled"]
    return {
        "algo": task.label,
        "env": task.env,
        "seed": seed,
        "steps": summary["steps"],
        "seconds": summary["seconds"],
        "return": deterministic["return_mean"],
        "std": deterministic["return_std"],
        "sampled": sampled["return_mean"],
        "target": task.target,
        "reached": deterministic["return_mean"] >= task.target and summary["steps"] <= task.within,
        "run_dir": str(run_dir),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, one line a run."""
    lines = [
        "| algorithm | environment | seed | steps | minutes | deterministic return "
        "| sampled | target | reached |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r['algo']} | {r['env']} | {r['seed']} | {r['steps']:,} | {r['seconds'] / 60:.1f} "
            f"| {r['return']:.1f} ± {r['std']:.1f} | {r['sampled']:.1f} | {r['target']:g} "
            f"| {'yes' if r['reached'] else 'no'} |"
        )
    return "\n".join(lines) + "\n"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Training return against steps, a panel a task, a line a seed, the target dashed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from msrl_accel.metrics import read_metrics

    tasks = list(dict.fromkeys((r["algo"], r["env"]) for r in rows))
    columns = min(3, len(tasks))
    figure = Figure(figsize=(5 * columns, 3.4 * -(-len(tasks) // columns)), layout="constrained")
    FigureCanvasAgg(figure)
    for i, (algo, env) in enumerate(tasks):
        axes = figure.add_subplot(-(-len(tasks) // columns), columns, i + 1)
        for r in (r for r in rows if (r["algo"], r["env"]) == (algo, env)):
            metrics = read_metrics(r["run_dir"])
            returns = metrics["episode/return"]
            known = np.isfinite(returns)
            axes.plot(metrics["step"][known], returns[known], label=f"seed {r['seed']}", lw=1.3)
        axes.axhline(r["target"], color="0.4", ls="--", lw=1, label="target")
        axes.set_title(f"{algo.upper()}, {env}")
        axes.set_xlabel("environment steps")
        axes.set_ylabel("training return (last 100 episodes)")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="*", default=sorted({t.env for t in TASKS}), metavar="ENV")
    parser.add_argument("--algo", choices=sorted({t.algo for t in TASKS}))
    parser.add_argument("--mode", choices=("sync", "async"))
    parser.add_argument("--seeds", nargs="*", type=int, help="default: as many as the task asks")
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for task in TASKS:
        if task.env not in args.tasks or args.algo not in (None, task.algo):
            continue
        if args.mode not in (None, task.mode):
            continue
        for seed in args.seeds if args.seeds is not None else range(task.seeds):
            rows.append(run(task, seed, args.out))
            (args.out / "results.json").write_text(json.dumps(rows, indent=2) + "\n")
            (args.out / "results.md").write_text(table(rows))
    plot(rows, args.out / "curves.png")
    print(table(rows))
    return 0 if all(r["reached"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
