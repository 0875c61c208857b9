"""`msrl-export RUN`: a trained run becomes a bundle that acts as the trained policy does."""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrl_accel.commandline import CommandParser
from msrl_accel.errors import ConfigError, MsrlError
from msrl_accel.export.bundle import Bundle, describe_parity, staged
from msrl_accel.export.manifest import FORMATS
from msrl_accel.export.write import GateError, write_bundle
from msrl_accel.progress import format_summary
from msrl_accel.run import Run, WhichCheckpoint

if TYPE_CHECKING:
    from msrl_accel.export.lm_bundle import LanguageModelBundle
    from msrl_accel.policy import Policy

PROG = "msrl-export"


def export_run(
    run: Run | str | Path,
    out: str | Path | None = None,
    *,
    formats: Sequence[str] = FORMATS,
    checkpoint: WhichCheckpoint = "last",
    gate: bool = True,
    precision: str = "origin",
    with_critic: bool = False,
    force: bool = False,
) -> Bundle:
    """Write a bundle of a run's policy.

    Args:
        run: a run or its directory.
        out: folder to write; by default `bundle` in the run's directory.
        formats: of 'mindir', 'onnx', 'lite', 'om'. MindIR is always written, ONNX with OM.
        checkpoint: 'last', 'best', or a step.
        gate: whether a form that differs from the training graph by more than its tolerance is an
            error; otherwise its failure is recorded.
        precision: of the OM form: a mode of ATC, or 'auto' to measure which one the policy bears.
        with_critic: whether an actor whose critics value actions (SAC) is exported with them: the
            graph then returns the value of the action taken, the smaller of the twin critics'.
        force: whether a bundle that is there already is replaced.

    Returns:
        The bundle, as `Bundle.open` gives it.

    Raises:
        GateError: a form differs; nothing is written.
        ExportError: a form or the folder cannot be written; nothing is left behind.
        ConfigError, CheckpointError: no run, no such checkpoint, or a bad option.
    """
    run = run if isinstance(run, Run) else Run(run)
    unknown = [f for f in formats if f not in FORMATS]
    if unknown:
        raise ConfigError(f"formats = {unknown[0]!r}: use {', '.join(FORMATS)}")
    target = Path(out) if out is not None else run.path / "bundle"
    policy, step = _policy(run, checkpoint, with_critic)
    precision = _precision(run, policy, precision)
    with staged(target, force=force) as folder:
        write_bundle(
            policy,
            folder,
            version=step,
            config=run.config.to_dict(),
            formats=formats,
            gate=gate,
            precision=precision,
        )
    return Bundle.open(target)


def _policy(run: Run, checkpoint: WhichCheckpoint, with_critic: bool) -> tuple[Policy, int]:
    runtime: Any = run.load_policy(checkpoint, with_critic=with_critic).runtime
    return runtime.policy, runtime.version


def _precision(run: Run, policy: Policy, wanted: str) -> str:
    """A mode of ATC; 'auto' measures which one the policy bears."""
    if wanted == "auto":
        from msrl_accel.consistency import recommend_precision

        return recommend_precision(policy, run=run).recommended
    from msrl_accel.export.atc import PRECISIONS

    if wanted not in PRECISIONS:
        raise ConfigError(f"precision = {wanted!r}: use auto or one of {', '.join(PRECISIONS)}")
    return wanted


