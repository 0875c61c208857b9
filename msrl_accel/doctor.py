"""`msrl-doctor`: what is installed, whether it fits together, and whether each engine works.

Nothing heavy is loaded here: versions come from package metadata and files, and every engine is
tried in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from msrl_accel import __version__, ascend
from msrl_accel.ascend import CLASHES, FITS, Npu, NpuSmi

PROG = "msrl-doctor"
TEST_TIMEOUT = 60.0
"""Seconds for the self-test of one engine: about one to run it, the rest to load it."""
OK, WARN, BAD, NOTE = "ok", "warning", "problem", "note"
TRAINING = "graph"
DEPLOYMENT = ("onnx", "lite", "om")

_PACKAGES = (
    ("mindspore", "MindSpore", "pip install 'mindspore>=2.9,<2.11'"),
    ("numpy", "NumPy", "pip install numpy"),
    ("gymnasium", "Gymnasium", "pip install gymnasium"),
    ("onnxruntime", "onnxruntime", "pip install 'msrl_accel[onnx]'"),
    ("onnx", "onnx", "pip install 'msrl_accel[onnx]'"),
)
_CANN_INSTALL = "install the CANN toolkit and the operator package of the chip; source set_env.sh"
_DRIVER_INSTALL = "install the NPU driver, then the firmware of the same Ascend HDK, and reboot"


@dataclass(frozen=True)
class Row:
    """One line of the report."""

    section: str
    """'versions', 'compatibility', 'devices', 'engines' or 'self-tests'."""
    name: str
    status: str
    """'ok', 'warning', 'problem', or 'note' for what only some need."""
    value: str
    remedy: str | None = None
    """Command or step that mends or adds it."""


@dataclass
class Report:
    """What the doctor found."""

    rows: list[Row] = field(default_factory=list)
    npus: list[Npu] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether training and at least one deployment engine passed their self-tests."""
        passed = {r.name for r in self.rows if r.section == "self-tests" and r.status == OK}
        return TRAINING in passed and bool(passed.intersection(DEPLOYMENT))

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "ok": self.ok,
            "msrl_accel": __version__,
            "rows": [asdict(r) for r in self.rows],
            "npus": [asdict(n) for n in self.npus],
        }

    def __str__(self) -> str:
        width = max(len(r.name) for r in self.rows)
        lines, section = [f"msrl_accel {__version__}"], None
        for row in self.rows:
            if row.section != section:
                section = row.section
                lines += ["", section.capitalize()]
            lines.append(f"  {row.status:<8} {row.name:<{width}}  {row.value}")
            if row.remedy and row.status != OK:
                lines.append(f"  {'':<8} {'':<{width}}  -> {row.remedy}")
        return "\n".join([*lines, "", _verdict(self)])


def diagnose(*, run_tests: bool = True, environ: Mapping[str, str] | None = None) -> Report:
    """Look at this machine.

    Args:
        run_tests: whether the engines are tried (some seconds each).
        environ: None for that of this process.
    """
    environ = os.environ if environ is None else environ
    smi, report = ascend.query_npus(), Report()
    report.npus = list(smi.npus)
    report.rows += _python_rows()
    report.rows += _ascend_rows(smi, environ)
    report.rows += _device_rows(smi, environ)
    usable = _engine_rows(report)
    if run_tests:
        report.rows += [_test_row(engine) for engine in _to_test(usable)]
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 0 where training and at least one deployment engine work, otherwise 1."""
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--no-tests", action="store_true", help="do not try the engines")
    args = parser.parse_args(argv)
    report = diagnose(run_tests=not args.no_tests)
    print(json.dumps(report.to_dict(), indent=2) if args.json else report)
    return 0 if report.ok else 1


def _python_rows() -> list[Row]:
    version = platform.python_version()
    fits = (3, 9) <= sys.version_info[:2] <= (3, 12)
    rows = [
        Row(
            "versions",
            "Python",
            OK if fits else BAD,
            f"{version} ({platform.machine()})",
            None if fits else "use Python 3.9 to 3.12",
        )
    ]
    for package, name, command in _PACKAGES:
        found = package_version(package)
        missing = NOTE if package in ("onnx", "onnxruntime") else BAD
        status = missing if found is None else OK
        rows.append(Row("versions", name, status, found or "not installed", command))
    return [*rows, _lite_row()]


def _lite_row() -> Row:
    from msrl_accel.runtime import lite_setup

    found, message = lite_setup.available()
    remedy = None if found else lite_setup.SETUP_COMMAND
    return Row("versions", "MindSpore Lite", OK if found else NOTE, message, remedy)


def package_version(package: str) -> str | None:
    """Version of an installed Python package; None without one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _ascend_rows(smi: NpuSmi, environ: Mapping[str, str]) -> list[Row]:
    """CANN, driver and firmware, and whether they fit; notes where this is no Ascend machine."""
    toolkit = ascend.find_cann(environ)
    cann = ascend.cann_version(toolkit) if toolkit else None
    driver = smi.driver or ascend.installed_version("driver")
    firmware = ascend.installed_version("firmware")
    wanted = WARN if driver or toolkit else NOTE
    driver_remedy = _DRIVER_INSTALL if driver or firmware or toolkit else None
    found = "installed, its version is in no file" if toolkit else "not installed"
    rows = [
        Row("versions", "CANN", OK if cann else wanted, cann or found, _CANN_INSTALL),
        Row("versions", "driver", OK if driver else NOTE, driver or "none", driver_remedy),
        Row("versions", "firmware", OK if firmware else NOTE, firmware or "none", driver_remedy),
    ]
    if cann and driver:
        rows.append(_fit_row("CANN and driver", ascend.driver_fits(cann, driver), _DRIVER_INSTALL))
    mindspore = package_version("mindspore")
    if cann and mindspore:
        verdict = ascend.mindspore_fits(mindspore, cann)
        rows.append(_fit_row("MindSpore and CANN", verdict, "install a CANN that is listed"))
    if smi.npus:
        rows.append(_board_row(ascend.query_board(smi.npus[0].npu)))
    return rows


