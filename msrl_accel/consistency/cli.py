"""Command line of the checker: `msrl-check BUNDLE`."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msrl_accel.commandline import CommandParser
from msrl_accel.consistency.checker import RECORDED_ROWS, check_consistency
from msrl_accel.consistency.precision import parse_modes
from msrl_accel.consistency.report import ConsistencyReport
from msrl_accel.errors import ConfigError, MsrlError
from msrl_accel.export.lm_bundle import is_language_model

if TYPE_CHECKING:
    from msrl_accel.consistency.lm_report import LanguageModelReport

PROG = "msrl-check"
CONSISTENT, INCONSISTENT, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def build_parser() -> argparse.ArgumentParser:
    """Command line of the checker. Mistakes raise `ConfigError`; ``--help`` prints and exits."""
    parser = CommandParser(
        prog=PROG,
        description="Check that every exported form of a policy acts as the trained one does, or "
        "that the graphs of a language model generate as it does.",
        epilog="Exit status: 0 consistent, 1 not consistent, 2 bad input.",
        allow_abbrev=False,
    )
    parser.add_argument("bundle", metavar="BUNDLE", help="Folder that msrl-export wrote.")
    parser.add_argument(
        "--run", metavar="RUN", help="The run it is from: its policy is then the baseline."
    )
    parser.add_argument(
        "--backends",
        metavar="NAMES",
        type=_names,
        help="Of mindir, onnx, lite, om, separated by commas (default: all that can run here).",
    )
    parser.add_argument(
        "--episodes",
        type=_count,
        default=0,
        help="Whole episodes to play with each form, and as many sampled (default %(default)s).",
    )
    parser.add_argument(
        "--rows",
        type=_count,
        default=RECORDED_ROWS,
        help="Observations to record in the environment (default %(default)s).",
    )
    parser.add_argument(
        "--precision",
        metavar="MODES",
        type=parse_modes,
        default=(),
        help="Rehearse lower precisions, such as fp16,bf16,int8-weights, and recommend one.",
    )
    parser.add_argument(
        "--drift", action="store_true", help="Also check that small damage to a form is seen."
    )
    parser.add_argument(
        "--batch-invariance",
        action="store_true",
        help="Also check that results with batch_invariant=True do not depend on the batch.",
    )
    parser.add_argument("--seed", type=_count, default=0, help="Of everything random (default 0).")
    parser.add_argument("--json", action="store_true", help="Print the report as JSON.")
    parser.add_argument(
        "--plot", metavar="FILE", type=Path, help="Write the differences as a PNG figure."
    )
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (word.strip() for word in text.split(","))))


def _count(text: str) -> int:
    value = int(text.replace(",", ""))
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        args = build_parser().parse_args(argv)
        _check_plot(args.plot)
        report = _check(args)
        print(json.dumps(report.to_dict(), indent=2) if args.json else report)
        if args.plot is not None and isinstance(report, ConsistencyReport):
            report.save_plot(args.plot)
    except MsrlError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return BAD_INPUT
    except OSError as error:
        print(f"{PROG}: cannot write {args.plot}: {error.strerror or error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return CONSISTENT if report.ok else INCONSISTENT


def _check(args: argparse.Namespace) -> ConsistencyReport | LanguageModelReport:
    if is_language_model(args.bundle):
        return _check_language_model(args)
    return check_consistency(
        args.bundle,
        run=args.run,
        backends=args.backends,
        episodes=args.episodes,
        rows=max(args.rows, 1),
        batch_invariance=args.batch_invariance,
        drift=args.drift,
        precision=args.precision,
        seed=args.seed,
    )


def _check_language_model(args: argparse.Namespace) -> LanguageModelReport:
    """Options that say nothing to a language model are refused."""
    parser = build_parser()
    for name in ("backends", "episodes", "rows", "precision", "batch_invariance", "plot"):
        if getattr(args, name) != parser.get_default(name):
            raise ConfigError(
                f"--{name.replace('_', '-')}: {args.bundle} holds a language model, whose check "
                "knows --run and --json alone"
            )
    from msrl_accel.consistency.language_model import check_language_model

    return check_language_model(args.bundle, run=args.run)


def _check_plot(path: Path | None) -> None:
    """Find out before the work whether the figure can be drawn."""
    if path is None:
        return
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--plot needs Matplotlib ({error}): pip install 'msrl_accel[plot]'"
        ) from error
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: the folder {path.parent} does not exist")


if __name__ == "__main__":
    sys.exit(main())
