"""The processes that train together, and what they tell each other on the host."""

from __future__ import annotations

import numpy as np


class World:
    """All processes of a data-parallel run; this class is one process alone.

    Every method but `gather` on a world of one is a collective: all processes call it, in the same
    order, with arrays of the same shape.
    """

    rank = 0
    size = 1

    def gather(self, x: np.ndarray) -> np.ndarray:
        """Everybody's numbers, float64 [size, *x.shape], in order of rank."""
        return np.asarray(x, np.float64)[None]

    def sum(self, x: np.ndarray) -> np.ndarray:
        """Sum over the processes, float64; the same bits everywhere."""
        total: np.ndarray = self.gather(x).sum(axis=0)
        return total

    def max(self, x: int) -> int:
        """The largest of everybody's numbers."""
        return int(self.gather(np.array([x])).max())


ALONE = World()
_current = ALONE


def world() -> World:
    """The processes this one trains with; `ALONE` unless it has joined others."""
    return _current


def enter(joined: World) -> World:
    """Make a world the current one of this process; returns the one before."""
    global _current
    before, _current = _current, joined
    return before
