"""Where the time of a run goes: `python -m msrl_accel.trace RUN`."""

from __future__ import annotations

import argparse
import logging
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from msrl_accel.commandline import CommandParser
from msrl_accel.errors import MsrlError
from msrl_accel.pipeline.diagnosis import Diagnosis, diagnose
from msrl_accel.pipeline.timeline import TRACE_FILE, read_timeline
from msrl_accel.pipeline.trace_plot import plot_trace
from msrl_accel.progress import format_summary
from msrl_accel.run import Run

PROG = "python -m msrl_accel.trace"
PICTURE = "trace.png"
_WIDTH = 96


def trace(run: Run | str | Path, picture: str | Path | None = None) -> Diagnosis:
    """Judge a run, complete or under way, by its metrics, and draw it.

    Args:
        run: a run, or its directory.
        picture: PNG to write; default `trace.png` in the run directory.

    Raises:
        ConfigError: the directory holds no run.
        MsrlError: it has too few metrics.
    """
    run = run if isinstance(run, Run) else Run(run)
    diagnosis = diagnose(run.metrics, run.config)
    file = run.path / TRACE_FILE
    events = read_timeline(file) if file.exists() else []
    path = Path(picture) if picture is not None else run.path / PICTURE
    plot_trace(run.metrics, events, path, f"{run.config.algo} on {run.config.env}")
    return diagnosis


def describe(run: Run, found: Diagnosis) -> str:
    """The diagnosis as text."""
    m = run.metrics
    rows: dict[str, object] = {
        "steps": f"{m['step'][-1]:,} in {len(m['step'])} updates, "
        f"{found.steps_per_second:,.0f}/s once started",
        "learner": _shares(found.learner),
    }
    if found.workers:
        rows["workers"] = _shares(found.workers)
        rows["inference"] = (
            f"{_last(m, 'pipeline/inference_ms'):.2f} ms a call of "
            f"{_last(m, 'pipeline/inference_rows'):.1f} rows"
        )
        rows["rollout"] = (
            f"{_last(m, 'pipeline/rollout_steps_per_second'):,.0f} steps/s if it never waited"
        )
        rows["lag"] = (
            f"{_last(m, 'staleness/lag_mean'):.1f} versions, at most "
            f"{_last(m, 'staleness/lag_max'):.0f}; {_last(m, 'staleness/dropped'):.0%} dropped"
        )
        rows["queue"] = f"{_last(m, 'pipeline/queue_depth'):.1f} updates' worth"
    rows["bottleneck"] = _wrap(found.bottleneck)
    rows["change"] = _wrap(found.remedy)
    for number, finding in enumerate(found.findings, 1):
        text = f"{finding.symptom}\n{finding.cause}\n-> {finding.remedy}"
        rows[f"also ({number})"] = "\n".join(map(_wrap, text.split("\n")))
    return format_summary(f"{run.config.algo} on {run.config.env}: {run.path}", rows)


def _shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{stage} {share:.0%}" for stage, share in shares.items())


def _last(metrics: Mapping[str, np.ndarray], name: str) -> float:
    """Mean of the last half."""
    values = metrics[name]
    half = values[len(values) // 2 :]
    return float(sum(half) / len(half))


def _wrap(text: str) -> str:
    return "\n".join(textwrap.wrap(text, _WIDTH))


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=PROG,
        description="Say where the time of a run goes, and what to change.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="Run directory.")
    parser.add_argument(
        "--picture", metavar="FILE", help=f"PNG to write (default: {PICTURE} in the run directory)."
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 0, or 2 after one line about what is wrong."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        args = build_parser().parse_args(argv)
        run = Run(args.run)
        picture = Path(args.picture) if args.picture else run.path / PICTURE
        print(describe(run, trace(run, picture)))
        timeline = run.path / TRACE_FILE
        if picture.exists():
            print(f"drawn: {picture}")
        if timeline.exists():
            print(f"timeline: {timeline} (open it at https://ui.perfetto.dev)")
        elif run.config.pipeline.mode == "async":
            print("run with --trace for a timeline of all stages")
    except MsrlError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
