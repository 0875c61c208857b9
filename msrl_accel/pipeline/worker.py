"""A process that collects: environments, a runtime that follows the learner's weights, a queue."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import parent_process
from typing import TYPE_CHECKING, Any

import numpy as np

from msrl_accel import envs
from msrl_accel.envs.base import VectorEnv
from msrl_accel.envs.threads import ThreadVectorEnv
from msrl_accel.normalize import RewardNormalizer
from msrl_accel.pipeline.chunks import ChunkCollector
from msrl_accel.pipeline.following import FollowingRuntime
from msrl_accel.pipeline.heartbeat import NUMBERS, Heartbeat, Stage
from msrl_accel.pipeline.placement import Place
from msrl_accel.pipeline.shared_queue import Producer, ProducerHandle, QueueClosed, Slot
from msrl_accel.pipeline.slots import SlotNumbers, slot_trajectories, write_numbers
from msrl_accel.publish import StoreHandle, WeightStore
from msrl_accel.rollout import Collector
from msrl_accel.runtime.base import PolicyRuntime
from msrl_accel.runtime.batch_invariant import BatchInvariantRuntime
from msrl_accel.shared_memory import BlockHandle, SharedBlock
from msrl_accel.spaces import PolicySpec

if TYPE_CHECKING:
    from msrl_accel.config import TrainConfig

DUMP_SIGNAL = signal.SIGUSR1
"""Makes a worker write the stacks of its threads into its report."""

_POLL_SECONDS = 0.2
_TILES = (8, 32, 128, 512)
_SIGKILL_WITH_PARENT = 1  # prctl(PR_SET_PDEATHSIG)


@dataclass(frozen=True)
class OnnxEngine:
    """Rolls out with ONNX Runtime."""

    model: bytes
    weights_as_inputs: bool

    def runtime(self, spec: PolicySpec) -> PolicyRuntime:
        from msrl_accel.runtime.onnx import OnnxRuntime

        return OnnxRuntime(self.model, spec, version=-1, weights_as_inputs=self.weights_as_inputs)


@dataclass(frozen=True)
class GraphEngine:
    """Rolls out with the training graph."""

    config: TrainConfig

    def runtime(self, spec: PolicySpec) -> PolicyRuntime:
        from msrl_accel.algorithms import algorithm_class
        from msrl_accel.device import set_up
        from msrl_accel.runtime.graph import GraphRuntime

        set_up(self.config.runtime)
        policy = algorithm_class(self.config.algo).build_policy(self.config, spec)
        return GraphRuntime(policy, version=-1)


@dataclass(frozen=True)
class ServerEngine:
    """Asks the inference server of this host."""

    name: str
    patience: float
    """Seconds for an answer, and for a server that has ended to be replaced."""

    def client(self, spec: PolicySpec, rows: int, heartbeat: Heartbeat) -> PolicyRuntime:
        from msrl_accel.pipeline.inference_client import InferenceClient

        def beat() -> None:
            heartbeat.beat(Stage.INFERENCE)  # the server is watched itself

        return InferenceClient(spec, self.name, rows, patience=self.patience, beat=beat)


@dataclass(frozen=True)
class RewardScaling:
    """How rewards are normalised."""

    gamma: float
    clip: float
    statistics: tuple[float, float, float] | None
    """Mean, variance and count to go on with."""

    @classmethod
    def following(
        cls, config: TrainConfig, index: int, known: dict[str, list[float]]
    ) -> RewardScaling | None:
        """Of a worker that goes on where its place in the run was, else from who saw most.

        Args:
            known: mean, variance and count by worker.
        """
        if not config.reward.normalize:
            return None
        found = known.get(str(index)) or max(known.values(), key=lambda s: s[2], default=None)
        return cls(
            gamma=getattr(config.algorithm, "gamma", 0.99),
            clip=config.reward.clip,
            statistics=None if found is None else (found[0], found[1], found[2]),
        )

    def normalizer(self, n_envs: int) -> RewardNormalizer:
        normalizer = RewardNormalizer(n_envs, self.gamma, self.clip)
        if self.statistics is not None:
            normalizer.statistics.restore(dict(zip(("mean", "var", "count"), self.statistics)))
        return normalizer


@dataclass(frozen=True)
class WorkerTask:
    """All that a worker's process is given. Unpickling it must not import MindSpore, unless the
    worker rolls out with it.
    """

    index: int
    attempt: int
    """How often it was started before; each attempt draws from another random stream."""
    seed: int
    env: str
    env_kwargs: dict[str, Any]
    backend: str
    """As of `make_vector`."""
    hang_seconds: float
    n_envs: int
    """Environments of this worker."""
    n_steps: int
    apart: bool
    """Whether they step each at its own pace, and a slot holds one trajectory."""
    engine: OnnxEngine | GraphEngine | ServerEngine
    batch_invariant: bool
    place: Place
    rewards: RewardScaling | None
    weights: StoreHandle | None = None
    queue: ProducerHandle | None = None
    heartbeats: BlockHandle | None = None
    report: str = ""
    """File for the traceback of a failure, and for stacks when `DUMP_SIGNAL` comes."""


def run_worker(task: WorkerTask) -> None:
    """Target of the process."""

    def body() -> None:
        worker = Worker(task)
        try:
            worker.run()
        finally:
            worker.close()

    run_guarded(task.report, task.place, body)


def run_guarded(report_path: str, place: Place, body: Callable[[], None]) -> None:
    """Run a process of the pipeline: placed, ended with its parent, its failure reported."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the learner ends its workers itself
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    _end_with_parent()
    with open(report_path, "ab") as report:
        faulthandler.register(DUMP_SIGNAL, file=report, all_threads=True)
        try:
            place.apply()
            body()
        except QueueClosed:
            return
        except BaseException:
            report.write(traceback.format_exc().encode())
            report.flush()
            raise SystemExit(1) from None
        finally:
            faulthandler.unregister(DUMP_SIGNAL)


