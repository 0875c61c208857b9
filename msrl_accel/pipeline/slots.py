"""What one slot of the trajectory queue holds: trajectories, ended episodes, numbers."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from msrl_accel.pipeline.shared_queue import Slot
from msrl_accel.pipeline.timeline import Timeline
from msrl_accel.shared_memory import ArraySpec
from msrl_accel.spaces import PolicySpec
from msrl_accel.trajectories import Trajectories

MAX_EPISODES = 512
"""Ended episodes that one slot reports; more are reported with the next ones."""

_OBSERVATION = "observations/"
_ARRAYS = tuple(f.name for f in fields(Trajectories) if f.name != "observations")


class SlotNumbers(NamedTuple):
    """How a slot came to be; times are monotonic seconds.

    What concerns the worker as a whole counts from its slot before.
    """

    environment: float
    """Of the trajectory; -1 where all the worker's environments are in it."""
    begin: float
    """Of its first step."""
    end: float
    blocked: float
    """Seconds that the trajectory waited for its slot."""
    elapsed: float
    """Seconds of the worker."""
    idle: float
    """Seconds in which the worker had nothing to do for want of a slot."""
    act_seconds: float
    """In inference."""
    act_slowest: float
    """Seconds of the slowest call."""
    act_calls: float
    act_rows: float
    reward_mean: float
    """Statistics of the discounted return, by which the worker scales rewards."""
    reward_variance: float
    reward_count: float
    episodes: float
    """Ended episodes reported."""


def slot_layout(spec: PolicySpec, n_steps: int, columns: int) -> list[ArraySpec]:
    """Arrays of one slot with `columns` trajectories of `n_steps` steps."""
    empty = Trajectories.empty(spec, n_steps, columns)
    arrays = {name: getattr(empty, name) for name in _ARRAYS}
    arrays.update({f"{_OBSERVATION}{i}": x for i, x in enumerate(empty.observations)})
    arrays["episodes"] = np.empty((min(n_steps * columns, MAX_EPISODES), 2))  # return, length
    arrays["numbers"] = np.empty(len(SlotNumbers._fields))
    return [ArraySpec.of(name, array) for name, array in arrays.items()]


def slot_trajectories(slot: Slot) -> Trajectories:
    """The trajectories in a slot, as views."""
    count = sum(name.startswith(_OBSERVATION) for name in slot.arrays)
    observations = tuple(slot.arrays[f"{_OBSERVATION}{i}"] for i in range(count))
    return Trajectories(observations=observations, **{n: slot.arrays[n] for n in _ARRAYS})


def slot_numbers(slot: Slot) -> SlotNumbers:
    return SlotNumbers(*slot.arrays["numbers"].tolist())


def slot_version(slot: Slot) -> int:
    """Of its oldest step."""
    return int(slot.arrays["versions"].min())


def write_numbers(
    slot: Slot, numbers: SlotNumbers, episodes: list[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Note in a slot how it came to be; returns the episodes that it has no room for."""
    room = slot.arrays["episodes"]
    reported, rest = episodes[: len(room)], episodes[len(room) :]
    if reported:
        room[: len(reported)] = reported
    slot.arrays["numbers"][:] = numbers._replace(episodes=len(reported))
    return rest


def slot_episodes(slot: Slot) -> np.ndarray:
    """Return and length of the episodes that ended, [M, 2]."""
    episodes: np.ndarray = slot.arrays["episodes"][: int(slot_numbers(slot).episodes)]
    return episodes


def draw_slot(timeline: Timeline, producer: str, numbers: SlotNumbers) -> None:
    """When a slot was waited for and filled, on the track of its worker or environment."""
    track = producer
    if numbers.environment >= 0:
        track += f", environment {numbers.environment:.0f}"
    timeline.span(track, "blocked", numbers.begin - numbers.blocked, numbers.begin)
    timeline.span(track, "collect", numbers.begin, numbers.end)


def join_columns(parts: list[Trajectories]) -> Trajectories:
    """Trajectories side by side, copied: [T, N1 + N2 + ...]."""
    return Trajectories(
        observations=tuple(
            np.concatenate(x, axis=1) for x in zip(*(part.observations for part in parts))
        ),
        **{name: np.concatenate([getattr(p, name) for p in parts], axis=1) for name in _ARRAYS},
    )


def take_columns(source: Trajectories, columns: slice) -> Trajectories:
    """Some of the trajectories, as views."""
    return Trajectories(
        observations=tuple(x[:, columns] for x in source.observations),
        **{name: getattr(source, name)[:, columns] for name in _ARRAYS},
    )


def copy_columns(source: Trajectories, columns: slice, target: Trajectories) -> None:
    """Some of the trajectories into others, of as many columns."""
    for name in _ARRAYS:
        getattr(target, name)[...] = getattr(source, name)[:, columns]
    for a, b in zip(target.observations, source.observations):
        a[...] = b[:, columns]


def collection_metrics(numbers: list[SlotNumbers], steps: int, workers: int) -> dict[str, float]:
    """What the slots of one update, of `steps` steps each, say of the workers."""
    x: Any = SlotNumbers(*np.array(numbers).T)  # of arrays here
    elapsed = max(x.elapsed.sum(), 1e-9)
    trajectories = max((x.end - x.begin + x.blocked).sum(), 1e-9)
    calls = max(x.act_calls.sum(), 1)
    busy = max(elapsed - x.idle.sum(), 1e-9) / workers
    return {
        "pipeline/rollout_steps_per_second": steps * len(numbers) / busy,
        "pipeline/worker_idle_share": x.idle.sum() / elapsed,
        "pipeline/worker_blocked_share": x.blocked.sum() / trajectories,
        "pipeline/inference_share": x.act_seconds.sum() / elapsed,
        "pipeline/inference_ms": 1e3 * x.act_seconds.sum() / calls,
        "pipeline/inference_ms_max": 1e3 * x.act_slowest.max(),
        "pipeline/inference_rows": x.act_rows.sum() / calls,
    }
