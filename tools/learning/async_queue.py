"""What the length of the queue does to learning, with and without correction for lag.

    python tools/learning/async_queue.py                     # 1 to 32, three seeds: an hour
    python tools/learning/async_queue.py --queues 1 4 --objectives decoupled --seeds 1

Trains the shipped PPO configuration asynchronously on a fast environment, where workers fill the
queue at once, so that samples are as many versions old as the queue is long; none is dropped.
Objectives: `clipped` takes the samples as they are, `decoupled` and `vtrace` correct for their lag.
`sync` is synchronous training. Each run is a process of its own; those that exist in `--out` are
read instead. Results: results.json, results.md and, with `--plot FILE`, a picture.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from msrl_accel.run import Run

QUEUES = (1, 2, 4, 8, 16, 32)
OBJECTIVES = ("clipped", "decoupled", "vtrace")
COLOURS = {"clipped": "#d9661f", "decoupled": "#1f5fa8", "vtrace": "#3a8f5c"}
Rows = list[dict[str, Any]]


def command(
    env: str, seed: int, run_dir: Path, objective: str, queue: int, steps: int | None
) -> list[str]:
    """Of one training run; queue 0 is synchronous."""
    words = [sys.executable, "-m", "msrl_accel.train", "--algo", "ppo", "--env", env]
    words += ["--seed", str(seed), "--run-dir", str(run_dir), "--quiet"]
    words += ["--set", "logging.tensorboard=false"]
    if steps is not None:
        words += ["--total-steps", str(steps)]
    if not queue:
        return words
    words += ["--mode", "async", "--queue-size", str(queue), "--max-staleness", str(2 * queue + 2)]
    return [*words, "--set", f"ppo.objective={objective}"]


def measure(
    env: str, seed: int, out: Path, objective: str, queue: int, steps: int | None
) -> dict[str, Any]:
    """Train, or read what an earlier call trained."""
    name = f"{env}-{objective}-queue{queue}" if queue else f"{env}-sync"
    run_dir = out / f"{name}-seed{seed}"
    if not (run_dir / "summary.json").exists():
        if run_dir.exists():
            raise SystemExit(f"{run_dir} is incomplete: delete it, or resume it")
        subprocess.run(command(env, seed, run_dir, objective, queue, steps), check=True)
    return row(Run(run_dir), objective if queue else "sync", queue)


def row(run: Run, objective: str, queue: int) -> dict[str, Any]:
    metrics, summary = run.metrics, run.summary
    returns = metrics["episode/return"]
    lag = metrics.get("staleness/lag_mean", np.zeros(1))
    return {
        "objective": objective,
        "queue": queue,
        "seed": run.config.seed,
        "steps": summary["steps"],
        "final": summary["deterministic"]["return_mean"],
        "area": float(np.nanmean(returns)),
        "lag": float(lag[len(lag) // 2 :].mean()),
        "learning_rate_factor": 1 / (1 + run.config.pipeline.lag_discount * float(lag.mean())),
    }


def summarize(rows: Rows) -> str:
    """Markdown, one line an objective and queue: means over the seeds."""
    lines = [
        "| objective | queue | lag, versions | return over the run | final return (each seed) |",
        "|---|---|---|---|---|",
    ]
    for (objective, queue), group in grouped(rows).items():
        finals = ", ".join(f"{r['final']:.0f}" for r in group)
        lines.append(
            f"| {objective} | {queue or '-'} | {mean(group, 'lag'):.1f} "
            f"| {mean(group, 'area'):.0f} | {mean(group, 'final'):.0f} ({finals}) |"
        )
    return "\n".join(lines) + "\n"


def grouped(rows: Rows) -> dict[tuple[str, int], Rows]:
    groups: dict[tuple[str, int], Rows] = {}
    for r in rows:
        groups.setdefault((r["objective"], r["queue"]), []).append(r)
    return groups


def mean(rows: Rows, key: str) -> float:
    return float(np.mean([r[key] for r in rows]))


def plot(rows: Rows, env: str, path: Path) -> None:
    """Return over the run and final return against the length of the queue; bars are the seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    titles = {
        "area": "mean training return over the run",
        "final": "deterministic return at its end",
    }
    for axes, (key, title) in zip(figure.subplots(1, 2), titles.items()):
        groups = grouped(rows)
        for objective, colour in COLOURS.items():
            points = sorted((q, g) for (o, q), g in groups.items() if o == objective)
            if not points:
                continue
            queues = [q for q, _ in points]
            values = [[r[key] for r in g] for _, g in points]
            middle = np.array([np.mean(v) for v in values])
            low, high = (np.array([f(v) for v in values]) for f in (min, max))
            axes.errorbar(
                queues, middle, yerr=[middle - low, high - middle], color=colour, marker="o",
                markersize=4, capsize=2.5, linewidth=1.4, elinewidth=0.8, label=objective,
            )  # fmt: skip
        if ("sync", 0) in groups:
            value = mean(groups["sync", 0], key)
            axes.axhline(value, color="0.35", linestyle="--", linewidth=1, label="synchronous")
        axes.set_xscale("log", base=2)
        axes.set_xticks(QUEUES, [str(q) for q in QUEUES])
        axes.set_xlabel("queue, updates")
        axes.set_ylim(bottom=0)
        axes.set_title(title, fontsize=10, loc="left")
        axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
    figure.suptitle(f"PPO on {env}: length of the queue", fontsize=11, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--queues", nargs="+", type=int, default=list(QUEUES))
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES))
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ...")
    parser.add_argument("--total-steps", type=int, help="default: as the configuration says")
    parser.add_argument("--out", type=Path, default=Path("runs/async_queue"))
    parser.add_argument("--plot", type=Path, metavar="FILE", help="PNG to write")
    args = parser.parse_args(argv)
    cases = [("sync", 0), *itertools.product(args.objectives, args.queues)]
    rows: Rows = []
    for seed, (objective, queue) in itertools.product(range(args.seeds), cases):
        measured = measure(args.env, seed, args.out, objective, queue, args.total_steps)
        rows.append(measured)
        print(
            f"{objective}, queue {queue}, seed {seed}: lag {measured['lag']:.1f}, return over the "
            f"run {measured['area']:.0f}, final {measured['final']:.0f}",
            flush=True,
        )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "results.json").write_text(json.dumps(rows, indent=2) + "\n")
    text = summarize(rows)
    (args.out / "results.md").write_text(text)
    print(f"\n{text}")
    if args.plot is not None:
        plot(rows, args.env, args.plot)


if __name__ == "__main__":
    main()
