"""Memory of the host or container: noticed when it runs short, before the system kills."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from pathlib import Path

from msrl_accel.errors import PipelineError

logger = logging.getLogger("msrl_accel")

WATERMARK = 0.9
"""Share of the memory in use from which the pipeline makes itself smaller."""
LAST_MARK = 0.97
"""Share from which the run ends, as long as it still can by itself."""
CHECK_SECONDS = 1.0
_CGROUP = Path("/sys/fs/cgroup")


class MemoryWatch:
    """Looks at the memory in use, at most once a second.

    Args:
        shrink: makes queues smaller; returns what it did, or nothing if they cannot get smaller.
        usage: share of the memory in use, 0 to 1.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        shrink: Callable[[], str],
        usage: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.share = 0.0
        """In use when last looked at."""
        self._shrink = shrink
        self._usage = usage or memory_usage
        self._clock = clock
        self._next = -float("inf")
        self._warned = False

    def check(self) -> None:
        """Collect garbage and shrink queues above the watermark.

        Raises:
            PipelineError: that was not enough.
        """
        if self._clock() < self._next:
            return
        self._next = self._clock() + CHECK_SECONDS
        self.share = self._usage()
        if self.share < WATERMARK:
            self._warned = False
            return
        done = self._shrink()
        if done or not self._warned or self.share >= LAST_MARK:
            gc.collect()
        if done or not self._warned:
            logger.warning(
                "memory: %.0f %% in use (watermark %.0f %%): %s",
                100 * self.share,
                100 * WATERMARK,
                done or "the queues cannot be made smaller",
            )
            self._warned = True
        self.share = self._usage()
        if self.share >= LAST_MARK and not done:
            raise PipelineError(
                f"memory: {100 * self.share:.0f} % in use with queues as small as can be; lower "
                "pipeline.workers, pipeline.envs_per_worker, n_envs or the length of trajectories"
            )


def memory_usage() -> float:
    """Share of the memory in use, of this host or of the container's limit: the larger."""
    import psutil

    host: float = psutil.virtual_memory().percent / 100
    return max(host, container_usage(_CGROUP))


def container_usage(cgroup: Path) -> float:
    """Share of a control group's memory limit in use, pages that can be dropped left out; 0 where
    there is no limit."""
    for limit, current, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):
        try:
            maximum = (cgroup / limit).read_text().strip()
            used = int((cgroup / current).read_text())
            statistics = (cgroup / current).with_name("memory.stat").read_text()
        except (OSError, ValueError):
            continue
        if maximum.isdigit() and 0 < int(maximum) < 1 << 60:
            lines = (line.split() for line in statistics.splitlines())
            droppable = next((int(line[1]) for line in lines if line[0] == cache), 0)
            return (used - droppable) / int(maximum)
    return 0.0
