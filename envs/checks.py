"""Refuse numbers that would silently ruin training, where they first appear."""

from __future__ import annotations

import numpy as np

from msrl_accel.errors import EnvError


def check_finite(
    env_id: str, step: int, field: str, array: np.ndarray, indices: np.ndarray | None = None
) -> None:
    """Raise EnvError naming the first environment whose row of `array` [N, ...] is not finite.

    `step` counts the steps of the vector environment, 0 at its first reset. `indices` [N] are the
    environments of the rows where those are not all. Integer arrays pass unread.
    """
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return
    first = tuple(np.argwhere(~np.isfinite(array))[0])
    index = first[0] if indices is None else indices[first[0]]
    raise EnvError(
        f"{env_id}: environment {index} returned {field} {array[first]} at step {step}; "
        "observations and rewards must be finite, so repair or clip them in the environment"
    )
