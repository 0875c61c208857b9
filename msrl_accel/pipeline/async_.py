"""Asynchronous on-policy training: workers collect while the learner trains (docs/async.md)."""

from __future__ import annotations

import math
import time
from dataclasses import fields
from typing import Any

import numpy as np

from msrl_accel import envs
from msrl_accel.algorithms.base import OnPolicyAlgorithm
from msrl_accel.envs.base import VectorEnv
from msrl_accel.envs.workers import stop_if_importing_main
from msrl_accel.errors import ConfigError, PipelineError
from msrl_accel.metrics import EpisodeStats
from msrl_accel.pipeline.placement import learner_place, worker_place
from msrl_accel.pipeline.shared_queue import SharedQueue, Slot
from msrl_accel.pipeline.staleness import StalenessManager, lag_learning_rate
from msrl_accel.pipeline.timeline import Timeline
from msrl_accel.pipeline.trainer import Trainer
from msrl_accel.pipeline.watchdog import START_SECONDS, WorkerPool
from msrl_accel.pipeline.worker import STATS, WorkerTask, run_worker, slot_layout, slot_trajectories
from msrl_accel.publish import WeightStore
from msrl_accel.trajectories import Trajectories

_POLL_SECONDS = 0.1


class AsyncTrainer(Trainer):
    """Workers -> bounded queue in shared memory -> learner -> published weights -> workers.

    One update takes `n_envs` trajectories of `n_steps` steps, as in synchronous training, from
    whichever environments have finished one. A version of the policy is one update.
    """

    algorithm: OnPolicyAlgorithm

    def make_env(self) -> VectorEnv:
        """One environment, for its spaces: those that train are in the workers."""
        stop_if_importing_main()
        config = self.config
        return envs.make_vector(config.env, 1, kwargs=config.env_kwargs, backend="sync")

    def build(self) -> None:
        config, options = self.config, self.config.pipeline
        if not isinstance(self.algorithm, OnPolicyAlgorithm):
            raise ConfigError(
                f"pipeline.mode = 'async': {config.algo} learns from a replay; use mode sync"
            )
        self.options = options
        self.episodes = EpisodeStats(config.n_envs)
        self.shuffle_rng = np.random.default_rng(np.random.SeedSequence(config.seed).spawn(2)[1])
        self.version = 0
        self.attempt = 0
        self.columns = math.gcd(config.n_envs, options.envs_per_worker)
        self.batch_slots = config.n_envs // self.columns
        self.queue: SharedQueue | None = None
        self.timeline = Timeline(self.run.path / "trace.json" if options.trace else None)

    def iterate(self) -> dict[str, float]:
        """One update on the next trajectories that arrive; nothing if a stop was asked for."""
        if self.queue is None:
            self._start()
        start = time.monotonic()
        slots = self._gather()
        if not slots:
            return {}
        gathered = time.monotonic()
        batch, collection = self._take(slots)
        versions = batch.versions
        weights = self.staleness.weigh(versions)
        lag = float(self.staleness.lag(versions).mean())
        losses: dict[str, float] = {}
        if (weights * batch.valid).any():
            losses = self.algorithm.update(
                batch,
                self.step / self.config.total_steps,
                self.shuffle_rng,
                sample_weights=None if (weights == 1).all() else weights,
                learning_rate_scale=lag_learning_rate(1.0, lag, self.options.lag_discount),
            )
        updated = time.monotonic()
        if self.statistics is not None:
            self.statistics.update(tuple(map(batch.flat, batch.observations)))
        self._publish()
        published = time.monotonic()
        steps = int(batch.valid.sum())
        self.step += steps
        self.iteration += 1
        total = published - start
        self.timeline.add("learner", "wait", start, gathered)
        self.timeline.add("learner", "update", gathered, updated)
        self.timeline.add("learner", "publish", updated, published)
        return {
            **self.episodes.summary(),
            **{f"{self.config.algo}/{name}": value for name, value in losses.items()},
            **{f"staleness/{name}": x for name, x in self.staleness.metrics().items()},
            **collection,
            "pipeline/queue_depth": float(self.queue_ready()),
            "pipeline/restarts": float(self.pool.restarts),
            "pipeline/learner_idle_share": (gathered - start) / total,
            "time/rollout_seconds": gathered - start,
            "time/update_seconds": updated - gathered,
            "time/publish_seconds": published - updated,
            "time/steps_per_second": steps / total,
        }

    def queue_ready(self) -> int:
        """Trajectory slots that wait for the learner."""
        assert self.queue is not None
        return self.queue.stats()["ready"]

    def _start(self) -> None:
        """Make the queue and the weight store, and start the workers."""
        options = self.options
        learner_place(options).apply()
        n_steps = self.algorithm.n_steps
        self.staleness = StalenessManager(
            options.max_staleness, self.batch_slots, version=self.version, stale=options.stale
        )
        self.queue = SharedQueue(
            slot_layout(self.spec, n_steps, self.columns),
            options.workers + self.batch_slots * options.queue_size,
            self.staleness,
        )
        arrays = self.algorithm.policy.arrays()
        self.store = WeightStore.create(arrays)
        self.store.publish(self.version, arrays)
        self.pool = WorkerPool(
            options.workers,
            run_worker,
            self._task,
            lambda index: self.queue and self.queue.reclaim(f"worker {index}"),
            hang_seconds=options.hang_seconds,
            max_restarts=options.max_restarts,
        )
        self.pool.start()

    def _task(self, index: int, attempt: int) -> WorkerTask:
        assert self.queue is not None
        return WorkerTask(
            index=index,
            attempt=self.attempt + attempt,
            config=self.config,
            n_steps=self.algorithm.n_steps,
            columns=self.columns,
            engine=self.engine.kind,
            model=self.engine.model,
            weights=self.store.handle,
            queue=self.queue.producer(f"worker {index}"),
            heartbeats=self.pool.heartbeats,
            place=worker_place(self.options, index),
        )

    def _gather(self) -> list[Slot]:
        """Slots of one update; none once a stop was asked for.

        Raises:
            PipelineError: none came for as long as workers may take to start and hang.
        """
        assert self.queue is not None
        slots: list[Slot] = []
        limit = self.options.hang_seconds * (1 + self.options.max_restarts) + START_SECONDS
        deadline = time.monotonic() + limit
        while len(slots) < self.batch_slots:
            slot = self.queue.try_get(_POLL_SECONDS)
            self.pool.supervise()
            if self.stopping:
                return []
            if slot is not None:
                slots.append(slot)
                self.pool.delivered(int(slot.producer.split()[1]))
                deadline = time.monotonic() + limit
            elif time.monotonic() > deadline:
                raise PipelineError(
                    f"rollout: no trajectory came for {limit:g} s though the workers are alive; "
                    f"lower {self.config.algo}.n_steps or raise pipeline.hang_seconds"
                )
        # The same order in every run where the lag leaves no choice (max_staleness 0).
        return sorted(slots, key=lambda slot: slot.producer)

    def _take(self, slots: list[Slot]) -> tuple[Trajectories, dict[str, float]]:
        """One batch from the slots, which are given back, and what the workers say of it."""
        assert self.queue is not None
        parts = [slot_trajectories(slot) for slot in slots]
        names = [f.name for f in fields(Trajectories) if f.name != "observations"]
        batch = Trajectories(
            observations=tuple(
                np.concatenate(x, axis=1) for x in zip(*(part.observations for part in parts))
            ),
            **{name: np.concatenate([getattr(p, name) for p in parts], axis=1) for name in names},
        )
        stats = np.array([slot.arrays["stats"] for slot in slots])
        for slot, row in zip(slots, stats):
            numbers = dict(zip(STATS, row))
            episodes = slot.arrays["episodes"][: int(numbers["episodes"])]
            self.episodes.add(episodes[:, 0], episodes[:, 1])
            self.timeline.add(slot.producer, "collect", numbers["begin"], numbers["end"])
            begin = numbers["begin"] - numbers["blocked"]
            self.timeline.add(slot.producer, "blocked", begin, numbers["begin"])
            self.queue.release(slot)
        return batch, _collection_metrics(dict(zip(STATS, stats.T)))

    def _publish(self) -> None:
        assert self.queue is not None
        self.version += 1
        if self.version % self.options.publish_interval == 0:
            self.store.publish(self.version, self.algorithm.policy.arrays())
        self.staleness.version = self.version
        self.queue.admit_again()

    def evaluate(self, deterministic: bool) -> Any:
        self.engine.publish(self.version)
        return super().evaluate(deterministic)

    def parts_state(self) -> dict[str, Any]:
        return {
            "shuffle_rng": self.shuffle_rng.bit_generator.state,
            "episodes": self.episodes.state(),
            "version": self.version,
            "attempt": self.attempt + 1 + (self.pool.restarts if self.queue is not None else 0),
        }

    def restore_parts(self, state: dict[str, Any], reset_seed: int) -> bool:
        self.shuffle_rng.bit_generator.state = state["shuffle_rng"]
        self.episodes.restore(state["episodes"])
        self.version = int(state["version"])
        # Streams that no worker has drawn from: new episodes must not repeat those before.
        self.attempt = int(state["attempt"])
        return False

    def close(self) -> None:
        if self.queue is not None:
            self.queue.close()
            self.pool.close()
            self.store.close()
        self.timeline.close()
        super().close()


def _collection_metrics(stats: dict[str, np.ndarray]) -> dict[str, float]:
    """What the slots of one update say of the workers."""
    busy, calls = stats["end"] - stats["begin"], stats["act_calls"].sum()
    blocked = stats["blocked"].sum()
    return {
        "pipeline/worker_blocked_share": float(blocked / max(blocked + busy.sum(), 1e-9)),
        "pipeline/inference_ms": float(1e3 * stats["act_seconds"].sum() / max(calls, 1)),
        "pipeline/inference_rows": float(stats["act_rows"].sum() / max(calls, 1)),
        "pipeline/inference_share": float(stats["act_seconds"].sum() / max(busy.sum(), 1e-9)),
    }
