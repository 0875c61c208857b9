"""What of an Ascend system is here: CANN, driver, firmware, NPUs, and whether they fit together.

Everything is read from files and from `npu-smi`; nothing is loaded into this process.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

INSTALL_ROOT = Path("/usr/local/Ascend")
"""Where the driver and firmware packages go, and CANN when root installs it."""
NPU_SMI = "npu-smi"
TIMEOUT = 20.0
"""Seconds that a call of npu-smi may take; it hangs where the driver does."""

FITS, CLASHES, UNKNOWN = "fits", "does not fit", "unknown"
Verdict = tuple[str, str]

# Drivers (Ascend HDK) that the release notes of a CANN version list, by prefixes of both versions;
# 8.0 to 8.3: the pairs in MindSpore Transformers' and MindIE's installation guides.
_DRIVERS: Mapping[str, tuple[str, ...]] = {
    "8.0.RC2": ("24.1.RC2",),
    "8.0.RC3": ("24.1.RC3",),
    "8.0.0": ("24.1.0",),
    "8.1.RC1": ("25.0.RC1",),
    "8.2.RC1": ("25.2.0", "25.0.RC1", "24.1.0", "24.1.RC3", "24.1.RC2"),
    "8.3.RC1": ("25.3.RC1",),
    "8.5": ("25.0", "25.2", "25.3", "25.5", "25.7", "26.0", "26.1", "26.2"),
    "9.0": ("25.0", "25.2", "25.3", "25.5", "25.7", "26.0", "26.1", "26.2"),
    "9.1": ("25.2", "25.3", "25.5", "25.7", "26.0", "26.1", "26.2"),
    "9.2": ("25.3", "25.5", "25.7", "26.0", "26.1", "26.2"),
}
# Drivers that the same notes rule out.
_EXCLUDED: Mapping[str, tuple[str, ...]] = {"9.1": ("25.0",), "9.2": ("25.0", "25.2")}

# CANN versions that a MindSpore release accepts: 2.10 checks them itself when it is imported, 2.9
# is the pair in MindSpore Transformers' installation guide.
_CANN: Mapping[str, tuple[str, ...]] = {
    "2.10": ("8.2", "8.3", "8.5", "9.0", "9.1"),
    "2.9": ("9.0",),
}


@dataclass(frozen=True)
class Npu:
    """One chip, as `npu-smi info` lists it."""

    npu: int
    chip: int
    name: str
    """For example 310P3 or 910B4."""
    health: str
    """OK, Warning, Alarm, Critical or UNKNOWN."""
    bus_id: str


@dataclass(frozen=True)
class NpuSmi:
    """What npu-smi says."""

    driver: str | None
    npus: tuple[Npu, ...]
    problem: str | None
    """Why there is no list; None where it was read."""


def parse_npu_smi(text: str) -> NpuSmi:
    """Read the output of `npu-smi info`.

    Each chip has a line "NPU Name | Health | ..." and a line "Chip ... | Bus-Id | ..."; the table
    of processes that follows is not read.
    """
    version = re.search(r"\bVersion:\s*(\S+)", text)
    npus: list[Npu] = []
    pending: tuple[int, str, str] | None = None
    for line in text.splitlines():
        if "Process id" in line:
            break
        cells = [cell.split() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 3 or not cells[0] or not cells[1] or not cells[0][0].isdigit():
            continue
        number, middle = int(cells[0][0]), cells[1][0]
        if re.fullmatch(r"[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d|NA", middle):
            if pending is not None:
                npu, name, health = pending
                npus.append(Npu(npu, number, name, health, middle))
            pending = None
        elif len(cells[0]) == 2:
            pending = (number, cells[0][1], middle)
    problem = None if npus else _no_list(text)
    return NpuSmi(version.group(1) if version else None, tuple(npus), problem)


def query_npus(npu_smi: str = NPU_SMI) -> NpuSmi:
    """The chips that `npu-smi info` lists."""
    found, text = _run([npu_smi, "info"])
    return parse_npu_smi(text) if found else NpuSmi(None, (), text)


def parse_board(text: str) -> dict[str, str]:
    """Read the "key : value" lines of `npu-smi info -t board -i ID`."""
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def query_board(npu: int, npu_smi: str = NPU_SMI) -> dict[str, str]:
    """Software Version (driver), Firmware Version and Compatibility of one NPU; {} on failure."""
    found, text = _run([npu_smi, "info", "-t", "board", "-i", str(npu)])
    return parse_board(text) if found else {}


def visible_ids(value: str | None) -> tuple[int, ...] | None:
    """Logical devices that ASCEND_RT_VISIBLE_DEVICES leaves to a process; None for all.

    CANN reads the ids, separated by commas, up to the first other character.
    """
    if value is None:
        return None
    ids = re.match(r"(\d+(,\d+)*)?", value)
    return tuple(int(i) for i in ids.group(0).split(",")) if ids and ids.group(0) else ()


def find_cann(environ: Mapping[str, str] | None = None) -> Path | None:
    """Folder of the CANN toolkit: from the environment that set_env.sh makes, or the usual places.

    Returns:
        The folder that holds `bin` or `compiler`; None without one.
    """
    environ = os.environ if environ is None else environ
    named = [environ.get(name) for name in ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")]
    homes = [INSTALL_ROOT, Path(environ.get("HOME", "/")) / "Ascend"]
    usual = [home / place for home in homes for place in ("ascend-toolkit/latest", "cann")]
    for folder in [*(Path(n) for n in named if n), *usual]:
        if folder.is_dir():
            return folder
    return None


def cann_version(toolkit: Path) -> str | None:
    """Version of a CANN toolkit, for example 8.0.0 or 8.2.RC1; None where no file tells it."""
    candidates = [
        *sorted(toolkit.glob("*-linux/ascend_toolkit_install.info")),
        toolkit / "ascend_toolkit_install.info",
        toolkit / "compiler" / "version.info",
        toolkit / "version.info",
    ]
    return next((v for v in map(read_version, candidates) if v), None)


def installed_version(package: str) -> str | None:
    """Version of the installed "driver" or "firmware" package; None without one."""
    return read_version(INSTALL_ROOT / package / "version.info")


def read_version(file: Path) -> str | None:
    """The value of the line "Version=..." or "version=..." of an Ascend package's file."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"^\s*version\s*=\s*\[?([\w.]+)", text, re.IGNORECASE | re.MULTILINE)
    return found.group(1) if found else None


