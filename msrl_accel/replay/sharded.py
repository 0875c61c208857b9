"""Several replay buffers that are sampled as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from msrl_accel.errors import CheckpointError, ConfigError, ReplayError
from msrl_accel.files import PathLike
from msrl_accel.replay.base import Replay, ReplayBatch
from msrl_accel.replay.buffer import ReplayBuffer
from msrl_accel.replay.checks import check_indices
from msrl_accel.replay.memory import available_memory, refuse_unless_it_fits
from msrl_accel.replay.priorities import PrioritySettings
from msrl_accel.spaces import Observations, PolicySpec


class ShardedReplay(Replay):
    """Shards drawn from in proportion to their mass: each transition has the chance it would have
    in one buffer that held them all.

    `add` deals the environments out to the shards in order, the first shard's first; a shard that
    has a source of its own is filled by `shards[i].add`.

    Args:
        shards: of one spec, discount, n_step and kind of sampling.

    Raises:
        ConfigError: there is no shard, or two of them differ.
    """

    def __init__(self, shards: Sequence[ReplayBuffer]) -> None:
        if not shards:
            raise ConfigError("shards: a sharded replay needs at least 1")
        first = shards[0]
        for i, shard in enumerate(shards):
            for name in ("gamma", "n_step", "settings"):
                value, expected = getattr(shard, name), getattr(first, name)
                if value != expected:
                    raise ConfigError(
                        f"shards: shard {i} has {name} = {value}, shard 0 {expected}: "
                        "make them alike"
                    )
            if shard.layout.spec != first.layout.spec:
                raise ConfigError(f"shards: the spec of shard {i} is not that of shard 0")
        self.shards = tuple(shards)
        self.settings = first.settings
        self._offsets = np.cumsum([0, *(s.layout.entries for s in shards)])
        self._columns = np.cumsum([0, *(s.layout.n_envs for s in shards)])

    @classmethod
    def create(
        cls,
        n_shards: int,
        spec: PolicySpec,
        capacity: int,
        n_envs: int,
        *,
        gamma: float,
        n_step: int = 1,
        prioritized: PrioritySettings | None = None,
        folder: PathLike | None = None,
        share_next: bool = False,
    ) -> ShardedReplay:
        """Shards of as equal numbers of environments as possible, `capacity` and `n_envs` in all.

        The other arguments are those of `ReplayBuffer`; files are in a subfolder a shard.
        """
        if not 1 <= n_shards <= n_envs:
            raise ConfigError(
                f"n_shards = {n_shards}: use 1 to n_envs = {n_envs}, one environment or more each"
            )
        sizes = [len(part) for part in np.array_split(np.arange(n_envs), n_shards)]
        rows = capacity // n_envs
        if folder is None and rows:
            # Each alone might fit where all together do not.
            needed = sum(
                ReplayBuffer.predicted_bytes(
                    spec,
                    rows * size,
                    size,
                    prioritized=prioritized is not None,
                    share_next=share_next,
                )
                for size in sizes
            )
            refuse_unless_it_fits(capacity, needed, available_memory(), "memory")
        return cls(
            [
                ReplayBuffer(
                    spec,
                    rows * size,
                    size,
                    gamma=gamma,
                    n_step=n_step,
                    prioritized=prioritized,
                    folder=None if folder is None else Path(folder) / f"shard_{i}",
                    share_next=share_next,
                )
                for i, size in enumerate(sizes)
            ]
        )

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    def add(
        self,
        observations: Observations,
        actions: np.ndarray,
        rewards: np.ndarray,
        next_observations: Observations,
        terminated: np.ndarray,
        truncated: np.ndarray,
        valid: np.ndarray,
    ) -> None:
        n_envs = self._columns[-1]
        if len(valid) != n_envs:
            raise ReplayError(f"valid has {len(valid)} rows: the shards hold {n_envs} environments")
        for shard, start, stop in zip(self.shards, self._columns, self._columns[1:]):
            part = slice(start, stop)
            shard.add(
                tuple(x[part] for x in observations),
                actions[part],
                rewards[part],
                tuple(x[part] for x in next_observations),
                terminated[part],
                truncated[part],
                valid[part],
            )

    def end_episodes(self) -> None:
        for shard in self.shards:
            shard.end_episodes()

    def update_priorities(self, indices: np.ndarray, priorities: np.ndarray) -> None:
        if self.settings is None:
            return
        indices, priorities = np.asarray(indices), np.asarray(priorities)
        check_indices(indices, priorities, int(self._offsets[-1]))
        flat, values = indices.ravel(), priorities.ravel()
        for shard, rows, local in self._by_shard(flat):
            shard.update_priorities(local, values[rows])
        tables = [shard.priorities for shard in self.shards if shard.priorities is not None]
        highest = max(table.highest for table in tables)
        for table in tables:
            table.highest = highest  # new transitions are equal, whatever shard they come to

    @property
    def mass(self) -> float:
        return float(sum(shard.mass for shard in self.shards))

    def find(self, points: np.ndarray) -> np.ndarray:
        masses = np.array([shard.mass for shard in self.shards])
        ends = masses.cumsum()
        last = np.searchsorted(ends, ends[-1])  # the last shard that is not empty
        which = np.minimum(np.searchsorted(ends, points, side="right"), last)
        found = np.empty(len(points), np.int64)
        for i, shard in enumerate(self.shards):
            rows = np.flatnonzero(which == i)
            if len(rows):
                inside = np.clip(points[rows] - (ends[i] - masses[i]), 0.0, masses[i])
                found[rows] = shard.find(inside) + self._offsets[i]
        return found

    def holds(self, indices: np.ndarray) -> np.ndarray:
        held = np.empty(len(indices), bool)
        for shard, rows, local in self._by_shard(indices):
            held[rows] = shard.holds(local)
        return held

    def priorities_at(self, indices: np.ndarray) -> np.ndarray:
        values = np.empty(len(indices))
        for shard, rows, local in self._by_shard(indices):
            values[rows] = shard.priorities_at(local)
        return values

    def gather(self, indices: np.ndarray) -> ReplayBatch:
        parts = [(rows, shard.gather(local)) for shard, rows, local in self._by_shard(indices)]

        def join(arrays: Sequence[np.ndarray]) -> np.ndarray:
            joined = np.empty((len(indices), *arrays[0].shape[1:]), arrays[0].dtype)
            for (rows, _), array in zip(parts, arrays):
                joined[rows] = array
            return joined

        batches = [batch for _, batch in parts]
        entries = range(len(batches[0].observations))
        return ReplayBatch(
            observations=tuple(join([b.observations[i] for b in batches]) for i in entries),
            actions=join([b.actions for b in batches]),
            rewards=join([b.rewards for b in batches]),
            next_observations=tuple(
                join([b.next_observations[i] for b in batches]) for i in entries
            ),
            discounts=join([b.discounts for b in batches]),
            weights=join([b.weights for b in batches]),
            indices=indices,
        )

    def state(self) -> dict[str, Any]:
        return {"shards": [shard.state() for shard in self.shards]}

    def restore(self, state: dict[str, Any]) -> None:
        saved = state.get("shards", ())
        if len(saved) != len(self.shards):
            raise CheckpointError(
                f"the saved replay has {len(saved)} shards, this one {len(self.shards)}: resume "
                "with the configuration of the run"
            )
        for shard, part in zip(self.shards, saved):
            shard.restore(part)

    def close(self) -> None:
        for shard in self.shards:
            shard.close()

    def _by_shard(
        self, indices: np.ndarray
    ) -> Iterator[tuple[ReplayBuffer, np.ndarray, np.ndarray]]:
        """Each shard that has some of the indices, their rows, and the indices within it."""
        which = np.searchsorted(self._offsets, indices, side="right") - 1
        for i, shard in enumerate(self.shards):
            rows = np.flatnonzero(which == i)
            if len(rows):
                yield shard, rows, indices[rows] - self._offsets[i]
