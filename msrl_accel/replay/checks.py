"""Refusing what must not enter a replay. Fast: it runs at every environment step."""

from __future__ import annotations

from typing import Any

import numpy as np

from msrl_accel.errors import ReplayError
from msrl_accel.spaces import PolicySpec

LARGEST = float(np.finfo(np.float32).max)
"""What is beyond it is stored as infinite."""


class StepChecker:
    """Checks the arguments of `Replay.add`, one step of `n_envs` environments."""

    def __init__(self, spec: PolicySpec, n_envs: int) -> None:
        action = spec.action
        self._n_observations = len(spec.observations)
        arguments: list[tuple[str, tuple[int, ...], str]] = [
            *((f"observation {o.name!r}", o.shape, o.dtype) for o in spec.observations),
            ("actions", action.raw_shape, action.raw_dtype),
            ("rewards", (), "float64"),
            *((f"next observation {o.name!r}", o.shape, o.dtype) for o in spec.observations),
            ("terminated", (), "bool"),
            ("truncated", (), "bool"),
            ("valid", (), "bool"),
        ]
        self._expected = [
            (name, (n_envs, *shape), np.dtype(dtype)) for name, shape, dtype in arguments
        ]

    def check(self, *arrays: np.ndarray) -> None:
        """Arguments in the order of `add`, observations one by one.

        Raises:
            ReplayError: a shape differs, or a dtype cannot be stored.
        """
        if len(arrays) != len(self._expected):
            raise ReplayError(
                f"the replay stores {self._n_observations} observation entries: give as many "
                "observations and next_observations"
            )
        for (name, shape, dtype), x in zip(self._expected, arrays):
            if x.shape != shape or not _fits(x.dtype, dtype):
                raise ReplayError(
                    f"{name}: {x.dtype} of shape {x.shape} does not fit this replay, which stores "
                    f"{dtype} of shape {shape}"
                )


def check_finite(name: str, values: np.ndarray, environments: np.ndarray) -> None:
    """Refuse [n, ...] values of these environments [n] that float32 cannot hold.

    Raises:
        ReplayError: names the first one.
    """
    if np.vdot(values, values) < LARGEST:  # the fastest test that lets nothing else through
        return
    finite = np.abs(values) <= LARGEST
    if finite.all():
        return
    row = int(np.flatnonzero(~finite.reshape(len(values), -1).all(axis=1))[0])
    raise ReplayError(
        f"{name} = {values[row]} of environment {environments[row]} is not a finite float32: it "
        "would stay in the replay; look for its cause"
    )


def check_indices(indices: np.ndarray, priorities: np.ndarray, entries: int) -> None:
    """Refuse priorities that cannot be told apart to `entries` places.

    Raises:
        ReplayError: the shapes differ, or an index is out of range.
    """
    if indices.shape != priorities.shape:
        raise ReplayError(
            f"priorities have shape {priorities.shape}, their indices {indices.shape}: give one "
            "for each index"
        )
    if indices.size and not 0 <= indices.min() <= indices.max() < entries:
        raise ReplayError(
            f"indices from {indices.min()} to {indices.max()} are not of this replay of {entries} "
            "entries: give those of a batch that it sampled"
        )


def _fits(given: np.dtype[Any], stored: np.dtype[Any]) -> bool:
    return given == stored or np.can_cast(given, stored, "same_kind")
