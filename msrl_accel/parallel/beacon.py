"""What each process of a data-parallel run tells its launcher, in a small file of its own.

A process that dies or hangs leaves the others waiting in a collective, which raises nothing; only
somebody outside can tell, and this is what he looks at.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from msrl_accel.files import write_text_atomic

FOLDER_VARIABLE = "MSRL_PARALLEL_BEACONS"


@dataclass(frozen=True)
class Sign:
    """The last word of one process."""

    rank: int
    pid: int
    stage: str
    iteration: float
    time: float
    """Monotonic seconds of this host."""
    status: int | None
    """Exit status, once the process has done all it had to."""


class Beacon:
    """The writing end.

    Args:
        folder: where the launcher looks; None writes nothing.
        rank: of this process.
    """

    def __init__(self, folder: str | Path | None, rank: int = 0) -> None:
        self.file = None if folder is None else Path(folder) / f"{rank}.json"
        self.rank = rank

    def beat(self, stage: str, iteration: float, status: int | None = None) -> None:
        """Enter a stage."""
        if self.file is None:
            return
        sign = Sign(self.rank, os.getpid(), stage, iteration, time.monotonic(), status)
        write_text_atomic(self.file, json.dumps(vars(sign)))


def read_signs(folder: Path) -> list[Sign]:
    """Of all processes that have given one, by rank."""
    signs = []
    for file in sorted(folder.glob("*.json"), key=lambda f: int(f.stem)):
        signs.append(Sign(**json.loads(file.read_text())))
    return signs


def alive(pid: int) -> bool:
    """Whether a process of this host runs, or is stopped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
