"""A bounded queue of trajectories in shared memory: many producing processes, one consumer.

The arrays stay in shared memory; what travels is the number of a slot, over one pipe a producer.
The consumer's process alone decides who has which slot, in a thread that sleeps until a pipe has
something to say, so slots are handed out while the consumer trains. No lock is shared between
processes: a producer that is killed or stopped at any moment holds up nobody, and when its pipe
breaks its slot is free again.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import struct
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any, Protocol

import numpy as np

from msrl_accel.errors import PipelineError
from msrl_accel.shared_memory import (
    ArraySpec,
    BlockHandle,
    SharedBlock,
    layout_nbytes,
    views,
)

# Messages: kind, slot.
_MESSAGE = struct.Struct("<ci")
_HELLO, _ACQUIRE, _COMMIT, _DISCARD, _GRANT = b"H", b"A", b"C", b"D", b"G"
_JOIN_SECONDS = 5.0


class Admission(Protocol):
    """Who may start a trajectory; see `staleness.StalenessManager`."""

    def admit(self, producer: str) -> bool:
        """Whether a producer may start one more slot now; True counts it as started."""
        ...

    def withdraw(self, producer: str) -> None:
        """A slot that was admitted will not be trained on."""
        ...


class QueueClosed(PipelineError):
    """The queue was closed while or before it was waited for."""


@dataclass(frozen=True)
class ProducerHandle:
    """What a producing process needs: an argument of ``Process(...)``, which alone pickles it."""

    name: str
    block: BlockHandle
    layout: tuple[ArraySpec, ...]
    pipe: Any


class Slot:
    """One trajectory's arrays, by name; views of shared memory, valid until it is given back."""

    def __init__(self, number: int, arrays: dict[str, np.ndarray], producer: str) -> None:
        self.number = number
        self.arrays = arrays
        self.producer = producer


class Producer:
    """A producer's end, in its process.

    Args:
        handle: made by `SharedQueue.producer`.
    """

    def __init__(self, handle: ProducerHandle) -> None:
        self.name = handle.name
        self._block = SharedBlock.attach(handle.block)
        self._layout = handle.layout
        self._pipe = handle.pipe
        self._held: set[int] = set()
        self._asked = 0
        self._closed = False
        self._send(_HELLO)

    def acquire(self, timeout: float) -> Slot:
        """A slot to fill.

        Raises:
            QueueClosed: the consumer has closed the queue or ended.
            PipelineError: there was no free slot for `timeout` seconds.
        """
        slot = self.try_acquire(timeout)
        if slot is None:
            raise PipelineError(
                f"{self.name}: no free slot in the trajectory queue for {timeout:g} s; the learner "
                "is stuck, or takes longer than that for an update"
            )
        return slot

    def ask(self, count: int = 1) -> None:
        """Queue up for so many more slots, which `try_acquire` then gives one by one."""
        for _ in range(count):
            self._send(_ACQUIRE)
        self._asked += count

    def try_acquire(self, timeout: float) -> Slot | None:
        """As `acquire`, but None where there was no free slot; asking again keeps the turn."""
        if not self._asked:
            self.ask()
        with self._broken_pipe_is_closed():
            if not self._pipe.poll(timeout):
                return None
            _, number = _MESSAGE.unpack(self._pipe.recv_bytes(_MESSAGE.size))
        self._asked -= 1
        self._held.add(number)
        return Slot(number, _slot_views(self._block, self._layout, number), self.name)

    def commit(self, slot: Slot) -> None:
        """Hand a filled slot to the consumer; raises `QueueClosed` where there is none."""
        self._give_back(_COMMIT, slot)

    def discard(self, slot: Slot) -> None:
        """Give a slot back unused."""
        self._give_back(_DISCARD, slot)

    def close(self) -> None:
        """Leave; a slot that is held becomes free."""
        self._closed = True
        self._pipe.close()
        self._block.close()

    def _give_back(self, kind: bytes, slot: Slot) -> None:
        if slot.number not in self._held:
            raise PipelineError(f"{self.name}: slot {slot.number} has been given back already")
        self._held.remove(slot.number)
        self._send(kind, slot.number)

    def _send(self, kind: bytes, number: int = -1) -> None:
        with self._broken_pipe_is_closed():
            self._pipe.send_bytes(_MESSAGE.pack(kind, number))

    @contextlib.contextmanager
    def _broken_pipe_is_closed(self) -> Any:
        if self._closed:
            raise QueueClosed(f"{self.name}: this end of the trajectory queue is closed")
        try:
            yield
        except (EOFError, OSError) as error:
            raise QueueClosed(
                f"{self.name}: the learner has closed the trajectory queue or ended"
            ) from error