def _fit_row(name: str, verdict: ascend.Verdict, remedy: str) -> Row:
    state, why = verdict
    status = {FITS: OK, CLASHES: BAD}.get(state, WARN)
    return Row("compatibility", name, status, f"{state}: {why}", remedy)


def _board_row(board: Mapping[str, str]) -> Row:
    """Driver and firmware, as the driver itself judges them."""
    verdict = board.get("Compatibility", "not told")
    pair = f"{board.get('Software Version', '?')} and {board.get('Firmware Version', '?')}"
    status = {"OK": OK, "NOK": BAD}.get(verdict, WARN)
    return Row(
        "compatibility",
        "driver and firmware",
        status,
        f"npu-smi says {verdict} of {pair}",
        _DRIVER_INSTALL,
    )


def _device_rows(smi: NpuSmi, environ: Mapping[str, str]) -> list[Row]:
    if not smi.npus:
        installed = ascend.installed_version("driver") is not None
        row = Row("devices", "NPU", BAD if installed else NOTE, smi.problem or "none")
        if not installed:
            return [row]
        remedy = (
            "device not found at start: driver and firmware do not match; compare `npu-smi info -t "
            "board -i 0` with the CANN release notes and reinstall the firmware"
        )
        return [Row(row.section, row.name, row.status, row.value, remedy)]
    rows = [
        Row(
            "devices",
            f"NPU {n.npu} chip {n.chip}",
            OK if n.health == "OK" else WARN,
            f"{n.name}, health {n.health}, {n.bus_id}",
            f"see `npu-smi info -t health -i {n.npu}`",
        )
        for n in smi.npus
    ]
    name = "ASCEND_RT_VISIBLE_DEVICES"
    visible = ascend.visible_ids(environ.get(name))
    if visible is not None:
        hidden = [i for i in visible if i >= len(smi.npus)]
        status = BAD if hidden or not visible else OK
        value = f"{environ[name]!r} leaves devices {list(visible)}"
        remedy = f"list ids from 0 to {len(smi.npus) - 1}, with commas and without spaces"
        rows.append(Row("devices", name, status, value, remedy))
    return rows


def _engine_rows(report: Report) -> dict[str, bool]:
    """Add what `load_policy` can use here; which engines those are."""
    from msrl_accel.runtime.load import available_backends

    usable = {}
    for engine, (works, reason) in available_backends().items():
        usable[engine] = works
        report.rows.append(Row("engines", engine, OK if works else NOTE, reason))
    return usable


def _to_test(usable: Mapping[str, bool]) -> list[str]:
    from msrl_accel.selftest import TESTS

    return [engine for engine in TESTS if usable.get(engine)]


def _test_row(engine: str) -> Row:
    status, value = run_test([sys.executable, "-m", "msrl_accel.selftest", engine])
    remedy = None if status == OK else f"run `python -m msrl_accel.selftest {engine}` for more"
    return Row("self-tests", engine, status, value, remedy)


def run_test(command: Sequence[str], timeout: float = TEST_TIMEOUT) -> tuple[str, str]:
    """Run a self-test in a process of its own; its status and what it says."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return BAD, f"did not end within {timeout:.0f} s"
    except OSError as error:
        return BAD, f"cannot be run: {error.strerror}"
    if done.returncode < 0:
        return BAD, f"crashed ({signal.strsignal(-done.returncode) or done.returncode})"
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return (OK if done.returncode == 0 else BAD), said[-1] if said else "said nothing"


def _verdict(report: Report) -> str:
    if report.ok:
        return "Training and deployment work here."
    if not any(r.section == "self-tests" for r in report.rows):
        return "No engine was tried."
    passed = {r.name for r in report.rows if r.section == "self-tests" and r.status == OK}
    missing = [] if TRAINING in passed else ["training (graph)"]
    if not passed.intersection(DEPLOYMENT):
        missing.append(f"deployment (one of {', '.join(DEPLOYMENT)})")
    return f"Does not work here: {' and '.join(missing)}."


if __name__ == "__main__":
    sys.exit(main())
