"""What the learner does when, and a word when it is stuck in it."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterator

from msrl_accel.pipeline.timeline import Timeline

logger = logging.getLogger("msrl_accel")


class LearnerStages:
    """Times the stages of one thread, the learner's; a thread of its own warns of long ones.

    A compiled graph cannot be interrupted: all that can be done is to say which one does not end.

    Args:
        timeline: gets a span for each stage.
        limit: seconds in a stage that are worth a warning.
    """

    def __init__(self, timeline: Timeline, limit: float) -> None:
        self.seconds: dict[str, float] = {}
        """Of each stage since `restart`."""
        self._timeline = timeline
        self._limit = limit
        self._learner = threading.get_ident()
        self._now: tuple[str, float] | None = None  # stage, when it began
        self._closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="learner-watch").start()

    def restart(self) -> None:
        """Begin the next update."""
        self.seconds = {}

    @contextlib.contextmanager
    def __call__(self, stage: str, watched: bool = True) -> Iterator[None]:
        """Args: stage: its name. watched: False where it has a deadline of its own."""
        begin = time.monotonic()
        self._now = (stage, begin) if watched else None
        try:
            yield
        finally:
            self._now = None
            end = time.monotonic()
            self.seconds[stage] = self.seconds.get(stage, 0.0) + end - begin
            self._timeline.span("learner", stage, begin, end)

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        warned = None
        while not self._closed.wait(self._limit / 4):
            now = self._now
            if now is None or now == warned or time.monotonic() - now[1] < self._limit:
                continue
            warned = now
            logger.warning(
                "learner: stage %r has taken more than %g s so far; it is at\n%s",
                now[0],
                self._limit,
                _where(self._learner),
            )


def _where(thread: int) -> str:
    """Innermost calls of a thread. The frame is let go of: it holds what its function does."""
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)[-3:]) if frame else ""
