"""A sum tree over arrays: proportional sampling in O(log n), many points in one call."""

from __future__ import annotations

import numpy as np

_TOP = 1024
"""Nodes of the level where a search starts: one `searchsorted` replaces the levels above."""
_DENSE = 4
"""A level with at most this many nodes for each changed one is recomputed as a whole."""
_MAX_PENDING = 4096
"""Calls of `set` whose sums may wait: bounds what is kept of them."""


class SumTree:
    """Non-negative values and their partial sums (Schaul et al. 2016, appendix B.2.1).

    A complete binary tree in one array: node i has the children 2i and 2i + 1, node 1 is the root,
    and the values are the leaves. Each sum is always recomputed from its two children, so nothing
    drifts, and a tree rebuilt from its leaves is the same to the last bit.

    Args:
        size: number of values, all 0 at first.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._n_leaves = self._leaves_for(size)
        self._nodes = np.zeros(2 * self._n_leaves)
        self._pending: list[np.ndarray] = []

    @staticmethod
    def _leaves_for(size: int) -> int:
        return 1 << max(size - 1, 0).bit_length()

    @classmethod
    def predicted_bytes(cls, size: int) -> int:
        return 2 * cls._leaves_for(size) * 8

    @property
    def values(self) -> np.ndarray:
        """All values [size], a view to read."""
        return self._nodes[self._n_leaves : self._n_leaves + self.size]

    def get(self, indices: np.ndarray) -> np.ndarray:
        return self._nodes.take(indices + self._n_leaves)

    def set(self, indices: np.ndarray, values: np.ndarray | float) -> None:
        """Replace values, finite and not negative; of a repeated index the last one counts.

        The sums follow when they are next asked for: adding one value at a time stays cheap.
        """
        leaves = indices + self._n_leaves
        self._nodes[leaves] = values
        self._pending.append(leaves)
        if len(self._pending) > _MAX_PENDING:
            self._refresh()

    @property
    def total(self) -> float:
        self._refresh()
        return float(self._nodes[1])

    def find(self, points: np.ndarray) -> np.ndarray:
        """Index of the value whose interval of the cumulative sum holds each point, [n] -> [n].

        Points lie in [0, total], and total is positive. A value of 0 is never found, whatever
        rounding does.
        """
        self._refresh()
        width = min(_TOP, self._n_leaves)
        top = self._nodes[width : 2 * width]
        cumulative = top.cumsum()
        last = np.searchsorted(cumulative, cumulative[-1])  # the last node that is not 0
        node = np.minimum(np.searchsorted(cumulative, points, side="right"), last)
        rest = np.maximum(points - (cumulative.take(node) - top.take(node)), 0.0)
        node = node + width
        while width < self._n_leaves:
            width *= 2
            left = node * 2
            left_sum = self._nodes.take(left)
            right = (rest >= left_sum) & (self._nodes.take(left + 1) > 0.0)
            rest -= left_sum * right
            node = left + right
        indices: np.ndarray = node - self._n_leaves
        return indices

    def _refresh(self) -> None:
        """Bring the sums above all changed leaves up to date, level by level."""
        if not self._pending:
            return
        changed = self._pending[0] if len(self._pending) == 1 else np.concatenate(self._pending)
        self._pending.clear()
        nodes, width = self._nodes, self._n_leaves
        while width > 1:
            width //= 2
            if width <= _DENSE * len(changed):
                below = nodes[2 * width : 4 * width]
                np.add(below[::2], below[1::2], out=nodes[width : 2 * width])
            else:
                changed = changed >> 1
                left = changed * 2
                nodes[changed] = nodes.take(left) + nodes.take(left + 1)
