"""A process that collects: environments, a runtime that follows the learner's weights, a queue."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass, fields
from multiprocessing import parent_process
from typing import Any

import numpy as np

from msrl_accel import envs
from msrl_accel.config import TrainConfig
from msrl_accel.envs.base import VectorEnv
from msrl_accel.envs.threads import ThreadVectorEnv
from msrl_accel.normalize import RewardNormalizer
from msrl_accel.pipeline.chunks import ChunkCollector
from msrl_accel.pipeline.placement import Place
from msrl_accel.pipeline.shared_queue import Producer, ProducerHandle, QueueClosed, Slot
from msrl_accel.publish import StoreHandle, WeightStore
from msrl_accel.rollout import Collector
from msrl_accel.runtime.base import ActResult, PolicyRuntime
from msrl_accel.shared_memory import ArraySpec, BlockHandle, SharedBlock
from msrl_accel.spaces import Observations, PolicySpec
from msrl_accel.trajectories import Trajectories

MAX_EPISODES = 512
"""Ended episodes that one slot reports; more are reported with the next ones."""
STATS = ("begin", "end", "blocked", "act_seconds", "act_calls", "act_rows", "episodes")
"""Numbers of one slot: monotonic times of its collection, seconds waited for it, inference."""

_POLL_SECONDS = 0.2
_WAITING_SHARE = 0.5
_PROBE_STEPS = 5


@dataclass(frozen=True)
class WorkerTask:
    """All that a worker's process is given."""

    index: int
    attempt: int
    """How often it was started before; each attempt draws from another random stream."""
    config: TrainConfig
    n_steps: int
    columns: int
    """Trajectories of one slot."""
    engine: str
    """'onnx' or 'graph'."""
    model: bytes
    """Of 'onnx'."""
    weights: StoreHandle
    queue: ProducerHandle
    heartbeats: BlockHandle
    place: Place


def slot_layout(spec: PolicySpec, n_steps: int, columns: int) -> list[ArraySpec]:
    """Arrays of one slot of the queue: trajectories [n_steps, columns], episodes and numbers."""
    empty = Trajectories.empty(spec, n_steps, columns)
    arrays = {f.name: getattr(empty, f.name) for f in fields(Trajectories)}
    observations = arrays.pop("observations")
    arrays.update({f"observations/{i}": x for i, x in enumerate(observations)})
    arrays["episodes"] = np.empty((MAX_EPISODES, 2))  # return and length
    arrays["stats"] = np.empty(len(STATS))
    return [ArraySpec.of(name, array) for name, array in arrays.items()]


def slot_trajectories(slot: Slot) -> Trajectories:
    """The trajectories in a slot, as views."""
    names = [f.name for f in fields(Trajectories) if f.name != "observations"]
    count = sum(name.startswith("observations/") for name in slot.arrays)
    observations = tuple(slot.arrays[f"observations/{i}"] for i in range(count))
    return Trajectories(observations=observations, **{n: slot.arrays[n] for n in names})


class FollowingRuntime:
    """A policy that takes newer weights before it acts, and shows that the worker is alive.

    Args:
        runtime: acts.
        store: where newer weights come from.
        heartbeat: one number, set to the monotonic time at every call.
    """

    def __init__(self, runtime: PolicyRuntime, store: WeightStore, heartbeat: np.ndarray) -> None:
        self.runtime = runtime
        self.spec = runtime.spec
        self.version = runtime.version
        self._store = store
        self._heartbeat = heartbeat
        self.seconds, self.calls, self.rows = 0.0, 0, 0

    def act(self, observations: Observations, noise: np.ndarray) -> ActResult:
        newer = self._store.read(newer_than=self.version)
        if newer is not None:
            self.version, arrays = newer
            self.runtime.load_weights(self.version, arrays)
        start = time.monotonic()
        result = self.runtime.act(observations, noise)
        self._heartbeat[0] = end = time.monotonic()
        self.seconds += end - start
        self.calls += 1
        self.rows += len(noise)
        return result

    def load_weights(self, version: int, arrays: Any) -> None:
        self.runtime.load_weights(version, arrays)
        self.version = version

    def take_counts(self) -> tuple[float, int, int]:
        """Seconds, calls and rows since the last time."""
        counts = (self.seconds, self.calls, self.rows)
        self.seconds, self.calls, self.rows = 0.0, 0, 0
        return counts

    def close(self) -> None:
        self.runtime.close()


