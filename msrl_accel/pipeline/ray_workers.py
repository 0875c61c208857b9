"""Workers in a Ray cluster: queue, weight store and worker pool of an asynchronous run in one."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from msrl_accel.errors import ConfigError, EnvError, PipelineError
from msrl_accel.pipeline.ray_actor import TAKE_SECONDS, WorkerActor
from msrl_accel.pipeline.shared_queue import Admission, Slot
from msrl_accel.pipeline.watchdog import BACKOFF_SECONDS, GRACE_SECONDS, MAX_BACKOFF_SECONDS
from msrl_accel.pipeline.worker import WorkerTask
from msrl_accel.shared_memory import ArraySpec

logger = logging.getLogger("msrl_accel")

INSTALL = "pip install 'msrl_accel[ray]'"
_CONCURRENCY = 4
"""Threads of an actor that answer calls: one is always in `take`."""


def import_ray() -> Any:
    """Ray; ConfigError where it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"pipeline.engine = 'ray': Ray is not installed: {INSTALL}") from error
    return ray


def connect(ray: Any, address: str | None, cpus: int) -> bool:
    """Join a cluster, or start one of this host alone, that listens on loopback only.

    Returns whether it was started or joined here, and should be left at the end.

    Raises:
        PipelineError: there is no such cluster, or it did not start in time.
    """
    if ray.is_initialized():
        return False
    options: dict[str, Any] = {"logging_level": "warning", "log_to_driver": False}
    if address is not None:
        options["address"] = address
    else:
        options.update(
            num_cpus=max(cpus, os.cpu_count() or 1),
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
        )
    try:
        ray.init(**options)
    except Exception as error:  # Ray raises a plain Exception where its own processes are late
        raise PipelineError(
            f"pipeline.engine = 'ray', pipeline.ray_address = {address!r}: Ray did not start or "
            f"answer: {error}"
        ) from error
    return True


@dataclass(eq=False)
class _Member:
    """One place among the workers, whatever actor fills it."""

    index: int
    actor: Any = None
    call: Any = None
    """The running call of `take`."""
    granted: int = 0
    """Slots that it may fill and has not delivered."""
    attempt: int = 0
    failures: int = 0
    """In a row, without a trajectory between them."""
    start_at: float = 0.0
    heard: float | None = None
    """When it last answered; None while it waits for a place in the cluster, or starts."""
    stage: str = "its start"

    @property
    def name(self) -> str:
        return f"worker {self.index}"


@dataclass
class RayOptions:
    """What does not change in a run.

    slots: trajectories' slots there may be at a time; per_worker: those of one worker.
    """

    count: int
    layout: Sequence[ArraySpec]
    slots: int
    per_worker: int
    env_id: str
    hang_seconds: float
    max_restarts: int
    actor: dict[str, Any] = field(default_factory=dict)
    """Further options of the actors, such as resources."""