def build_parser() -> argparse.ArgumentParser:
    """Command line of the export. Mistakes raise `ConfigError`; ``--help`` prints and exits."""
    parser = CommandParser(
        prog=PROG,
        description="Export the policy or language model of a run as a bundle, and prove that it "
        "does the same.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="Run directory.")
    parser.add_argument(
        "--out", metavar="DIR", help="Folder to write (default: `bundle` in the run directory)."
    )
    parser.add_argument(
        "--formats",
        type=_words,
        metavar="LIST",
        help=f"Forms to write, separated by commas (default: {','.join(FORMATS)}; of a language "
        "model, mindir).",
    )
    parser.add_argument(
        "--checkpoint",
        default="last",
        metavar="last|best|STEP",
        help="Which checkpoint: the newest (default), the one of the best training return, or that "
        "of a step.",
    )
    parser.add_argument(
        "--no-gate",
        action="store_true",
        help="Write the bundle even if a form does not act as the trained policy; the failure is "
        "recorded in its manifest.",
    )
    parser.add_argument(
        "--with-critic",
        action="store_true",
        help="Export the critics of an actor without a value (SAC) too: the graph then returns the "
        "value of the action taken.",
    )
    parser.add_argument(
        "--force", action="store_true", help="Replace a bundle that is there already."
    )
    parser.add_argument(
        "--precision",
        default="origin",
        metavar="MODE",
        help="Precision of the OM form: a precision_mode_v2 of ATC, or auto (default: origin).",
    )
    parser.add_argument(
        "--batch",
        type=_sizes,
        metavar="LIST",
        help="Of a language model: completions side by side, a graph for each (default: 1,8).",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=_sizes,
        metavar="LIST",
        help="Of a language model: longest prompts, graphs for each (default: the run's).",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="Of a language model: longest completion (default: the run's).",
    )
    return parser


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _sizes(text: str) -> list[int]:
    try:
        return [int(word) for word in _words(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 1,8") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit status 0, 1 where a form differs, 2 after one line on what is wrong."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        args = build_parser().parse_args(argv)
        run = Run(args.run)
        if is_language_model_run(run):
            exported = _export_language_model(run, args)
            print(language_model_summary(exported))
            return 0 if exported.passed else 1
        bundle = _export_policy(run, args)
        print(summary(bundle))
    except MsrlError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 1 if isinstance(error, GateError) else 2
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted, nothing was written", file=sys.stderr)
        return 130
    return 0 if bundle.passed else 1


def is_language_model_run(run: Run) -> bool:
    """Whether a run trained a language model."""
    from msrl_accel.algorithms.language_model import LanguageModelConfig

    return isinstance(run.config.algorithm, LanguageModelConfig)


def _export_policy(run: Run, args: argparse.Namespace) -> Bundle:
    for name in ("batch", "prompt_tokens", "max_new_tokens"):
        if getattr(args, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')}: the run trained a policy, not a language model"
            )
    return export_run(
        run,
        args.out,
        formats=FORMATS if args.formats is None else args.formats,
        checkpoint=_checkpoint(args.checkpoint),
        gate=not args.no_gate,
        precision=args.precision,
        with_critic=args.with_critic,
        force=args.force,
    )


def _export_language_model(run: Run, args: argparse.Namespace) -> LanguageModelBundle:
    from msrl_accel.export.language_model import ROWS, export_language_model

    unused = {
        "formats": args.formats not in (None, ["mindir"]),
        "precision": args.precision != "origin",
        "with-critic": args.with_critic,
    }
    for name, given in unused.items():
        if given:
            raise ConfigError(f"--{name}: language models are exported as MindIR, as trained")
    return export_language_model(
        run,
        args.out,
        checkpoint=_checkpoint(args.checkpoint),
        rows=args.batch or ROWS,
        prompt_tokens=args.prompt_tokens or (),
        max_new_tokens=args.max_new_tokens,
        gate=not args.no_gate,
        force=args.force,
    )


def _checkpoint(text: str) -> WhichCheckpoint:
    if text in ("last", "best"):
        return text
    try:
        return int(text.replace(",", "").replace("_", ""))
    except ValueError:
        raise ConfigError(f"--checkpoint {text}: give last, best or a step") from None


def summary(bundle: Bundle) -> str:
    """What was written, how closely it agrees, and what to type next."""
    config, parity = bundle.manifest["config"], bundle.manifest["parity"]
    rows: dict[str, Any] = {"bundle": str(bundle.path), "checkpoint": f"step {bundle.version:,}"}
    for backend, name in bundle.manifest["models"].items():
        size = bundle.manifest["files"][name]["size"]
        rows[backend] = (
            f"{name}, {size / 1024:,.0f} KB, {describe_parity(parity['results'][backend])}"
        )
    for backend, note in bundle.manifest["notes"].items():
        rows[backend] = f"not here: {note}"
    rows["check it"] = f"msrl-check {shlex.quote(str(bundle.path))}"
    rows["act"] = (
        "from msrl_accel.runtime.load import load_policy\n"
        f"action = load_policy({str(bundle.path)!r}).act(observation)"
    )
    return format_summary(f"Exported {config['algo']} on {config['env']}", rows)


def describe_graph_parity(result: Mapping[str, Any]) -> str:
    """How closely the graph of a language model agreed with training, in a few words."""
    if result["problems"]:
        return f"DIFFERS: {'; '.join(result['problems'])}"
    equal = "bit-equal with" if result["bit_equal"] else f"within {result['max_difference']:.1e} of"
    return (
        f"tokens equal, log-probs {equal} generation, "
        f"within {result['training']['max']:.1e} of training"
    )


def language_model_summary(bundle: LanguageModelBundle) -> str:
    """As `summary`, of a language model."""
    config, results = bundle.manifest["config"], bundle.manifest["parity"]["results"]
    rows: dict[str, Any] = {"bundle": str(bundle.path), "checkpoint": f"step {bundle.version:,}"}
    for shape in bundle.shapes:
        size = bundle.manifest["files"][shape.file]["size"]
        verdict = describe_graph_parity(results[shape.file])
        rows[shape.file] = f"{size / 2**20:,.1f} MB, {verdict}"
    rows["check it"] = f"msrl-check {shlex.quote(str(bundle.path))}"
    rows["ask it"] = (
        "from msrl_accel.runtime.language_model import load_language_model\n"
        f"load_language_model({str(bundle.path)!r}).complete(['a prompt'])"
    )
    return format_summary(f"Exported {config['algo']} on {config['env']}", rows)


if __name__ == "__main__":
    sys.exit(main())
