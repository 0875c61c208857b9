"""Replay of one set of environments: uniform or prioritised, n-step, in memory or in files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Union

import numpy as np

from msrl_accel.errors import CheckpointError, ConfigError
from msrl_accel.files import PathLike
from msrl_accel.replay.base import Replay, ReplayBatch
from msrl_accel.replay.checks import StepChecker, check_finite, check_indices
from msrl_accel.replay.mapped import DESCRIPTION_FILE
from msrl_accel.replay.memory import available_memory, free_disk, refuse_unless_it_fits
from msrl_accel.replay.n_step import n_step_returns
from msrl_accel.replay.priorities import Priorities, PrioritySettings
from msrl_accel.replay.storage import Layout, Storage
from msrl_accel.replay.sum_tree import SumTree
from msrl_accel.spaces import Observations, PolicySpec

logger = logging.getLogger("msrl_accel")

Index = Union[slice, np.ndarray]

_ALL = slice(None)


class ReplayBuffer(Replay):
    """A ring of transitions for each environment; the oldest make room for the newest.

    Args:
        spec: of the policy whose transitions are stored; observations keep its dtypes.
        capacity: transitions of all environments together, rounded down to a multiple of n_envs.
        n_envs: environments that step together.
        gamma: discount, from 0 to 1.
        n_step: steps of the return, at least 1. A window that reaches the newest transition is
            shorter, so every stored transition can be sampled at once.
        prioritized: settings of proportional prioritised sampling; None samples uniformly.
        folder: keep the transitions in memory-mapped files there. A folder that holds some of the
            same shape is opened: `restore` continues with them, `add` overwrites them.
        share_next: store each observation once instead of also as a successor: nearly half the
            memory. Final observations are kept (in the place of one transition an episode).

    Raises:
        ConfigError: an argument is out of bounds, or memory or disk cannot hold the replay.
    """

    def __init__(
        self,
        spec: PolicySpec,
        capacity: int,
        n_envs: int,
        *,
        gamma: float,
        n_step: int = 1,
        prioritized: PrioritySettings | None = None,
        folder: PathLike | None = None,
        share_next: bool = False,
    ) -> None:
        if not 0.0 <= gamma <= 1.0:
            raise ConfigError(f"gamma = {gamma}: use a number from 0 to 1")
        if n_step < 1:
            raise ConfigError(f"n_step = {n_step}: a return has at least 1 step")
        self.layout = layout = Layout(spec, capacity, n_envs, share_next)
        self.gamma = gamma
        self.n_step = n_step
        self.settings = prioritized
        _refuse_unless_it_fits(layout, prioritized is not None, folder)
        self.storage = Storage(layout, None if folder is None else Path(folder))
        self.priorities = None if prioritized is None else Priorities(layout.entries, prioritized)
        self.eligible = np.zeros(layout.entries, bool)
        """Entries that hold a transition."""
        self.written = np.zeros(n_envs, np.int64)
        """Places used so far in each environment's ring, never wrapped."""
        self._size = 0
        self._in_step = True
        """Whether all environments have used the same number of places."""
        self._columns = np.arange(n_envs)
        self._checker = StepChecker(spec, n_envs)

    @classmethod
    def predicted_bytes(
        cls,
        spec: PolicySpec,
        capacity: int,
        n_envs: int,
        *,
        prioritized: bool = False,
        share_next: bool = False,
    ) -> int:
        """What `nbytes` of such a replay will be, without allocating it."""
        layout = Layout(spec, capacity, n_envs, share_next)
        return layout.nbytes + _index_bytes(layout, prioritized)

    def __len__(self) -> int:
        return self._size

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes + _index_bytes(self.layout, self.priorities is not None)

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
        rewards = np.asarray(rewards)
        self._checker.check(
            *observations, actions, rewards, *next_observations, terminated, truncated, valid
        )
        ended = terminated | truncated
        columns: Index = _ALL
        if np.count_nonzero(valid) < len(valid):
            columns = np.flatnonzero(valid)
            if not len(columns):
                return
            observations = tuple(x[columns] for x in observations)
            next_observations = tuple(x[columns] for x in next_observations)
            actions, rewards = actions[columns], rewards[columns]
            terminated, ended = terminated[columns], ended[columns]
        check_finite("reward", rewards, self._columns[columns])
        check_finite("action", actions, self._columns[columns])
        layout, storage = self.layout, self.storage
        if storage.files is not None:
            storage.files.touch(columns, self.written[columns] + 1 + layout.share_next)
        at = self._heads(columns)
        self._size += len(rewards) - np.count_nonzero(self.eligible[at])
        self.eligible[at] = True
        for stored, x in zip(storage.observations, observations):
            stored[at] = x
        storage.actions[at] = actions
        storage.rewards[at] = rewards
        storage.terminated[at] = terminated
        storage.ended[at] = ended
        self._advance(columns)
        if self.priorities is not None:
            self.priorities.add(self._entries(at))
        if layout.share_next:
            self._store_successors(columns, next_observations, ended)
        else:
            for stored, x in zip(storage.next_observations, next_observations):
                stored[at] = x

    def _store_successors(
        self, columns: Index, next_observations: Observations, ended: np.ndarray
    ) -> None:
        """Put successors where the next observations will go; final ones stay there."""
        at = self._heads(columns)
        for stored, x in zip(self.storage.observations, next_observations):
            stored[at] = x
        self._size -= np.count_nonzero(self.eligible[at])
        self.eligible[at] = False
        if self.priorities is not None:
            self.priorities.remove(self._entries(at))
        if np.count_nonzero(ended):
            self._advance(self._columns[columns][ended])

    def end_episodes(self) -> None:
        columns = np.flatnonzero(self.written)
        newest = self._newest(columns)
        if self.layout.share_next:
            # Where an episode has ended, the newest place holds its final observation.
            running = self.eligible[newest]
            self._advance(columns[running])
            newest = newest[running]
        self.storage.ended[newest] = True

    def update_priorities(self, indices: np.ndarray, priorities: np.ndarray) -> None:
        if self.priorities is None:
            return
        indices, priorities = np.asarray(indices), np.asarray(priorities)
        check_indices(indices, priorities, self.layout.entries)
        self.priorities.update(indices.ravel(), priorities)

    @property
    def mass(self) -> float:
        if self.priorities is not None:
            return self.priorities.tree.total
        return float(self._used_entries())

    def find(self, points: np.ndarray) -> np.ndarray:
        if self.priorities is not None:
            return self.priorities.tree.find(points)
        # Rounding may lift a point to the upper end.
        return np.minimum(points.astype(np.int64), self._used_entries() - 1)

    def holds(self, indices: np.ndarray) -> np.ndarray:
        return self.eligible.take(indices)

    def priorities_at(self, indices: np.ndarray) -> np.ndarray:
        assert self.priorities is not None
        return self.priorities.tree.get(indices)

    def gather(self, indices: np.ndarray) -> ReplayBatch:
        storage, n_envs = self.storage, self.layout.n_envs
        rewards, discounts, last = n_step_returns(
            storage.rewards,
            storage.terminated,
            storage.ended,
            start=indices,
            newest=self._newest(indices % n_envs) if self.n_step > 1 else indices,
            stride=n_envs,
            gamma=self.gamma,
            n=self.n_step,
        )
        if self.layout.share_next:
            successors, at = storage.observations, (last + n_envs) % self.layout.entries
        else:
            successors, at = storage.next_observations, last
        return ReplayBatch(
            observations=tuple(x.take(indices, axis=0) for x in storage.observations),
            actions=storage.actions.take(indices, axis=0),
            rewards=rewards,
            next_observations=tuple(x.take(at, axis=0) for x in successors),
            discounts=discounts,
            weights=np.ones(len(indices), np.float32),
            indices=indices,
        )

    def state(self) -> dict[str, Any]:
        """What a replay in memory holds, or of one in files everything but the files."""
        used = self._used_entries()
        state: dict[str, Any] = {
            "layout": self._describe(),
            "written": self.written.copy(),
            "eligible": self.eligible[:used].copy(),
            "priorities": None if self.priorities is None else self.priorities.state(used),
        }
        files = self.storage.files
        if files is not None:
            files.flush()
            state["files"] = files.identity
        else:
            state["arrays"] = {name: x[:used].copy() for name, x in self.storage.arrays.items()}
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Return to what `state` gave; transitions in files that were overwritten since are lost.

        A replay in files that was full when it was saved, and went on, has overwritten its oldest
        transitions: they are left out, and a warning says how many.
        """
        here = self._describe()
        for name, saved in state["layout"].items():
            if here.get(name) != saved:
                raise CheckpointError(
                    f"the saved replay has {name} = {saved}, this one {here.get(name)}: resume "
                    "with the configuration of the run"
                )
        files = self.storage.files
        if "arrays" not in state and files is None:
            raise CheckpointError(
                "the saved replay is in files: give the folder they are in, as the run had it"
            )
        used = len(state["eligible"])
        self.written[:] = state["written"]
        self._in_step = bool((self.written == self.written[0]).all())
        self.eligible[:] = False
        self.eligible[:used] = state["eligible"]
        if self.priorities is not None:
            self.priorities.restore(state["priorities"])
        if "arrays" in state:
            if files is not None:
                files.claim()
                files.touch(self._columns, self.written + self.layout.share_next)
            for name, saved in state["arrays"].items():
                self.storage.arrays[name][:used] = saved
        elif files is not None:
            self._drop_overwritten(files.adopt(state["files"]))
        self._size = int(np.count_nonzero(self.eligible))

    def _drop_overwritten(self, touched: np.ndarray) -> None:
        """Leave out the places that were written after the saved counts."""
        rows, n_envs = self.layout.rows, self.layout.n_envs
        # How many places ahead of its ring's head each entry is.
        entries = np.arange(self.layout.entries)
        column = entries % n_envs
        ahead = (entries // n_envs - self.written[column]) % rows
        lost = (ahead < (touched - self.written)[column]) & self.eligible
        count = int(np.count_nonzero(lost))
        if not count:
            return
        self.eligible[lost] = False
        if self.priorities is not None:
            self.priorities.remove(np.flatnonzero(lost))
        logger.warning(
            "%d of the oldest transitions of the replay were overwritten after the checkpoint: "
            "the run goes on without them",
            count,
        )

    def close(self) -> None:
        if self.storage.files is not None:
            self.storage.files.close()

    def _heads(self, columns: Index) -> Index:
        """Entries that environments write next."""
        if columns is _ALL and self._in_step:
            start = int(self.written[0]) % self.layout.rows * self.layout.n_envs
            return slice(start, start + self.layout.n_envs)  # several times faster than an array
        row = self.written[columns] % self.layout.rows
        heads: np.ndarray = row * self.layout.n_envs + self._columns[columns]
        return heads

    def _entries(self, at: Index) -> np.ndarray:
        return self._columns + at.start if isinstance(at, slice) else at

    def _advance(self, columns: Index) -> None:
        if columns is _ALL:
            self.written += 1
        else:
            self.written[columns] += 1
            self._in_step = bool((self.written == self.written[0]).all())

    def _newest(self, columns: np.ndarray) -> np.ndarray:
        """Entry that each environment wrote last."""
        row = (self.written[columns] - 1) % self.layout.rows
        newest: np.ndarray = row * self.layout.n_envs + columns
        return newest

    def _used_entries(self) -> int:
        """Entries in the rows written so far; all that are behind them are empty."""
        rows = min(int(self.written.max()) + self.layout.share_next, self.layout.rows)
        return rows * self.layout.n_envs

    def _describe(self) -> dict[str, Any]:
        alpha = None if self.settings is None else self.settings.alpha
        return {**self.layout.describe(), "priority_alpha": alpha}


def _index_bytes(layout: Layout, prioritized: bool) -> int:
    """What stays in memory when the transitions are in files."""
    tree = SumTree.predicted_bytes(layout.entries) if prioritized else 0
    return layout.entries + layout.n_envs * 8 + tree


def _refuse_unless_it_fits(layout: Layout, prioritized: bool, folder: PathLike | None) -> None:
    memory = _index_bytes(layout, prioritized)
    remedy = ""
    if folder is None:
        memory += layout.nbytes
        once = (
            [] if layout.share_next else ["store every observation once (share_next_observations)"]
        )
        remedy = ", or ".join(["", *once, "keep the replay in files (replay_dir)"])
    elif not (Path(folder) / DESCRIPTION_FILE).exists():
        existing = next(p for p in Path(folder).absolute().parents if p.is_dir())
        refuse_unless_it_fits(
            layout.capacity,
            layout.nbytes,
            free_disk(existing),
            f"disk space in {folder}",
            ", free some, or give another folder",
        )
    refuse_unless_it_fits(layout.capacity, memory, available_memory(), "memory", remedy)