class RayWorkers:
    """Actors that collect, and what they have collected.

    Weights are put into Ray's object store once a version, trajectories come back through it. An
    actor that dies, with its node or alone, or hangs, is replaced by another wherever the cluster
    has room; one that finds none starts when a node joins. The methods are those of `SharedQueue`,
    `WeightStore` and `WorkerPool` that a trainer calls; all in the trainer's thread.

    Args:
        ray: the module.
        options: see there.
        make_task: of a worker's index and attempt, its task.
        admission: asked before each slot is granted.
        on_end: called with the index of a worker that has ended.
    """

    def __init__(
        self,
        ray: Any,
        options: RayOptions,
        make_task: Callable[[int, int], WorkerTask],
        admission: Admission,
        on_end: Callable[[int], object] = lambda index: None,
    ) -> None:
        self.restarts = 0
        self.reclaimed = 0
        """Slots that workers had not delivered when they ended."""
        self.slots = options.slots
        self._ray = ray
        self._options = options
        self._make_task = make_task
        self._admission = admission
        self._on_end = on_end
        self._members = [_Member(i) for i in range(options.count)]
        self._ready: deque[Slot] = deque()
        self._held = 0
        self._version = -1
        self._weights: Any = None
        self._class = ray.remote(WorkerActor)
        self._closed = False

    # As a weight store.

    def publish(self, version: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Put weights into the object store and let all actors have them."""
        self._weights = self._ray.put(dict(arrays))
        self._version = version
        for member in self._members:
            if member.heard is not None:
                member.actor.publish.remote(version, self._weights)

    # As a worker pool.

    def start(self) -> None:
        for member in self._members:
            self._start(member)

    def supervise(self) -> None:
        """Take what has come; replace actors that died or hang.

        Raises:
            EnvError: a worker failed more often in a row than allowed; with its traceback.
        """
        self._receive(0.0)
        now = time.monotonic()
        limit = self._options.hang_seconds
        limit += min(limit, GRACE_SECONDS)
        for member in self._members:
            if member.actor is None:
                if now >= member.start_at:
                    self._start(member)
            elif member.heard is not None and now - member.heard > limit + TAKE_SECONDS:
                self._kill(member)
                self._ended(member, f"gave no answer for {now - member.heard:.1f} s; it was killed")

    def delivered(self, index: int) -> None:
        """A worker gave a trajectory: its failures so far are forgiven."""
        self._members[index].failures = 0

    def describe(self) -> str:
        """What each worker is at."""
        parts = []
        for member in self._members:
            if member.actor is None:
                parts.append(f"{member.name} waits to be restarted")
            elif member.heard is None:
                parts.append(f"{member.name} waits for a place in the cluster, or starts")
            else:
                parts.append(f"{member.name} is at {member.stage}")
        return "; ".join(parts)

    # As a queue.

    def try_get(self, timeout: float) -> Slot | None:
        """The trajectory that has waited longest; None where none came within `timeout` s."""
        if not self._ready:
            self._receive(timeout)
        if not self._ready:
            return None
        self._held += 1
        return self._ready.popleft()

    def release(self, slot: Slot) -> None:
        """The slot's arrays are not used any more."""
        self._held -= 1
        self.admit_again()

    def admit_again(self) -> None:
        """Grant slots in turn, as long as there is room and they are admitted.

        Only to actors that run: one that waits for a node would keep its share from the others.
        """
        grants: dict[_Member, int] = {}
        waiting = deque(m for m in self._members if m.heard is not None)
        while waiting and self._in_use < self.slots:
            member = waiting.popleft()
            if member.granted < self._options.per_worker and self._admission.admit(member.name):
                member.granted += 1
                grants[member] = grants.get(member, 0) + 1
                waiting.append(member)
        for member, count in grants.items():
            member.actor.grant.remote(count, self._version, self._weights)

    def shrink(self, count: int) -> None:
        """Have `count` slots fewer from now on."""
        self.slots -= count

    def stats(self) -> dict[str, int]:
        """As of `SharedQueue`."""
        return {
            "ready": len(self._ready),
            "filling": sum(member.granted for member in self._members),
            "waiting_producers": sum(not member.granted for member in self._members),
            "reclaimed": self.reclaimed,
        }

    def close(self) -> None:
        """End all actors; closing twice is allowed."""
        if self._closed:
            return
        self._closed = True
        for member in self._members:
            if member.actor is not None:
                self._kill(member)
        self._ready.clear()
        self._weights = None

    @property
    def _in_use(self) -> int:
        return len(self._ready) + self._held + sum(member.granted for member in self._members)

    def _start(self, member: _Member) -> None:
        options = {"num_cpus": 1, "max_restarts": 0, "max_concurrency": _CONCURRENCY}
        task = self._make_task(member.index, member.attempt)
        member.actor = self._class.options(**{**options, **self._options.actor}).remote(
            task, tuple(self._options.layout)
        )
        member.heard, member.stage, member.granted = None, "its start", 0
        member.call = member.actor.take.remote(0.0)  # answered once it has a place

    def _receive(self, timeout: float) -> None:
        """Take what actors have filled, waiting for a first one, and hear of those that ended."""
        calls = {member.call: member for member in self._members if member.actor is not None}
        if not calls:
            time.sleep(timeout)
            return
        done, _ = self._ray.wait(list(calls), num_returns=1, timeout=timeout)
        if done and len(calls) > 1:
            done, _ = self._ray.wait(list(calls), num_returns=len(calls), timeout=0)
        for call in done:
            self._hear(calls[call])

    def _hear(self, member: _Member) -> None:
        try:
            filled, stage, silent = self._ray.get(member.call)
        except self._ray.exceptions.RayTaskError as error:
            self._kill(member)
            self._ended(member, f"raised:\n{getattr(error, 'cause', None) or error}")
            return
        except self._ray.exceptions.RayError as error:
            self._kill(member)
            self._ended(member, f"was lost in {member.stage}: {str(error).splitlines()[0]}")
            return
        started = member.heard is None
        member.heard, member.stage = time.monotonic(), stage
        for arrays in filled:
            member.granted -= 1
            self._ready.append(Slot(0, arrays, member.name))
        limit = self._options.hang_seconds
        if silent > limit + min(limit, GRACE_SECONDS):
            self._kill(member)
            self._ended(member, f"hung in {stage} for {silent:.1f} s and was killed")
            return
        member.call = member.actor.take.remote(TAKE_SECONDS)
        if started:
            self.admit_again()

    def _kill(self, member: _Member) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(member.actor, no_restart=True)

    def _ended(self, member: _Member, reason: str) -> None:
        member.actor = member.call = member.heard = None
        for _ in range(member.granted):
            self._admission.withdraw(member.name)
        self.reclaimed += member.granted
        member.granted = 0
        self._on_end(member.index)
        member.failures += 1
        if member.failures > self._options.max_restarts:
            raise EnvError(
                f"{member.name} failed {member.failures} times in a row "
                f"(pipeline.max_restarts = {self._options.max_restarts}); the last time it {reason}"
            )
        wait = min(BACKOFF_SECONDS * 2 ** (member.failures - 1), MAX_BACKOFF_SECONDS)
        logger.warning("%s %s; restarting it in %.1f s", member.name, reason, wait)
        member.start_at = time.monotonic() + wait
        member.attempt += 1
        self.restarts += 1
        self.admit_again()
