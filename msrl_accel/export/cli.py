"""`msrl-export RUN`: a trained run becomes a bundle that acts as the trained policy does."""

from __future__ import annotations

import argparse
import json
import logging
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from msrl_accel import __version__
from msrl_accel.errors import ConfigError, ExportError, MsrlError
from msrl_accel.export.bundle import MANIFEST, REFERENCE, Bundle, describe_arrays, staged
from msrl_accel.export.manifest import (
    FORMATS,
    KIND,
    SCHEMA,
    arrays_digest,
    describe_graph,
    file_entry,
    parse,
)
from msrl_accel.export.names import input_names
from msrl_accel.files import write_bytes_synced
from msrl_accel.progress import format_summary
from msrl_accel.run import Run, WhichCheckpoint

if TYPE_CHECKING:
    from msrl_accel.policy import Policy

PROG = "msrl-export"
PRECISIONS = ("origin", "auto")
_PACKAGES = ("mindspore", "numpy", "onnx", "onnxruntime", "gymnasium")


class GateError(ExportError):
    """An exported form does not act as the training graph does."""


def export_run(
    run: Run | str | Path,
    out: str | Path | None = None,
    *,
    formats: Sequence[str] = FORMATS,
    checkpoint: WhichCheckpoint = "last",
    gate: bool = True,
    precision: str = "origin",
    force: bool = False,
) -> Bundle:
    """Write a bundle of a run's policy.

    Args:
        run: a run or its directory.
        out: folder to write; by default `bundle` in the run's directory.
        formats: of 'mindir', 'onnx', 'lite', 'om'. Only the first is needed everywhere else, and
            is always written.
        checkpoint: 'last', 'best', or a step.
        gate: whether a form that differs from the training graph by more than its tolerance is an
            error; otherwise its failure is recorded.
        precision: of the OM form: a mode of ATC, or 'auto' to measure which one the policy bears.
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
    policy, step = _policy(run, checkpoint)
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


def write_bundle(
    policy: Policy,
    folder: Path,
    *,
    version: int,
    config: dict[str, Any],
    formats: Sequence[str] = FORMATS,
    gate: bool = True,
    precision: str = "origin",
) -> None:
    """Write every file of a bundle into an empty folder, the manifest last.

    Args and errors are those of `export_run`; `config` is the resolved training configuration.
    """
    from msrl_accel.export.gate import check_parity, make_reference
    from msrl_accel.runtime.graph import GraphRuntime

    arrays, graph = policy.arrays(), GraphRuntime(policy, version)
    models, notes = _write_models(policy, folder, formats)
    reference = make_reference(graph, arrays, policy.output_names)
    _write_reference(folder / REFERENCE, reference)
    manifest = {
        "kind": KIND,
        "schema": SCHEMA,
        **describe_graph(policy.spec, input_names(policy.spec), policy.output_names),
        "normalization": _normalization(arrays, config),
        "weights": {"version": version, "sha256": arrays_digest(arrays)},
        "config": config,
        "seed": config["seed"],
        "versions": _versions(),
        "precision": precision,
        "reference": {"file": REFERENCE, "arrays": describe_arrays(reference)},
        "files": {file.name: file_entry(file) for file in sorted(folder.iterdir())},
        "models": models,
        "notes": notes,
        "parity": {"gate": gate, "passed": True, "results": {}},
    }
    results = check_parity(graph, Bundle(folder, manifest, policy.spec), arrays)
    failures = [
        f"{backend}: {problem}" for backend, r in results.items() for problem in r["problems"]
    ]
    if failures and gate:
        raise GateError(
            "the exported policy does not act as the trained one: "
            + "; ".join(failures)
            + ". Nothing was written; --no-gate writes the bundle with this recorded"
        )
    manifest["parity"] = {"gate": gate, "passed": not failures, "results": results}
    data = json.dumps(manifest, indent=2, allow_nan=False).encode() + b"\n"
    parse(data, folder / MANIFEST)
    write_bytes_synced(folder / MANIFEST, data)


def _policy(run: Run, checkpoint: WhichCheckpoint) -> tuple[Policy, int]:
    runtime: Any = run.load_policy(checkpoint).runtime
    return runtime.policy, runtime.version


def _write_models(
    policy: Policy, folder: Path, formats: Sequence[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Write each form; file names by backend, and why a form was left out."""
    from msrl_accel.export.mindir import export_mindir

    models, notes = {"mindir": "policy.mindir"}, {}
    export_mindir(policy, folder / models["mindir"])
    if "onnx" in formats:
        from msrl_accel.export.onnx import export_onnx

        models["onnx"] = "policy.onnx"
        export_onnx(policy, folder / models["onnx"])
    if "lite" in formats:
        notes.update(_write_lite(policy, folder / "policy_lite.mindir"))
        if "lite" not in notes:
            models["lite"] = "policy_lite.mindir"
    if "om" in formats:
        notes["om"] = "this version of msrl_accel cannot write OM files"
    return models, notes


