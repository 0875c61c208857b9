"""How much memory and disk there is, and refusing what will not fit before it is allocated."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from msrl_accel.errors import ConfigError

_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes this process can still take: of the machine, or of its container if that is less."""
    import psutil  # type: ignore[import-untyped]

    machine = int(psutil.virtual_memory().available)
    return max(0, min([machine, *_container_rooms()]))


def free_disk(folder: Path) -> int:
    """Bytes free on the file system of a folder that exists."""
    return shutil.disk_usage(folder).free


def refuse_unless_it_fits(
    capacity: int, needed: int, available: int, what: str, remedy: str = ""
) -> None:
    """ConfigError with both numbers and the largest capacity that fits, if it does not.

    Args:
        capacity: transitions that take `needed` bytes.
        what: what is short, as the message names it.
        remedy: what else can be done, the end of the message.
    """
    if needed > available:
        raise ConfigError(
            f"capacity = {capacity}: the replay needs {format_bytes(needed)} of {what}, "
            f"{format_bytes(available)} are available: lower it to at most "
            f"{int(capacity * (available / needed))}{remedy}"
        )


def format_bytes(count: float) -> str:
    """'12.3 GB', decimal units."""
    if count < 1000:
        return f"{count:.0f} bytes"
    power = min(int(math.log10(count)) // 3, 4)
    return f"{count / 1000**power:.1f} {('', 'kB', 'MB', 'GB', 'TB')[power]}"


def _container_rooms() -> list[int]:
    """What each memory limit of control groups, version 2 and 1, leaves."""
    rooms = []
    for folder, limit, usage, inactive in (
        (_CGROUP, "memory.max", "memory.current", "inactive_file"),
        (
            _CGROUP / "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):
        try:
            most = int((folder / limit).read_text())
            used = int((folder / usage).read_text())
            statistics = dict(
                line.split() for line in (folder / "memory.stat").read_text().splitlines()
            )
            # The kernel drops cached files before it refuses memory.
            rooms.append(most - used + int(statistics.get(inactive, 0)))
        except (OSError, ValueError):
            continue  # no such group, or "max": no limit
    return rooms
