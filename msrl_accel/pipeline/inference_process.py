"""The inference server as a process of an asynchronous run, started and watched by its learner."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numpy as np

from msrl_accel.pipeline.heartbeat import Stage
from msrl_accel.pipeline.inference import (
    NUMBERS,
    SIZES,
    InferenceServer,
    inference_metrics,
)
from msrl_accel.pipeline.placement import Place
from msrl_accel.pipeline.watchdog import START_SECONDS, WorkerPool
from msrl_accel.pipeline.worker import (
    GraphEngine,
    OnnxEngine,
    ServerEngine,
    heartbeat_of,
    run_guarded,
)
from msrl_accel.publish import StoreHandle, WeightStore
from msrl_accel.runtime.base import PolicyRuntime
from msrl_accel.runtime.batch_invariant import BatchInvariantRuntime
from msrl_accel.shared_memory import BlockHandle, SharedBlock
from msrl_accel.spaces import PolicySpec


@dataclass(frozen=True)
class ServerTask:
    """All that the server's process is given."""

    name: str
    engine: OnnxEngine | GraphEngine
    spec: PolicySpec
    batch_invariant: bool
    rows: int
    """That all clients together may ask for."""
    weights: StoreHandle
    numbers: BlockHandle
    """`NUMBERS`, and a last one that ends the server."""
    heartbeats: BlockHandle
    report: str
    place: Place


def run_server(task: ServerTask) -> None:
    """Target of the process."""
    run_guarded(task.report, task.place, lambda: _serve(task))


def _serve(task: ServerTask) -> None:
    heartbeat = heartbeat_of(SharedBlock.attach(task.heartbeats), 0)
    heartbeat.beat(Stage.START)
    numbers = SharedBlock.attach(task.numbers).memory.view(np.float64)
    runtime: PolicyRuntime = task.engine.runtime(task.spec)
    if task.batch_invariant:
        runtime = BatchInvariantRuntime(runtime)
    server = InferenceServer(
        runtime,
        task.name,
        WeightStore.attach(task.weights),
        sizes=sizes_for(task.rows),
        numbers=numbers[: len(NUMBERS)],
        beat=lambda: heartbeat.beat(Stage.START),  # until every size has been compiled
    )

    def beat() -> None:
        heartbeat.beat(Stage.INFERENCE)
        server.stopping = bool(numbers[-1])

    server.beat = beat
    try:
        server.run()
    finally:
        server.close()


def sizes_for(rows: int) -> tuple[int, ...]:
    """Of `SIZES`, those up to the first that holds so many rows."""
    enough = next((size for size in SIZES if size >= rows), SIZES[-1])
    return tuple(size for size in SIZES if size <= enough)


class InferenceProcess:
    """A server's process; replaced when it dies, raises or hangs.

    Args:
        engine, spec, batch_invariant, rows, weights, place: as of `ServerTask`.
        env_id: for messages.
        hang_seconds, max_restarts: as of `WorkerPool`.
    """

    def __init__(
        self,
        engine: OnnxEngine | GraphEngine,
        spec: PolicySpec,
        batch_invariant: bool,
        rows: int,
        weights: StoreHandle,
        place: Place,
        *,
        env_id: str,
        hang_seconds: float,
        max_restarts: int,
    ) -> None:
        self.name = f"msrl_inference_{secrets.token_hex(8)}"
        self._hang_seconds = hang_seconds
        self._block = SharedBlock.create("inference_numbers", 8 * (len(NUMBERS) + 1))
        self._numbers = self._block.memory.view(np.float64)
        self._seen = self._numbers[:-1].copy()

        def task(index: int, attempt: int, report: str) -> ServerTask:
            return ServerTask(
                self.name,
                engine,
                spec,
                batch_invariant,
                rows,
                weights,
                self._block.handle,
                self._pool.heartbeats,
                report,
                place,
            )

        self._pool = WorkerPool(
            1,
            run_server,
            task,
            lambda index: None,
            env_id=env_id,
            hang_seconds=hang_seconds,
            max_restarts=max_restarts,
            label="inference server",
        )

    @property
    def restarts(self) -> int:
        return self._pool.restarts

    @property
    def pids(self) -> list[int]:
        return self._pool.pids

    def client(self) -> ServerEngine:
        """What workers roll out with; they wait for a server that is being replaced."""
        return ServerEngine(self.name, START_SECONDS + self._hang_seconds)

    def start(self) -> None:
        self._pool.start()

    def supervise(self) -> None:
        """Replace a server that died or hangs; EnvError where it failed too often in a row."""
        if self._numbers[2] > self._seen[2]:
            self._pool.delivered(0)
        self._pool.supervise()

    def metrics(self) -> dict[str, float]:
        """Since the last call."""
        now = self._numbers[:-1].copy()
        before, self._seen = self._seen, now
        return {**inference_metrics(before, now), "inference/restarts": float(self.restarts)}

    def close(self) -> None:
        """End the process; closing twice is allowed."""
        if len(self._numbers):
            self._numbers[-1] = 1.0
            self._pool.close()
            self._numbers = np.empty(0)  # no view of the block is left
            self._block.close()