def _write_lite(policy: Policy, target: Path) -> dict[str, str]:
    """Write the file for MindSpore Lite; a note where the graph cannot be written for it."""
    import mindspore

    from msrl_accel.export.lite import LITE_2_0_LEVEL, LiteExportError, write_lite_mindir
    from msrl_accel.export.mindir import export_mindir
    from msrl_accel.runtime import lite

    level = lite.mindir_level(mindspore.__version__) if lite.available()[0] else LITE_2_0_LEVEL
    source = target.with_name("fixed_batch.mindir")
    export_mindir(policy, source, batch=1)
    try:
        write_lite_mindir(source, target, level=level)
    except LiteExportError as error:
        return {"lite": str(error)}
    finally:
        source.unlink()
    return {}


def _write_reference(file: Path, arrays: dict[str, np.ndarray]) -> None:
    with open(file, "xb") as opened:
        np.savez_compressed(opened, **arrays)  # type: ignore[arg-type]


def _normalization(arrays: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, Any] | None:
    """What normalisation the graph holds: (x - mean) * inverse_std, clipped; None for none."""
    statistics = {k: v for k, v in arrays.items() if k.startswith("normalizer.")}
    if not statistics:
        return None
    clip = config["policy"]["observation_clip"]
    return {"in_graph": True, "clip": clip, "sha256": arrays_digest(statistics)}


def _versions() -> dict[str, str]:
    versions = {"msrl_accel": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


class _Parser(argparse.ArgumentParser):
    """Reports mistakes as `ConfigError`, like the command line of training."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(" ".join(message.split()))


def build_parser() -> argparse.ArgumentParser:
    """Command line of the export. Mistakes raise `ConfigError`; ``--help`` prints and exits."""
    parser = _Parser(
        prog=PROG,
        description="Export the policy of a run as a bundle, and prove that it acts the same.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="Run directory.")
    parser.add_argument(
        "--out", metavar="DIR", help="Folder to write (default: `bundle` in the run directory)."
    )
    parser.add_argument(
        "--formats",
        default=",".join(FORMATS),
        metavar="LIST",
        help="Forms to write, separated by commas (default: %(default)s).",
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
        "--force", action="store_true", help="Replace a bundle that is there already."
    )
    parser.add_argument(
        "--precision",
        default="origin",
        metavar="MODE",
        help="Precision of the OM form: a precision_mode_v2 of ATC, or auto (default: origin).",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit status 0, 1 where a form differs, 2 after one line on what is wrong."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        args = build_parser().parse_args(argv)
        bundle = export_run(
            args.run,
            args.out,
            formats=[f.strip() for f in args.formats.split(",") if f.strip()],
            checkpoint=_checkpoint(args.checkpoint),
            gate=not args.no_gate,
            precision=args.precision,
            force=args.force,
        )
        print(summary(bundle))
    except MsrlError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 1 if isinstance(error, GateError) else 2
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted, nothing was written", file=sys.stderr)
        return 130
    return 0 if bundle.passed else 1


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
        rows[backend] = f"{name}, {size / 1024:,.0f} KB, {_verdict(parity['results'][backend])}"
    for backend, note in bundle.manifest["notes"].items():
        rows[backend] = f"left out: {note}"
    rows["check it"] = f"msrl-check {bundle.path}"
    rows["act"] = (
        "from msrl_accel.runtime.load import load_policy\n"
        f"action = load_policy({str(bundle.path)!r}).act(observation)"
    )
    return format_summary(f"Exported {config['algo']} on {config['env']}", rows)


def _verdict(result: dict[str, Any]) -> str:
    if result["passed"] is None:
        return f"not checked ({result['reason']})"
    if not result["passed"]:
        return f"DIFFERS: {'; '.join(result['problems'])}"
    outputs = result["outputs"].values()
    if all(o["bit_equal"] for o in outputs):
        return "bit-equal with the training graph"
    return f"within {max(o['max_abs'] for o in outputs):.1e} of the training graph"


if __name__ == "__main__":
    sys.exit(main())