class _Member:
    """The consumer's view of one producer."""

    def __init__(self, name: str, pipe: Any, child_pipe: Any) -> None:
        self.name = name
        self.pipe = pipe
        self.child_pipe = child_pipe
        """Kept open until the process has its own copy, which its first message tells."""
        self.holds: set[int] = set()

    def send(self, kind: bytes, number: int) -> None:
        with contextlib.suppress(OSError):  # it has ended; its pipe will say so
            self.pipe.send_bytes(_MESSAGE.pack(kind, number))

    def close(self) -> None:
        self.pipe.close()
        self.child_pipe.close()


class SharedQueue:
    """The consumer's end, in the process that trains; not to be used by two of its threads.

    Args:
        layout: the arrays of one trajectory.
        slots: trajectories there may be at a time: being filled, waiting, or with the consumer.
            With as many as producers + `queue_size` every producer can fill one while
            `queue_size` wait.
        admission: asked before each slot is given out; None always admits.
    """

    def __init__(
        self, layout: Sequence[ArraySpec], slots: int, admission: Admission | None = None
    ) -> None:
        self.layout = tuple(layout)
        self.slots = slots
        self.reclaimed = 0
        """Slots taken back from producers that ended while they held them."""
        self._surplus = 0  # slots to retire as they become free
        self._admission = admission
        self._block = SharedBlock.create("trajectories", slots * layout_nbytes(self.layout))
        self._condition = threading.Condition()
        self._free = deque(range(slots))
        self._ready: deque[tuple[int, str]] = deque()
        self._turns: deque[_Member] = deque()
        self._members: dict[str, _Member] = {}
        self._leaving: list[_Member] = []
        self._closed = False
        self._failure: Exception | None = None
        self._wake_end, self._wake = multiprocessing.Pipe(duplex=False)
        self._thread = threading.Thread(target=self._serve, name="trajectory-queue", daemon=True)
        self._thread.start()

    def producer(self, name: str) -> ProducerHandle:
        """The end of a new producer; one of the same name is reclaimed.

        Args:
            name: of the stage, for messages and as owner of slots.
        """
        ours, theirs = multiprocessing.Pipe()
        with self._condition:
            self._check_open()
            self._remove(name)
            self._members[name] = _Member(name, ours, theirs)
        self._nudge()
        return ProducerHandle(name, self._block.handle, self.layout, theirs)

    def get(self, timeout: float) -> Slot:
        """The trajectory that has waited longest; `release` it after use.

        Raises:
            QueueClosed: the queue was closed.
            PipelineError: none came within `timeout` seconds; names who has slots.
        """
        slot = self.try_get(timeout)
        if slot is None:
            raise PipelineError(
                f"learner: no trajectory came for {timeout:g} s; {self._describe()}"
            )
        return slot

    def try_get(self, timeout: float) -> Slot | None:
        """As `get`, but None where none came."""
        with self._condition:
            self._condition.wait_for(
                lambda: self._ready or self._closed or self._failure is not None, timeout
            )
            self._check_open()
            if not self._ready:
                return None
            number, name = self._ready.popleft()
        return Slot(number, _slot_views(self._block, self.layout, number), name)

    def release(self, slot: Slot) -> None:
        """Give a slot back for the next trajectory; its arrays are not to be used any more."""
        with self._condition:
            if not self._closed:
                self._make_free(slot.number)
                self._grant()

    def reclaim(self, name: str) -> int:
        """Remove a producer and free what it holds; returns how many slots that were.

        Only after its process has ended: a stopped one could go on writing. A process that ends
        by itself is noticed without this.
        """
        with self._condition:
            self._check_open()
            count = self._remove(name)
        self._nudge()
        return count

    def admit_again(self) -> None:
        """Ask the admission anew for the producers that wait: its answer may have changed."""
        with self._condition:
            if not self._closed:
                self._grant()

    def shrink(self, count: int) -> None:
        """Retire `count` slots, now or as they become free, and give their memory back."""
        with self._condition:
            self._check_open()
            self.slots -= count
            self._surplus += count
            for _ in range(len(self._free)):
                self._make_free(self._free.popleft())

    def stats(self) -> dict[str, int]:
        """Trajectories ready, being filled, and producers that wait for a slot."""
        with self._condition:
            return {
                "ready": len(self._ready),
                "filling": sum(len(member.holds) for member in self._members.values()),
                "waiting_producers": len(self._turns),
                "reclaimed": self.reclaimed,
            }

    def close(self) -> None:
        """Wake everybody with `QueueClosed` and free the memory."""
        with self._condition:
            if self._closed:
                return
            self._closed = True
            self._condition.notify_all()
        self._nudge()
        self._thread.join(_JOIN_SECONDS)
        for member in [*self._members.values(), *self._leaving]:
            member.close()  # producers see the end of their pipe
        self._wake.close()
        self._wake_end.close()
        self._block.close()

    # What follows runs in the thread, or with the condition held.

    def _serve(self) -> None:
        try:
            self._serve_until_closed()
        except Exception as error:  # whoever waits must hear of it
            with self._condition:
                self._failure = error
                self._condition.notify_all()

    def _serve_until_closed(self) -> None:
        while True:
            with self._condition:
                if self._closed:
                    return
                # Closed here, because this thread must not wait for a closed pipe.
                while self._leaving:
                    self._leaving.pop().close()
                members = {member.pipe: member for member in self._members.values()}
            for pipe in connection.wait([self._wake_end, *members]):
                with self._condition:
                    if pipe is self._wake_end:
                        self._wake_end.recv_bytes()
                    elif self._members.get(members[pipe].name) is members[pipe]:
                        self._receive(members[pipe])

    def _receive(self, member: _Member) -> None:
        try:
            kind, number = _MESSAGE.unpack(member.pipe.recv_bytes(_MESSAGE.size))
        except (EOFError, OSError):
            self._remove(member.name)
            return
        member.child_pipe.close()
        if kind == _ACQUIRE:
            self._turns.append(member)
            self._grant()
        elif kind == _COMMIT:
            member.holds.remove(number)
            self._ready.append((number, member.name))
            self._condition.notify_all()
        elif kind == _DISCARD:
            member.holds.remove(number)
            self._take_back([number], member.name)

    def _grant(self) -> None:
        """Slots for those who wait, in turn, as long as there are any and they are admitted."""
        refused: deque[_Member] = deque()
        while self._turns and self._free:
            member = self._turns.popleft()
            if self._admission is not None and not self._admission.admit(member.name):
                refused.append(member)
                continue
            number = self._free.popleft()
            member.holds.add(number)
            member.send(_GRANT, number)
        self._turns.extendleft(reversed(refused))

    def _make_free(self, number: int) -> None:
        if not self._surplus:
            self._free.append(number)
            return
        self._surplus -= 1
        size = layout_nbytes(self.layout)
        self._block.drop(number * size, (number + 1) * size)

    def _remove(self, name: str) -> int:
        member = self._members.pop(name, None)
        if member is None:
            return 0
        self._leaving.append(member)
        self._turns = deque(other for other in self._turns if other is not member)
        self.reclaimed += len(member.holds)
        self._take_back(sorted(member.holds), name)
        return len(member.holds)

    def _take_back(self, numbers: list[int], name: str) -> None:
        for number in numbers:
            self._make_free(number)
            if self._admission is not None:
                self._admission.withdraw(name)
        self._grant()

    def _nudge(self) -> None:
        """Let the thread look at what has changed."""
        self._wake.send_bytes(b"!")

    def _check_open(self) -> None:
        if self._closed:
            raise QueueClosed("learner: the trajectory queue is closed")
        if self._failure is not None:
            raise PipelineError("learner: the trajectory queue failed") from self._failure

    def _describe(self) -> str:
        with self._condition:
            filling = [member.name for member in self._members.values() if member.holds]
            waiting = [member.name for member in self._turns]
        parts = [
            f"filling one: {', '.join(filling) or 'nobody'}",
            f"waiting for a slot: {', '.join(waiting) or 'nobody'}",
        ]
        return "; ".join(parts)


def _slot_views(
    block: SharedBlock, layout: tuple[ArraySpec, ...], number: int
) -> dict[str, np.ndarray]:
    size = layout_nbytes(layout)
    return views(block.memory[number * size : (number + 1) * size], layout)