def run_worker(task: WorkerTask, report: Any) -> None:
    """Target of the process. A failure's traceback goes to the pipe `report`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the learner ends its workers itself
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        task.place.apply()
        worker = Worker(task)
        try:
            worker.run()
        finally:
            worker.close()
    except QueueClosed:
        return
    except BaseException:
        report.send_bytes(traceback.format_exc().encode())
        raise SystemExit(1) from None


def _end_with_parent() -> None:
    """End this process when the learner has ended in any way."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class Worker:
    """Collects into slots of the queue until it is closed."""

    def __init__(self, task: WorkerTask) -> None:
        self.task = task
        block = SharedBlock.attach(task.heartbeats)
        self.heartbeat = block.memory.view(np.float64)[task.index : task.index + 1]
        self.heartbeat[0] = time.monotonic()
        self.queue = Producer(task.queue)
        self.store = WeightStore.attach(task.weights)
        config, noise_seed, self.reset_seed = task.config, *_seeds(task)
        self.env = self._make_env()
        spec = PolicySpec.from_spaces(self.env.observation_space, self.env.action_space)
        self.runtime = FollowingRuntime(self._make_runtime(spec), self.store, self.heartbeat)
        rng = np.random.default_rng(noise_seed)
        normalizer = None
        if config.reward.normalize:
            gamma = getattr(config.algorithm, "gamma", 0.99)
            normalizer = RewardNormalizer(self.env.num_envs, gamma, config.reward.clip)
        kind = ChunkCollector if isinstance(self.env, ThreadVectorEnv) else Collector
        self.collector = kind(self.env, self.runtime, task.n_steps, rng, normalizer)
        self.collector.episodes.log = []

    def run(self) -> None:
        """Collect until the queue is closed."""
        self.collector.reset(self.reset_seed)
        n, columns = self.env.num_envs, self.task.columns
        if isinstance(self.collector, ChunkCollector) or columns == n:
            while True:
                slot, blocked = self._acquire()
                begin = time.monotonic()
                self.collector.collect(slot_trajectories(slot))
                self._commit(slot, begin, blocked)
        while True:  # all environments together fill several slots
            slot, blocked = self._acquire()
            begin = time.monotonic()
            batch = self.collector.collect()
            for first in range(0, n, columns):
                if first:
                    slot, blocked = self._acquire()
                    begin = time.monotonic()
                _copy_columns(batch, first, slot_trajectories(slot))
                self._commit(slot, begin, blocked)

    def close(self) -> None:
        self.env.close()
        self.queue.close()

    def _acquire(self) -> tuple[Slot, float]:
        """A slot, and the seconds it was waited for."""
        start = time.monotonic()
        while True:
            self.heartbeat[0] = time.monotonic()
            slot = self.queue.try_acquire(_POLL_SECONDS)
            if slot is not None:
                return slot, time.monotonic() - start

    def _commit(self, slot: Slot, begin: float, blocked: float) -> None:
        log = self.collector.episodes.log
        assert log is not None
        reported, log[:] = log[:MAX_EPISODES], log[MAX_EPISODES:]
        if reported:
            slot.arrays["episodes"][: len(reported)] = reported
        seconds, calls, rows = self.runtime.take_counts()
        slot.arrays["stats"][:] = (
            begin,
            time.monotonic(),
            blocked,
            seconds,
            calls,
            rows,
            len(reported),
        )
        self.queue.commit(slot)

    def _make_env(self) -> VectorEnv:
        config = self.task.config
        options = config.pipeline

        def make(backend: str) -> VectorEnv:
            return envs.make_vector(
                config.env,
                options.envs_per_worker,
                kwargs=config.env_kwargs,
                backend=backend,
                timeout=options.hang_seconds,
            )

        if options.stepping == "apart":
            return make("threads")
        if options.stepping == "auto" and config.vectorization in ("auto", "threads"):
            env = envs.make_vector(config.env, 1, kwargs=config.env_kwargs, backend="auto")
            with env:
                if waits(env):
                    return make("threads")
        return make(config.vectorization)

    def _make_runtime(self, spec: PolicySpec) -> PolicyRuntime:
        task = self.task
        if task.engine == "onnx":
            from msrl_accel.runtime.onnx import OnnxRuntime

            return OnnxRuntime(task.model, spec, version=-1, weights_as_inputs=True)
        from msrl_accel.algorithms import algorithm_class
        from msrl_accel.device import set_up
        from msrl_accel.runtime.graph import GraphRuntime

        set_up(task.config.runtime)
        policy = algorithm_class(task.config.algo).build_policy(task.config, spec)
        return GraphRuntime(policy, version=-1)


def waits(env: VectorEnv) -> bool:
    """Whether a step spends most of its time waiting rather than computing."""
    env.reset(0)
    env.action_space.seed(0)
    wall, cpu = time.perf_counter(), time.thread_time()
    for _ in range(_PROBE_STEPS):
        env.step(np.stack([env.action_space.sample() for _ in range(env.num_envs)]))
    wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
    return wall / _PROBE_STEPS > 1e-3 and cpu < (1 - _WAITING_SHARE) * wall


def _seeds(task: WorkerTask) -> tuple[np.random.SeedSequence, int]:
    """Of the noise and of the environments; the first worker's are those of synchronous training.

    Others, and later attempts, have streams of their own.
    """
    seed = task.config.seed
    if task.index == task.attempt == 0:
        return np.random.SeedSequence(seed).spawn(2)[0], seed
    own = np.random.SeedSequence([seed, task.index, task.attempt])
    noise, environments = own.spawn(2)
    return noise, int(environments.generate_state(1)[0])


def _copy_columns(source: Trajectories, first: int, target: Trajectories) -> None:
    columns = slice(first, first + target.valid.shape[1])
    for f in fields(Trajectories):
        if f.name != "observations":
            getattr(target, f.name)[...] = getattr(source, f.name)[:, columns]
    for a, b in zip(target.observations, source.observations):
        a[...] = b[:, columns]
