"""Which cores and devices a process of the pipeline has."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msrl_accel.config import PipelineConfig


@dataclass(frozen=True)
class Place:
    """Of one process."""

    cores: tuple[int, ...] = ()
    """Cores it may run on; empty leaves that to the system."""
    niceness: int = 0
    """By how much it gives way to others, 0 to 19."""
    devices: str | None = None
    """Value of ASCEND_VISIBLE_DEVICES; None leaves the variable as it is."""

    def apply(self) -> None:
        """Move the calling process there; what the system does not offer is left out."""
        if self.cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self.cores)
        if self.niceness:
            os.nice(self.niceness)
        if self.devices is not None:
            os.environ["ASCEND_VISIBLE_DEVICES"] = self.devices


def learner_place(options: PipelineConfig) -> Place:
    """Of the learner: half of the cores, rounded up, where the placement is 'separate'."""
    if options.placement == "colocated":
        return Place()
    cores = _cores()
    return Place(cores[: _learner_cores(cores)])


def worker_place(options: PipelineConfig, index: int) -> Place:
    """Of a worker: one of the cores the learner leaves, or any, giving way to the learner."""
    if options.placement == "colocated":
        return Place(niceness=1)
    cores = _cores()
    rest = cores[_learner_cores(cores) :] or cores
    return Place((rest[index % len(rest)],))


def _cores() -> tuple[int, ...]:
    if not hasattr(os, "sched_getaffinity"):
        return ()
    return tuple(sorted(os.sched_getaffinity(0)))


def _learner_cores(cores: tuple[int, ...]) -> int:
    return (len(cores) + 1) // 2
