"""Refuse numbers that would silently ruin training, where they first appear."""

from __future__ import annotations

import numpy as np

from msrl_accel.errors import EnvError


def check_finite(env_id: str, step: int, field: str, array: np.ndarray) -> None:
    """Raise EnvError naming the first environment whose row of `array` [N, ...] is not finite.

    `step` counts the steps of the vector environment, 0 at its first reset. Integer arrays pass
    unread.
    """
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return
    first = tuple(np.argwhere(~np.isfinite(array))[0])
    raise EnvError(
        f"{env_id}: environment {first[0]} returned {field} {array[first]} at step {step}; "
        "observations and rewards must be finite, so repair or clip them in the environment"
    )
