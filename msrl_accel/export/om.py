"""A policy for Ascend devices: ONNX to OM by ATC, here or on a host that has CANN.

Where CANN is missing, `build_om.sh` is written beside the model: it holds the exact commands.
Options and error codes follow CANN's documentation. No OM file of this module has been run on a
device yet: check one there with ``msrl-check BUNDLE --backends om``.

``python -m msrl_accel.export.om build|check|add|explain`` works on a bundle.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msrl_accel import ascend
from msrl_accel.errors import BundleError, ConfigError, ExportError, MsrlError
from msrl_accel.export.atc import (
    LITE_PRECISIONS,
    PRECISIONS,
    OmOptions,
    atc_command,
    converter_lite_command,
    converter_lite_config,
)
from msrl_accel.export.atc_errors import explain
from msrl_accel.export.bundle import MANIFEST, Bundle
from msrl_accel.export.manifest import file_entry
from msrl_accel.export.om_script import SCRIPT, write_build_script
from msrl_accel.export.onnx_check import Finding, check_onnx_for_atc
from msrl_accel.files import write_bytes_atomic
from msrl_accel.spaces import PolicySpec

__all__ = [
    "AtcError",
    "OmOptions",
    "add_om",
    "atc_command",
    "build_om",
    "converter_lite_command",
    "converter_lite_config",
    "export_om",
]

OM_FILE = "policy.om"


class AtcError(ExportError):
    """ATC failed; the message has its words and what to do about each of its error codes."""

    def __init__(self, message: str, codes: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.codes = codes


def find_atc() -> str | None:
    """Path of atc: on PATH, or in the CANN toolkit of the environment or of the usual places."""
    found = shutil.which("atc")
    toolkit = ascend.find_cann()
    if found is None and toolkit is not None:
        places = (toolkit / "bin" / "atc", toolkit / "atc" / "bin" / "atc")
        found = next((str(p) for p in places if os.access(p, os.X_OK)), None)
    return found


def build_om(onnx: Path, target: Path, options: OmOptions, spec: PolicySpec) -> Path:
    """Run ATC on this host.

    Args:
        onnx: the exported model.
        target: the OM file, replaced atomically.
        options: `soc_version` None takes the chip that npu-smi lists.
        spec: the policy's tensors.

    Returns:
        `target`.

    Raises:
        AtcError: ATC failed; its error codes are explained.
        ExportError: there is no ATC, the chip is unknown, or the file cannot be written.
    """
    atc = find_atc()
    if atc is None:
        raise ExportError(
            "atc is not here: install CANN and source its set_env.sh, or run "
            f"{SCRIPT} on a host that has it"
        )
    if options.soc_version is None:
        options = _with_soc(options)
    # ATC leaves kernel_meta and other files in the folder that it is run in.
    with tempfile.TemporaryDirectory() as scratch:
        command = atc_command(Path(onnx).resolve(), Path(scratch) / "policy", options, spec)
        output, status = _run_atc([atc, *command[1:]], scratch, options.timeout)
        built = sorted(Path(scratch).glob("policy*.om"))
        if status != 0 or not built:
            raise _atc_error(output, status)
        try:
            write_bytes_atomic(target, built[0].read_bytes())
        except OSError as error:
            raise ExportError(f"cannot write {target}: {error.strerror}") from error
    return target


def export_om(
    onnx: Path,
    mindir: Path | None,
    folder: Path,
    spec: PolicySpec,
    *,
    precision: str = "origin",
    options: OmOptions | None = None,
) -> dict[str, Any]:
    """The OM form of a bundle: `policy.om` where CANN is here, and `build_om.sh` in any case.

    Args:
        onnx: the bundle's ONNX file.
        mindir: its MindIR file, for the converter_lite route in the script; None without it.
        folder: the bundle.
        spec: the policy's tensors.
        precision: of `PRECISIONS`; `options` has its own.
        options: None for the defaults with `precision`.

    Returns:
        For the manifest: file (name, or None), script (name), command, status ('built' or
        'script'), reason (why it was not built, or None), batches, precision, soc_version, and
        findings (what of the graph is outside ATC's documentation).

    Raises:
        AtcError: ATC is here and refuses the model.
        ExportError, ConfigError: as `atc_command` and `OmOptions`.
    """
    options = options or OmOptions(precision=precision)
    findings = check_onnx_for_atc(onnx)
    errors = [f for f in findings if f.level == "error"]
    if errors:
        raise ExportError(f"ATC cannot take {onnx.name}: {errors[0]}")
    reason = None
    if find_atc() is None:
        reason = f"CANN is not here: run {SCRIPT} on a host that has it"
    elif options.soc_version is None:
        try:
            options = _with_soc(options)
        except ExportError as error:
            reason = str(error)
    if reason is None:
        build_om(onnx, folder / OM_FILE, options, spec)
    _write_script(folder, onnx, mindir, options, spec)
    return {
        "file": OM_FILE if reason is None else None,
        "script": SCRIPT,
        "command": atc_command(onnx.name, Path(OM_FILE).stem, options, spec),
        "status": "built" if reason is None else "script",
        "reason": reason,
        "batches": list(options.batches),
        "precision": options.precision,
        "soc_version": options.soc_version,
        "findings": [str(f) for f in findings],
    }


def add_om(bundle: Path | str, om: Path | str, options: OmOptions | None = None) -> Bundle:
    """Put an OM file that was built elsewhere into its bundle.

    It is recorded as not checked: run msrl-check with the backend om on the device.

    Args:
        bundle: the folder.
        om: the file.
        options: what it was built with; None for what the bundle's script has.

    Raises:
        BundleError: no bundle, or the file cannot be read or is empty.
    """
    opened = Bundle.open(bundle)
    source, target = Path(om), opened.path / OM_FILE
    try:
        data = source.read_bytes()
        if not data:
            raise BundleError(f"{source} is empty: build it again")
        write_bytes_atomic(target, data)
    except OSError as error:
        raise BundleError(f"cannot copy {source} to {target}: {error.strerror}") from error
    manifest = opened.manifest
    manifest["files"][OM_FILE] = file_entry(target)
    manifest["models"]["om"] = OM_FILE
    manifest["notes"].pop("om", None)
    record = manifest.setdefault("om", {})
    record.update(file=OM_FILE, status="added", reason=None)
    if options is not None:
        record.update(
            batches=list(options.batches),
            precision=options.precision,
            soc_version=options.soc_version,
        )
    manifest["parity"].setdefault("results", {})["om"] = {
        "passed": None,
        "reason": f"run `msrl-check {opened.path} --backends om` on the device",
        "problems": [],
        "outputs": {},
    }
    text = json.dumps(manifest, indent=2, allow_nan=False)
    write_bytes_atomic(opened.path / MANIFEST, text.encode() + b"\n")
    return Bundle.open(opened.path)


def _with_soc(options: OmOptions) -> OmOptions:
    npus = ascend.query_npus().npus
    soc = ascend.soc_version(npus)
    if soc is None:
        seen = ", ".join(sorted({n.name for n in npus})) or "none"
        raise ExportError(
            f"the chip to build for is unknown (npu-smi lists: {seen}): give --soc-version"
        )
    return replace(options, soc_version=soc)


def _run_atc(command: Sequence[str], folder: str, timeout: float) -> tuple[str, int]:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ExportError(
            f"atc did not end within {timeout:.0f} s: compile for fewer batch sizes"
        ) from error
    except OSError as error:
        raise ExportError(f"atc cannot be run: {error.strerror}") from error
    return done.stdout, done.returncode


def _atc_error(output: str, status: int) -> AtcError:
    explained = explain(output)
    if not explained:
        last = " ".join(output.split())[-300:] or "it said nothing"
        return AtcError(f"atc failed with status {status}: {last}")
    lines = [f"{line} -> {what}" for _, line, what in explained]
    codes = tuple(code for code, _, _ in explained)
    return AtcError(f"atc failed with status {status}: " + "; ".join(lines), codes)


def _write_script(
    folder: Path, onnx: Path, mindir: Path | None, options: OmOptions, spec: PolicySpec
) -> None:
    lite = None
    if mindir is not None and options.precision in LITE_PRECISIONS:
        config = "policy_ascend.ini"
        lite = (
            converter_lite_command(mindir.name, "policy_ascend", config, options, spec),
            config,
            converter_lite_config(options, spec),
        )
    command = atc_command(onnx.name, Path(OM_FILE).stem, options, spec)
    write_build_script(folder / SCRIPT, onnx, command, lite=lite)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m msrl_accel.export.om", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="run atc here and put the file into the bundle")
    build.add_argument("bundle", type=Path)
    build.add_argument("--soc-version", metavar="NAME", help="for example Ascend310P3")
    build.add_argument("--batches", default="1,8,32,256", metavar="LIST")
    build.add_argument("--precision", default=None, help=f"{', '.join(PRECISIONS)}")
    check = commands.add_parser("check", help="compare the ONNX file with what ATC documents")
    check.add_argument("bundle", type=Path)
    check.add_argument("--cann", default="8.0", metavar="VERSION")
    add = commands.add_parser("add", help="put a policy.om that was built elsewhere into a bundle")
    add.add_argument("bundle", type=Path)
    add.add_argument("om", type=Path)
    log = commands.add_parser("explain", help="what to do about the error codes in a log of atc")
    log.add_argument("log", type=Path)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the exit status: 0, 1 where the check has errors, 2 after one line."""
    args = _parser().parse_args(argv)
    try:
        return int(_COMMANDS[args.command](args))
    except (MsrlError, OSError) as error:
        print(f"python -m msrl_accel.export.om: {error}", file=sys.stderr)
        return 2


def _build(args: argparse.Namespace) -> int:
    bundle = Bundle.open(args.bundle)
    try:
        batches = tuple(int(b) for b in args.batches.split(","))
    except ValueError:
        raise ConfigError(f"--batches {args.batches}: give sizes separated by commas") from None
    precision = args.precision or bundle.manifest.get("om", {}).get("precision", "origin")
    options = OmOptions(soc_version=args.soc_version, batches=batches, precision=precision)
    with tempfile.TemporaryDirectory() as scratch:
        om = build_om(_onnx_of(bundle), Path(scratch) / OM_FILE, options, bundle.spec)
        add_om(bundle.path, om, options)
    print(f"{bundle.path / OM_FILE}: check it on the device with msrl-check --backends om")
    return 0


def _check(args: argparse.Namespace) -> int:
    findings: list[Finding] = check_onnx_for_atc(_onnx_of(Bundle.open(args.bundle)), args.cann)
    print("\n".join(map(str, findings)) or f"nothing against it is documented for CANN {args.cann}")
    return int(any(f.level == "error" for f in findings))


def _add(args: argparse.Namespace) -> int:
    print(add_om(args.bundle, args.om))
    return 0


def _explain(args: argparse.Namespace) -> int:
    found = explain(args.log.read_text(encoding="utf-8", errors="replace"))
    for code, line, what in found:
        print(f"{code}: {what}\n  {line}")
    if not found:
        print("no error code in this log")
    return 0


def _onnx_of(bundle: Bundle) -> Path:
    file = bundle.file("onnx")
    if file is None:
        raise BundleError(f"{bundle.path} has no ONNX file, which atc needs: export it with onnx")
    return file


_COMMANDS = {"build": _build, "check": _check, "add": _add, "explain": _explain}

if __name__ == "__main__":
    sys.exit(main())
