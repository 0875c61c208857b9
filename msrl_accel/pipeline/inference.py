"""One process that runs the policy for all workers of a host, in batches (docs/scale-out.md).

Observations, noise and results stay in shared memory, a block a client. Over a UNIX socket travel
messages of a few bytes, and the layout of the block, once, as JSON. A client waits for its answer,
so it has one request at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import numpy as np

from msrl_accel.errors import PolicyError
from msrl_accel.publish import WeightStore
from msrl_accel.runtime.base import ActResult, PolicyRuntime
from msrl_accel.runtime.batch_invariant import BatchInvariantRuntime
from msrl_accel.shared_memory import ArraySpec, SharedBlock, layout_nbytes, views
from msrl_accel.spaces import Observations, PolicySpec

TIMEOUT_SECONDS = 2e-3
"""That the first request of a batch waits for others."""
SIZES = (8, 32, 128, 512)
"""Rows of the batches that are run; others are padded to the next, so that nothing recompiles."""
NUMBERS = ("requests", "rows", "batches", "padded", "waited", "latency", "slowest", "queued")
"""What a server counts since its start, in float64: requests, their rows, batches run, their rows
with padding; seconds from requests to the start of their batch and to their answer, and the longest
of the latter; requests that were there when batches started."""

MESSAGE = struct.Struct("<cqq")
"""Kind, number of the request, rows or version."""
HELLO, ASK, ANSWER, REFUSE = b"H", b"A", b"R", b"E"
LONGEST_MESSAGE = 1 << 16
_IDLE_SECONDS = 0.1
_LONGEST_ERROR = 4000


@dataclass(frozen=True)
class Output:
    """One output of the policy; `shape` of one row, or of the whole where rows share it."""

    shape: tuple[int, ...]
    dtype: str
    per_row: bool


def client_layout(spec: PolicySpec, outputs: Sequence[Output], rows: int) -> list[ArraySpec]:
    """Arrays of the block of a client that asks for up to `rows` rows."""
    noise = ArraySpec("noise", (rows, spec.action.noise_size), "<f4")
    return [
        *(
            ArraySpec(f"observation/{i}", (rows, *o.shape), np.dtype(o.dtype).str)
            for i, o in enumerate(spec.observations)
        ),
        noise,
        *(
            ArraySpec(f"output/{i}", (rows, *o.shape) if o.per_row else o.shape, o.dtype)
            for i, o in enumerate(outputs)
        ),
    ]


def outputs_of(result: ActResult) -> list[Output]:
    """Of any result of a policy; a parameter of one dimension is shared by all rows."""
    shared = {id(x) for x in result.parameters if x.ndim == 1}
    return [
        Output(x.shape if id(x) in shared else x.shape[1:], x.dtype.str, id(x) not in shared)
        for x in result.outputs()
    ]


def same_user(connection: socket.socket) -> bool:
    """Whether the other end belongs to this user, by what the kernel says."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", peer)[1] == os.getuid())