def driver_fits(cann: str, driver: str) -> Verdict:
    """Whether a driver serves a CANN version, and where that is from."""
    return _fit(cann, driver, _DRIVERS, _EXCLUDED, f"CANN {cann}", "driver")


def mindspore_fits(mindspore: str, cann: str) -> Verdict:
    """Whether a CANN version serves a MindSpore release, and where that is from."""
    return _fit(mindspore, cann, _CANN, {}, f"MindSpore {mindspore}", "CANN")


def soc_version(npus: Sequence[Npu]) -> str | None:
    """ATC's name of the chips, "Ascend" and the name of npu-smi; None where they differ or hide it.

    A3 products are listed as Ascend910 only: their name is made of two fields of
    `npu-smi info -t board -i ID -c CHIP`.
    """
    names = {n.name for n in npus}
    if len(names) != 1:
        return None
    name = names.pop()
    return None if name.startswith("Ascend") else f"Ascend{name}"


def _fit(
    version: str,
    other: str,
    table: Mapping[str, tuple[str, ...]],
    excluded: Mapping[str, tuple[str, ...]],
    who: str,
    what: str,
) -> Verdict:
    key = next((k for k in table if _starts(version, k)), None)
    if key is None:
        return UNKNOWN, f"no table lists {who}"
    listed = ", ".join(table[key])
    if any(_starts(other, prefix) for prefix in table[key]):
        return FITS, f"{who} is listed with {what} {listed}"
    if any(_starts(other, prefix) for prefix in excluded.get(key, ())):
        return CLASHES, f"{who} needs {what} {listed}"
    return UNKNOWN, f"{who} is listed with {what} {listed}, not with {other}"


def _starts(version: str, prefix: str) -> bool:
    """Whether the dotted parts of `prefix` are the first ones of `version`."""
    parts, wanted = (v.lower().split(".") for v in (version, prefix))
    return parts[: len(wanted)] == wanted


def _run(command: Sequence[str]) -> tuple[bool, str]:
    """Whether the command succeeded, and its output or what went wrong."""
    if shutil.which(command[0]) is None:
        return False, f"{command[0]} is not installed: it comes with the NPU driver"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return False, f"{command[0]} did not answer within {TIMEOUT:.0f} s: the driver hangs"
    except OSError as error:
        return False, f"{command[0]} cannot be run ({error.strerror})"
    if done.returncode != 0:
        said = " ".join((done.stdout + done.stderr).split())[:200]
        return False, f"{' '.join(command)} failed with status {done.returncode}: {said}"
    return True, done.stdout


def _no_list(text: str) -> str:
    said = " ".join(text.split())[:120]
    return f"npu-smi listed no NPU ({said or 'no output'})"