def _end_with_parent() -> None:
    """End this process when the learner has ended in any way."""
    if sys.platform == "linux":  # even while this process is stopped
        ctypes.CDLL(None).prctl(_SIGKILL_WITH_PARENT, signal.SIGKILL)

    def watch() -> None:
        parent = parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Worker:
    """Collects into slots of the queue until it is closed."""

    def __init__(self, task: WorkerTask) -> None:
        self.task = task
        self.heartbeat = self._open_heartbeat()
        self.heartbeat.beat(Stage.START)
        self.queue = self._open_queue()
        noise_seed, self.reset_seed = _seeds(task)
        self.env = self._make_env()
        spec = PolicySpec.from_spaces(self.env.observation_space, self.env.action_space)
        store = None if isinstance(task.engine, ServerEngine) else self._open_store()
        self.runtime = FollowingRuntime(self._make_runtime(spec), store, self.heartbeat)
        self.normalizer = task.rewards and task.rewards.normalizer(task.n_envs)
        kind: Any = ChunkCollector if task.apart else Collector
        rng = np.random.default_rng(noise_seed)
        self.collector: Collector | ChunkCollector = kind(
            self.env, self.runtime, task.n_steps, rng, self.normalizer
        )
        self.collector.episodes.log = []
        self.idle = 0.0
        self.committed_at = time.monotonic()

    def run(self) -> None:
        """Collect until the queue is closed."""
        self.heartbeat.beat(Stage.RESET)
        self.collector.reset(self.reset_seed)
        self.committed_at = time.monotonic()
        if isinstance(self.collector, ChunkCollector):
            self._run_apart(self.collector)
        else:
            self._run_together(self.collector)

    def close(self) -> None:
        self.env.close()
        self.queue.close()

    def _open_heartbeat(self) -> Heartbeat:
        assert self.task.heartbeats is not None
        return heartbeat_of(SharedBlock.attach(self.task.heartbeats), self.task.index)

    def _open_queue(self) -> Producer:
        assert self.task.queue is not None
        return Producer(self.task.queue)

    def _open_store(self) -> WeightStore:
        assert self.task.weights is not None
        return WeightStore.attach(self.task.weights)

    def _run_together(self, collector: Collector) -> None:
        """A slot holds the trajectories of all environments."""
        while True:
            asked = time.monotonic()
            slot = None
            while slot is None:
                slot = self._wait_for_slot()
            begin = time.monotonic()
            collector.collect(slot_trajectories(slot))
            self._commit(slot, -1, begin, begin - asked)

    def _run_apart(self, collector: ChunkCollector) -> None:
        """A slot holds one trajectory; an environment without one rests."""
        resting = deque(range(self.task.n_envs))
        slots: dict[int, Slot] = {}
        begin = np.zeros(self.task.n_envs)
        ended = np.full(self.task.n_envs, time.monotonic())
        self.queue.ask(self.task.n_envs)
        while True:
            starting = []
            while resting:
                slot = self.queue.try_acquire(0) if slots else self._wait_for_slot()
                if slot is None:
                    break
                slots[resting[0]] = slot
                starting.append(resting.popleft())
            if starting:
                begin[starting] = time.monotonic()
                collector.start(np.array(starting))
            if not slots:
                continue
            for i in collector.advance():
                slot = slots.pop(i)
                collector.take(i, slot_trajectories(slot))
                self._commit(slot, i, begin[i], begin[i] - ended[i])
                ended[i] = time.monotonic()
                self.queue.ask()
                resting.append(i)

    def _wait_for_slot(self) -> Slot | None:
        """A slot if there is one within a moment, in which the worker has nothing else to do."""
        start = self.heartbeat.beat(Stage.QUEUE)
        slot = self.queue.try_acquire(_POLL_SECONDS)
        self.idle += self.heartbeat.beat(Stage.STEP) - start
        return slot

    def _commit(self, slot: Slot, environment: int, begin: float, blocked: float) -> None:
        episodes = self.collector.episodes
        assert episodes.log is not None
        end, calls = time.monotonic(), self.runtime.take_calls()
        statistics = self.normalizer and self.normalizer.statistics
        numbers = SlotNumbers(
            environment=environment,
            begin=begin,
            end=end,
            blocked=blocked,
            elapsed=end - self.committed_at,
            idle=self.idle,
            act_seconds=calls.seconds,
            act_slowest=calls.slowest,
            act_calls=calls.count,
            act_rows=calls.rows,
            reward_mean=float(statistics.mean) if statistics else 0.0,
            reward_variance=float(statistics.var) if statistics else 0.0,
            reward_count=statistics.count if statistics else 0.0,
            episodes=0,
        )
        episodes.log = write_numbers(slot, numbers, episodes.log)
        self.committed_at, self.idle = end, 0.0
        self.queue.commit(slot)

    def _make_env(self) -> VectorEnv:
        task = self.task
        env = envs.make_vector(
            task.env,
            task.n_envs,
            kwargs=task.env_kwargs,
            backend=task.backend,
            timeout=task.hang_seconds,
        )
        assert isinstance(env, ThreadVectorEnv) or not task.apart
        return env

    def _make_runtime(self, spec: PolicySpec) -> PolicyRuntime:
        task = self.task
        if isinstance(task.engine, ServerEngine):
            return task.engine.client(spec, task.n_envs, self.heartbeat)
        runtime = task.engine.runtime(spec)
        if task.batch_invariant:
            return BatchInvariantRuntime(runtime)
        if task.apart and isinstance(task.engine, GraphEngine):
            # It compiles anew for each number of rows.
            largest = next((t for t in _TILES if t >= task.n_envs), _TILES[-1])
            return BatchInvariantRuntime(runtime, tiles=[t for t in _TILES if t <= largest])
        return runtime


def heartbeat_of(block: SharedBlock, index: int) -> Heartbeat:
    """A worker's heartbeat in the block of all."""
    numbers = block.memory.view(np.float64)
    return Heartbeat(numbers[index * NUMBERS : (index + 1) * NUMBERS])


def _seeds(task: WorkerTask) -> tuple[np.random.SeedSequence, int]:
    """Of the noise and of the environments; the first worker's are those of synchronous training.

    Others, and later attempts, have streams of their own.
    """
    seed = task.seed
    if task.index == task.attempt == 0:
        return np.random.SeedSequence(seed).spawn(2)[0], seed
    own = np.random.SeedSequence([seed, task.index, task.attempt])
    noise, environments = own.spawn(2)
    return noise, int(environments.generate_state(1)[0])
