"""Asynchronous on-policy training: workers collect while the learner trains (docs/async.md)."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from msrl_accel import envs
from msrl_accel.algorithms.base import OnPolicyAlgorithm
from msrl_accel.config import TrainConfig
from msrl_accel.envs.base import VectorEnv
from msrl_accel.errors import EnvError, PipelineError
from msrl_accel.evaluation import Evaluation, evaluate_run_policy
from msrl_accel.metrics import EpisodeStats
from msrl_accel.pipeline.inference_process import InferenceProcess
from msrl_accel.pipeline.learner_stages import LearnerStages
from msrl_accel.pipeline.memory import MemoryWatch
from msrl_accel.pipeline.placement import Place, places, together
from msrl_accel.pipeline.shared_queue import SharedQueue, Slot
from msrl_accel.pipeline.slots import (
    collection_metrics,
    draw_slot,
    join_columns,
    slot_episodes,
    slot_layout,
    slot_numbers,
    slot_trajectories,
    slot_version,
    take_columns,
)
from msrl_accel.pipeline.staleness import StalenessManager, lag_learning_rate
from msrl_accel.pipeline.stepping import Layout, check_config, lay_out
from msrl_accel.pipeline.timeline import Timeline
from msrl_accel.pipeline.trainer import Trainer
from msrl_accel.pipeline.watchdog import START_SECONDS, WorkerPool
from msrl_accel.pipeline.worker import (
    GraphEngine,
    OnnxEngine,
    RewardScaling,
    WorkerTask,
    run_worker,
)
from msrl_accel.publish import WeightStore
from msrl_accel.rollout_engine import CALLS_PER_REBUILD
from msrl_accel.run import Run
from msrl_accel.trajectories import Trajectories

logger = logging.getLogger("msrl_accel")

_POLL_SECONDS = 0.1
_SUPERVISE_SECONDS = 0.05


class AsyncTrainer(Trainer):
    """Workers -> bounded queue in shared memory -> learner -> published weights -> workers.

    One update takes `n_envs` trajectories of `n_steps` steps, as in synchronous training, from
    whichever environments have finished one. A version of the policy is one update.
    """

    algorithm: OnPolicyAlgorithm
    staleness: StalenessManager
    queue: SharedQueue
    store: WeightStore
    pool: WorkerPool

    def __init__(self, config: TrainConfig, run: Run) -> None:
        check_config(config)
        self.options = config.pipeline
        self.stack = ExitStack()
        learner, self.worker_places = places(config)
        # Before MindSpore starts its threads and opens its device.
        self.stack.enter_context(learner.applied())
        try:
            super().__init__(config, run)
        except BaseException:
            self.stack.close()
            raise

    def make_env(self) -> VectorEnv:
        """One environment, to know its spaces and whether it waits; the workers have their own."""
        config = self.config
        return envs.make_vector(config.env, 1, kwargs=config.env_kwargs, backend="sync")

    def build(self) -> None:
        config = self.config
        self.layout: Layout = lay_out(config, self.env)
        self.episodes = EpisodeStats(config.n_envs)
        self.shuffle_rng = np.random.default_rng(np.random.SeedSequence(config.seed).spawn(2)[1])
        self.version = 0
        self.attempt = 0
        self.reward_statistics: dict[str, list[float]] = {}
        """Mean, variance and count of each worker's discounted returns."""
        self.left: Trajectories | None = None
        """What the last update did not take of a slot."""
        self.started = False
        self.server: InferenceProcess | None = None
        self.timeline = Timeline(self.run.path, self.options.trace)
        self.stack.callback(self.timeline.close)
        self.stages = LearnerStages(self.timeline, self.options.hang_seconds)
        self.stack.callback(self.stages.close)
        self.memory = MemoryWatch(self._shrink)
        self.supervise_at = 0.0
        self.env.close()

    def train(self) -> str | None:
        try:
            return super().train()
        except (EnvError, PipelineError) as error:
            if self.step == 0:
                raise
            if self.step != self.saved_step:
                self.save()
            raise type(error)(
                f"{error}\nThe checkpoint of step {self.saved_step:,} is kept; to go on from it: "
                f"python -m msrl_accel.train --resume {self.run.path}"
            ) from error
        finally:
            self._end_workers()  # the closing evaluation has the machine to itself

    def iterate(self) -> dict[str, float]:
        """One update on the next trajectories that arrive; nothing if a stop was asked for."""
        if not self.started:
            self._start()
        start, stage = time.monotonic(), self.stages
        stage.restart()
        with stage("wait", watched=False):
            slots = self._gather()
        if not slots:
            return {}
        with stage("take"):
            batch, collection = self._take(slots)
        with stage("update"):
            losses = self._update(batch)
            if self.statistics is not None:
                self.statistics.update(tuple(map(batch.flat, batch.observations)))
        with stage("publish"):
            self._publish()
        self.memory.check()
        end = time.monotonic()
        steps = int(batch.valid.sum())
        self.step += steps
        self.iteration += 1
        depth = self.queue.stats()["ready"] / self.layout.slots_per_update
        staleness = self.staleness.metrics()
        self.timeline.count("queue depth", end, depth)
        self.timeline.count("version lag", end, staleness["lag_mean"])
        return {
            **self.episodes.summary(),
            **{f"{self.config.algo}/{name}": value for name, value in losses.items()},
            **{f"staleness/{name}": x for name, x in staleness.items()},
            **collection,
            **({} if self.server is None else self.server.metrics()),
            "pipeline/version": float(self.version),
            "pipeline/queue_depth": depth,
            "pipeline/learner_idle_share": stage.seconds["wait"] / (end - start),
            "pipeline/restarts": float(self.pool.restarts),
            "pipeline/discarded": float(self.queue.reclaimed),
            "pipeline/memory_share": self.memory.share,
            **{f"time/{name}_seconds": seconds for name, seconds in stage.seconds.items()},
            "time/steps_per_second": steps / (end - start),
        }

    def _update(self, batch: Trajectories) -> dict[str, float]:
        """Train on a batch, weighed by its lag; nothing where all of it is too old."""
        weights = self.staleness.weigh(batch.versions)
        if not (weights * batch.valid).any():
            return {}
        lag = float(self.staleness.lag(batch.versions).mean())
        return self.algorithm.update(
            batch,
            self.step / self.config.total_steps,
            self.shuffle_rng,
            sample_weights=None if (weights == 1).all() else weights,
            learning_rate_scale=lag_learning_rate(1.0, lag, self.options.lag_discount),
        )

    def _start(self) -> None:
        """Make the queue and the weight store, and start the workers."""
        config, options, layout = self.config, self.options, self.layout
        self.staleness = StalenessManager(
            options.max_staleness,
            config.n_envs,
            group=layout.columns,
            quota=layout.quota,
            version=self.version,
            stale=options.stale,
        )
        self.queue_size = options.queue_size
        arrays = self.algorithm.policy.arrays()
        self._connect(arrays)
        self.store.publish(self.version, arrays)
        if options.inference == "server":
            self.server = self._make_server()
            self.stack.callback(self.server.close)
            self.server.start()
        self.pool = self._make_pool()
        self.started = True
        self.stack.callback(self._end_workers)
        self.pool.start()

    def _connect(self, arrays: dict[str, np.ndarray]) -> None:
        """Make what trajectories come and weights go through."""
        layout = self.layout
        self.queue = SharedQueue(
            slot_layout(self.spec, self.algorithm.n_steps, layout.columns),
            layout.slots(self.queue_size),
            self.staleness,
        )
        self.stack.callback(self.queue.close)
        self.store = WeightStore.create(arrays)
        self.stack.callback(self.store.close)

    def _make_pool(self) -> WorkerPool:
        config, options = self.config, self.options
        return WorkerPool(
            options.workers,
            run_worker,
            self._task,
            self._worker_ended,
            env_id=config.env,
            hang_seconds=options.hang_seconds,
            max_restarts=options.max_restarts,
        )

    def _make_server(self) -> InferenceProcess:
        config = self.config
        return InferenceProcess(
            self._worker_engine(),
            self.spec,
            config.runtime.batch_invariant,
            self.layout.workers * self.layout.envs_per_worker,
            self.store.handle,
            together(self.worker_places),
            env_id=config.env,
            hang_seconds=self.options.hang_seconds,
            max_restarts=self.options.max_restarts,
        )

    def _task(self, index: int, attempt: int, report: str) -> WorkerTask:
        return replace(
            self._make_task(index, attempt, self.worker_places[index]),
            weights=self.store.handle,
            queue=self.queue.producer(f"worker {index}"),
            heartbeats=self.pool.heartbeats,
            report=report,
        )

    def _make_task(self, index: int, attempt: int, place: Place) -> WorkerTask:
        """A worker's task, without the ways in which it hears and is heard."""
        config, apart = self.config, self.layout.apart
        return WorkerTask(
            index=index,
            attempt=self.attempt + attempt,
            seed=config.seed,
            env=config.env,
            env_kwargs=config.env_kwargs,
            backend="threads" if apart else config.vectorization,
            hang_seconds=self.options.hang_seconds,
            n_envs=self.layout.envs_per_worker,
            n_steps=self.algorithm.n_steps,
            apart=apart,
            engine=self._worker_engine() if self.server is None else self.server.client(),
            batch_invariant=config.runtime.batch_invariant,
            place=place,
            rewards=RewardScaling.following(config, index, self.reward_statistics),
        )

    def _worker_engine(self) -> OnnxEngine | GraphEngine:
        if self.engine.kind == "graph":
            return GraphEngine(self.config)
        often = self.layout.apart or self.algorithm.n_steps <= CALLS_PER_REBUILD
        return OnnxEngine(self.engine.model, weights_as_inputs=often)

    def _worker_ended(self, index: int) -> None:
        self.queue.reclaim(f"worker {index}")
        self.timeline.mark(f"worker {index}", "replaced")

    def _gather(self) -> list[Slot]:
        """Slots of one update; none once a stop was asked for.

        Raises:
            EnvError: a worker failed too often.
            PipelineError: no worker fills a slot, nor starts to for a long time.
        """
        slots: list[Slot] = []
        missing = self.config.n_envs - (0 if self.left is None else self.left.valid.shape[1])
        stuck_since = time.monotonic()
        while missing > 0:
            slot = self.queue.try_get(_POLL_SECONDS)
            self._supervise()
            if self.stopping:
                return []
            if slot is not None:
                slots.append(slot)
                missing -= self.layout.columns
                self.pool.delivered(_worker_index(slot))
            if slot is not None or self.queue.stats()["filling"]:
                stuck_since = time.monotonic()  # the watchdog knows whether those are alive
            elif time.monotonic() - stuck_since > self._patience:
                raise PipelineError(
                    f"rollout: no trajectory was begun for {self._patience:g} s; "
                    f"{self.pool.describe()}"
                )
        # The oldest first: what is left over must not get older than the bound. Then by worker: the
        # same order in every run where the lag leaves no choice (max_staleness 0).
        return sorted(slots, key=lambda slot: (slot_version(slot), _worker_index(slot)))

    def _supervise(self) -> None:
        if time.monotonic() >= self.supervise_at:
            if self.server is not None:
                self.server.supervise()
            self.pool.supervise()
            self.supervise_at = time.monotonic() + _SUPERVISE_SECONDS

    @property
    def _patience(self) -> float:
        """Seconds that workers may take to fail, be restarted, and begin a trajectory."""
        return START_SECONDS + self.options.hang_seconds * (1 + self.options.max_restarts)

    def _take(self, slots: list[Slot]) -> tuple[Trajectories, dict[str, float]]:
        """One batch from the slots, which are given back, and what the workers say of it."""
        parts = [slot_trajectories(slot) for slot in slots]
        joined = join_columns(parts if self.left is None else [self.left, *parts])
        n = self.config.n_envs
        rest = joined.valid.shape[1] - n
        batch = take_columns(joined, slice(n)) if rest else joined
        self.left = take_columns(joined, slice(n, None)) if rest else None
        numbers = [slot_numbers(slot) for slot in slots]
        for slot, x in zip(slots, numbers):
            episodes = slot_episodes(slot)
            self.episodes.add(episodes[:, 0], episodes[:, 1])
            self.reward_statistics[str(_worker_index(slot))] = [
                x.reward_mean,
                x.reward_variance,
                x.reward_count,
            ]
            draw_slot(self.timeline, slot.producer, x)
            self.queue.release(slot)
        steps = self.algorithm.n_steps * self.layout.columns
        return batch, collection_metrics(numbers, steps, self.options.workers)

    def _publish(self) -> None:
        self.version += 1
        if self.version % self.options.publish_interval == 0:
            self.store.publish(self.version, self.algorithm.policy.arrays())
        self.staleness.version = self.version
        self.queue.admit_again()

    def _shrink(self) -> str:
        """Halve the queue."""
        before, self.queue_size = self.queue_size, max(self.queue_size // 2, 1)
        if self.queue_size == before:
            return ""
        self.queue.shrink(self.layout.slots(before) - self.layout.slots(self.queue_size))
        return f"garbage collected, queue made smaller, from {before} to {self.queue_size} updates"

    def evaluate(self, deterministic: bool) -> Evaluation:
        self.engine.publish(self.version)
        config = self.config
        if self.layout.apart:  # stepped in turn, each would wait for all others
            config = config.replace(vectorization="threads")
        return evaluate_run_policy(
            self.engine.runtime,
            config,
            config.evaluation.episodes,
            deterministic=deterministic,
        )

    def parts_state(self) -> dict[str, Any]:
        return {
            "shuffle_rng": self.shuffle_rng.bit_generator.state,
            "episodes": self.episodes.state(),
            "version": self.version,
            "attempt": self.attempt + 1 + (self.pool.restarts if self.started else 0),
            "reward_statistics": self.reward_statistics,
        }

    def restore_parts(self, state: dict[str, Any], reset_seed: int) -> bool:
        self.shuffle_rng.bit_generator.state = state["shuffle_rng"]
        self.episodes.restore(state["episodes"])
        self.version = int(state["version"])
        # Streams that no worker has drawn from: new episodes must not repeat those before.
        self.attempt = int(state["attempt"])
        self.reward_statistics = {k: list(v) for k, v in state["reward_statistics"].items()}
        return False

    def _end_workers(self) -> None:
        """Wake the workers by closing the queue they wait for, then end them."""
        if self.started:
            self.queue.close()
            self.pool.close()
            if self.server is not None:
                self.server.close()

    def close(self) -> None:
        self.stack.close()
        super().close()


def _worker_index(slot: Slot) -> int:
    return int(slot.producer.split()[1])