class _Session:
    """The server's view of one client."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.block: SharedBlock | None = None
        self.arrays: dict[str, np.ndarray] = {}
        self.rows = 0
        self.waiting = False

    def fileno(self) -> int:
        return self.connection.fileno()

    def close(self) -> None:
        self.connection.close()
        self.arrays = {}
        if self.block is not None:
            self.block.close()


@dataclass
class _Request:
    session: _Session
    number: int
    rows: int
    at: float


class InferenceServer:
    """Answers clients in the order in which they ask, many at a time.

    A batch is run when its requests fill the largest size, when every client waits, or
    `timeout_seconds` after its first request.

    Args:
        runtime: acts. It is padded to `sizes`, or, where it is batch invariant, to its own.
        name: under which clients find it; names are the host's.
        store: where newer weights come from; None keeps the runtime's.
        sizes: of batches, rows.
        timeout_seconds: that a request waits for others.
        numbers: where it counts, [len(NUMBERS)] float64.
        beat: called every moment.
    """

    def __init__(
        self,
        runtime: PolicyRuntime,
        name: str,
        store: WeightStore | None = None,
        *,
        sizes: Sequence[int] = SIZES,
        timeout_seconds: float = TIMEOUT_SECONDS,
        numbers: np.ndarray | None = None,
        beat: Callable[[], object] = lambda: None,
    ) -> None:
        if not isinstance(runtime, BatchInvariantRuntime):
            runtime = BatchInvariantRuntime(runtime, tiles=sizes)
        self.runtime = runtime
        self.sizes = self.runtime.tiles
        self.spec = runtime.spec
        self.store = store
        self.timeout_seconds = timeout_seconds
        self.numbers = np.zeros(len(NUMBERS)) if numbers is None else numbers
        self.beat = beat
        self.stopping = False
        self._sessions: set[_Session] = set()
        self._pending: deque[_Request] = deque()
        self._outputs = self._warm_up()
        # Without a file: the name is gone when the process is.
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{name}")
        self._listener.listen(64)

    def run(self) -> None:
        """Serve until `stopping` is set."""
        while not self.stopping:
            self.beat()
            self._receive(self._patience())
            if self._pending and self._due():
                self._run_batch()

    def close(self) -> None:
        """Leave; clients that wait hear of it."""
        self._listener.close()
        for session in self._sessions:
            session.close()
        self._sessions.clear()
        self.runtime.close()

    def _warm_up(self) -> list[Output]:
        """Run every size once, which compiles it; returns what comes out."""
        self._follow()
        for size in self.sizes:
            self.beat()
            observations = tuple(
                np.zeros((size, *o.shape), o.dtype) for o in self.spec.observations
            )
            result = self.runtime.act(observations, self.spec.zero_noise((size,)))
        return outputs_of(result)

    def _follow(self) -> None:
        newer = None if self.store is None else self.store.read(newer_than=self.runtime.version)
        if newer is not None:
            self.runtime.load_weights(*newer)

    def _patience(self) -> float:
        """Seconds to wait for further requests."""
        if not self._pending:
            return _IDLE_SECONDS
        return max(self._pending[0].at + self.timeout_seconds - time.monotonic(), 0.0)

    def _due(self) -> bool:
        return (
            sum(request.rows for request in self._pending) >= self.sizes[-1]
            or all(session.waiting for session in self._sessions)
            or time.monotonic() >= self._pending[0].at + self.timeout_seconds
        )

    def _receive(self, timeout: float) -> None:
        sources: list[Any] = [self._listener, *self._sessions]
        for ready in wait(sources, timeout):
            if not isinstance(ready, _Session):
                self._accept()
                continue
            message = b""
            with contextlib.suppress(OSError):
                message = ready.connection.recv(LONGEST_MESSAGE)
            if len(message) == MESSAGE.size:
                self._hear(ready, *MESSAGE.unpack(message))
            else:  # it has ended, in whatever way; nobody else is concerned
                self._leave(ready)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if same_user(connection):
            self._sessions.add(_Session(connection))
        else:
            connection.close()

    def _hear(self, session: _Session, kind: bytes, number: int, rows: int) -> None:
        if kind == HELLO and session.block is None and rows > 0:
            self._welcome(session, rows)
        elif kind == ASK and not session.waiting and 0 < rows <= session.rows:
            session.waiting = True
            self._pending.append(_Request(session, number, rows, time.monotonic()))
        else:
            self._leave(session)

    def _welcome(self, session: _Session, rows: int) -> None:
        layout = client_layout(self.spec, self._outputs, rows)
        session.block = SharedBlock.create("inference", layout_nbytes(layout))
        session.arrays = views(session.block.memory, layout)
        session.rows = rows
        outputs = [vars(output) for output in self._outputs]
        answer = {"block": vars(session.block.handle), "outputs": outputs}
        self._send(session, json.dumps(answer).encode())

    def _leave(self, session: _Session) -> None:
        self._sessions.discard(session)
        self._pending = deque(r for r in self._pending if r.session is not session)
        session.close()

    def _run_batch(self) -> None:
        """Act for those who have waited longest, as many as fit, and answer them in order."""
        batch = [self._pending.popleft()]
        rows = batch[0].rows
        while self._pending and rows + self._pending[0].rows <= self.sizes[-1]:
            batch.append(self._pending.popleft())
            rows += batch[-1].rows
        started = time.monotonic()
        self._follow()
        try:
            outputs = self.runtime.act(*self._inputs(batch)).outputs()
        except PolicyError as error:
            text = str(error).encode()[:_LONGEST_ERROR]
            for request in batch:
                self._answer(request, REFUSE, text)
            return
        start = 0
        for request in batch:
            for i, (output, x) in enumerate(zip(self._outputs, outputs)):
                target = request.session.arrays[f"output/{i}"]
                if output.per_row:
                    target[: request.rows] = x[start : start + request.rows]
                else:
                    target[...] = x
            start += request.rows
            self._answer(request, ANSWER)
        self._count(batch, rows, started)

    def _inputs(self, batch: list[_Request]) -> tuple[Observations, np.ndarray]:
        def join(name: str) -> np.ndarray:
            return np.concatenate([r.session.arrays[name][: r.rows] for r in batch])

        observations = tuple(join(f"observation/{i}") for i in range(len(self.spec.observations)))
        return observations, join("noise")

    def _answer(self, request: _Request, kind: bytes, text: bytes = b"") -> None:
        request.session.waiting = False
        head = MESSAGE.pack(kind, request.number, self.runtime.version)
        self._send(request.session, head + text)

    def _send(self, session: _Session, message: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended; the next wait says so
            session.connection.send(message, socket.MSG_DONTWAIT)

    def _count(self, batch: list[_Request], rows: int, started: float) -> None:
        now = time.monotonic()
        whole, rest = divmod(rows, self.sizes[-1])
        padded = whole * self.sizes[-1] + (next(s for s in self.sizes if s >= rest) if rest else 0)
        x = self.numbers
        x[0] += len(batch)
        x[1] += rows
        x[2] += 1
        x[3] += padded
        x[4] += sum(started - request.at for request in batch)
        x[5] += sum(now - request.at for request in batch)
        x[6] = max(x[6], now - batch[0].at)
        x[7] += len(batch) + len(self._pending)


def inference_metrics(before: np.ndarray, now: np.ndarray) -> dict[str, float]:
    """What a server did between two looks at its numbers; nothing where it ran no batch.

    queue_depth: requests there when a batch starts; batch_rows; batch_fill: share of the rows run
    that were asked for; wait_ms, latency_ms: of a request, until its batch starts and until its
    answer; latency_ms_max: the longest since the server's start.
    """
    x = dict(zip(NUMBERS, now - before))
    if x["batches"] <= 0:
        return {}
    return {
        "inference/queue_depth": x["queued"] / x["batches"],
        "inference/batch_rows": x["rows"] / x["batches"],
        "inference/batch_fill": x["rows"] / x["padded"],
        "inference/wait_ms": 1e3 * x["waited"] / x["requests"],
        "inference/latency_ms": 1e3 * x["latency"] / x["requests"],
        "inference/latency_ms_max": 1e3 * float(now[NUMBERS.index("slowest")]),
    }
