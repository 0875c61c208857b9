"""What one transition takes: the arrays of a replay, their sizes, and where they live."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from msrl_accel.errors import ConfigError
from msrl_accel.replay.mapped import MappedArrays
from msrl_accel.replay.memory import format_bytes
from msrl_accel.spaces import Observations, PolicySpec


@dataclass(frozen=True)
class Layout:
    """The arrays of a replay: a ring of `rows` entries for each environment.

    Arrays are [rows * n_envs, ...]: entry = row * n_envs + environment.
    """

    spec: PolicySpec
    capacity: int
    """Transitions asked for."""
    n_envs: int
    share_next: bool

    def __post_init__(self) -> None:
        if self.n_envs < 1:
            raise ConfigError(f"n_envs = {self.n_envs}: a replay needs at least 1 environment")
        if self.capacity < self.n_envs:
            raise ConfigError(
                f"capacity = {self.capacity}: a replay holds at least one transition of each of "
                f"its n_envs = {self.n_envs} environments; raise it to {self.n_envs} or more"
            )

    @property
    def rows(self) -> int:
        # Shared: one more, for the observation that follows an environment's newest transition.
        return self.capacity // self.n_envs + self.share_next

    @property
    def entries(self) -> int:
        return self.rows * self.n_envs

    @cached_property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape and dtype of each array."""
        entry: dict[str, tuple[tuple[int, ...], str]] = {}
        for i, o in enumerate(self.spec.observations):
            entry[f"observation_{i}"] = (o.shape, o.dtype)
            if not self.share_next:
                entry[f"next_observation_{i}"] = (o.shape, o.dtype)
        entry["action"] = (self.spec.action.raw_shape, self.spec.action.raw_dtype)
        entry["reward"] = ((), "float32")
        entry["terminated"] = entry["ended"] = ((), "bool")
        return {
            name: ((self.entries, *shape), np.dtype(dtype))
            for name, (shape, dtype) in entry.items()
        }

    @property
    def nbytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.arrays.values())

    def describe(self) -> dict[str, Any]:
        """JSON-able; two layouts with the same description hold the same bytes."""
        return {
            "rows": self.rows,
            "n_envs": self.n_envs,
            "share_next": self.share_next,
            "arrays": {
                name: [dtype.name, *shape[1:]] for name, (shape, dtype) in self.arrays.items()
            },
        }


class Storage:
    """The arrays themselves, in memory, or in files when a folder is given."""

    def __init__(self, layout: Layout, folder: Path | None) -> None:
        self.layout = layout
        self.files = (
            None if folder is None else MappedArrays(folder, layout.arrays, layout.describe())
        )
        self.arrays: Mapping[str, np.ndarray] = (
            _zeros(layout) if self.files is None else self.files.arrays
        )
        columns = range(len(layout.spec.observations))
        a = self.arrays
        self.observations: Observations = tuple(a[f"observation_{i}"] for i in columns)
        self.next_observations: Observations = (
            () if layout.share_next else tuple(a[f"next_observation_{i}"] for i in columns)
        )
        self.actions = a["action"]
        self.rewards = a["reward"]
        self.terminated = a["terminated"]
        self.ended = a["ended"]
        """The episode ended after this transition, for whatever reason."""


def _zeros(layout: Layout) -> dict[str, np.ndarray]:
    try:
        return {name: np.zeros(shape, dtype) for name, (shape, dtype) in layout.arrays.items()}
    except MemoryError as error:
        raise ConfigError(
            f"capacity = {layout.capacity}: the replay needs {format_bytes(layout.nbytes)} of "
            "memory, which the system refuses: lower it, or keep the replay in files (replay_dir)"
        ) from error
