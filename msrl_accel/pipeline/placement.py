"""Which cores and devices a process of the pipeline has."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msrl_accel.config import TrainConfig

DEVICE_VARIABLES = ("ASCEND_RT_VISIBLE_DEVICES", "ASCEND_VISIBLE_DEVICES")
"""The CANN runtime reads the first, containers are started with the second."""
WORKER_NICENESS = 1
"""By how much workers give way to a learner they share the cores with."""
_NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True)
class Place:
    """Of one process."""

    cores: tuple[int, ...] = ()
    """Cores it may run on; empty leaves that to the system."""
    niceness: int = 0
    """By how much it gives way to others, 0 to 19."""
    devices: tuple[int, ...] | None = None
    """Ascend devices it may see; None leaves that as it is."""

    def apply(self) -> None:
        """Move the calling process there; what the system does not offer is left out.

        Devices count for a device runtime that starts later.
        """
        if self.cores:
            _pin(self.cores)
        if self.niceness:
            os.nice(self.niceness)
        if self.devices is not None:
            text = ",".join(map(str, self.devices))
            os.environ.update(dict.fromkeys(DEVICE_VARIABLES, text))

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Apply cores and devices while the block runs, then return to those before."""
        cores = usable_cores()
        variables = {name: os.environ.get(name) for name in DEVICE_VARIABLES}
        Place(self.cores, 0, self.devices).apply()
        try:
            yield
        finally:
            if self.cores:
                _pin(cores)
            for name, value in variables.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def places(config: TrainConfig) -> tuple[Place, list[Place]]:
    """Of the learner, and of each worker.

    'separate' gives the learner half of the cores, whole NUMA nodes where there are several, and
    the workers equal parts of the rest; Ascend devices likewise. 'colocated' leaves cores and
    devices to all, and lets the learner go first.
    """
    options = config.pipeline
    workers = range(options.workers)
    if options.placement == "colocated":
        return Place(), [Place(niceness=WORKER_NICENESS) for _ in workers]
    cores, theirs = split(usable_cores(), len(workers), numa_nodes())
    if config.runtime.device != "Ascend":
        return Place(cores), [Place(part) for part in theirs]
    devices, devices_theirs = split(options.devices or visible_devices(), len(workers))
    return (
        Place(cores, devices=devices or None),
        [Place(part, devices=d or None) for part, d in zip(theirs, devices_theirs)],
    )


def together(parts: Sequence[Place]) -> Place:
    """All cores and devices of several places."""
    cores = {core for place in parts for core in place.cores}
    devices = {device for place in parts for device in place.devices or ()}
    return Place(tuple(sorted(cores)), devices=tuple(sorted(devices)) or None)


def split(
    items: Sequence[int], workers: int, nodes: Sequence[frozenset[int]] = ()
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The learner's half of cores or devices, rounded up, and each worker's part of the rest.

    Workers share where there are fewer left than workers; all share a single one.

    Args:
        nodes: groups that belong together; where the items are of several, the learner gets whole
            groups, and a worker's part keeps to one where it can.
    """
    groups = [tuple(i for i in items if i in node) for node in nodes]
    groups = [g for g in groups if g]
    if len(groups) > 1:
        half = (len(groups) + 1) // 2
        learner = tuple(i for g in groups[:half] for i in g)
        rest = tuple(i for g in groups[half:] for i in g)
    else:
        half = (len(items) + 1) // 2
        learner, rest = tuple(items[:half]), tuple(items[half:]) or tuple(items)
    if len(rest) < workers:
        return learner, [rest[i % len(rest) :][:1] if rest else () for i in range(workers)]
    bounds = [i * len(rest) // workers for i in range(workers + 1)]
    return learner, [rest[a:b] for a, b in zip(bounds, bounds[1:])]


def usable_cores() -> tuple[int, ...]:
    """Cores this process may run on; none where the system does not tell."""
    if not hasattr(os, "sched_getaffinity"):
        return ()
    return tuple(sorted(os.sched_getaffinity(0)))


def numa_nodes() -> list[frozenset[int]]:
    """Cores of each NUMA node of this host; none where the system does not tell."""
    files = sorted(_NODES.glob("node[0-9]*/cpulist"), key=lambda f: int(f.parent.name[4:]))
    return [frozenset(parse_cores(file.read_text())) for file in files]


def parse_cores(text: str) -> list[int]:
    """The cores in a list such as 0-3,8."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def visible_devices() -> tuple[int, ...]:
    """Ascend devices that the environment grants; none where it says nothing."""
    for name in DEVICE_VARIABLES:
        if os.environ.get(name):
            return tuple(parse_cores(os.environ[name]))
    return ()


def _pin(cores: Sequence[int]) -> None:
    """Confine all threads of this process, also those that libraries have started."""
    if not hasattr(os, "sched_setaffinity"):
        return
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), cores)
