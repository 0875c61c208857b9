"""GRPO whose completions are generated in processes of their own while the learner trains.

Workers -> bounded queue in shared memory -> verifiers, learner -> published weights -> workers. One
slot of the queue is one iteration's groups; a version of the policy is one update. The lag of a
slot's oldest token is bounded by when its generation may start (`StalenessManager`).
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import numpy as np

from msrl_accel.errors import ConfigError, PipelineError
from msrl_accel.lm.parity import parity
from msrl_accel.lm.rollout import Rollout
from msrl_accel.lm.sampling import kept_size
from msrl_accel.pipeline.grpo import GRPOTrainer
from msrl_accel.pipeline.grpo_worker import (
    GenerationTask,
    generators,
    prompts_digest,
    read_completions,
    run_generation,
    slot_layout,
)
from msrl_accel.pipeline.placement import WORKER_NICENESS, Place
from msrl_accel.pipeline.shared_queue import SharedQueue, Slot
from msrl_accel.pipeline.staleness import StalenessManager
from msrl_accel.pipeline.watchdog import START_SECONDS, WorkerPool
from msrl_accel.publish import WeightStore
from msrl_accel.run import DESCRIPTION_FOLDER

_POLL_SECONDS = 0.1


class _Stopped(Exception):
    """A signal came while completions were waited for."""


class AsyncGRPOTrainer(GRPOTrainer):
    """GRPO on completions of somewhat older weights.

    The ratio is corrected for them by `grpo.correction`, which is `decoupled` here unless it is
    set: pi_old is the learner's policy before the update, and tokens are weighed by pi_old / mu,
    where mu is what each token was drawn from, whatever version that was.
    """

    pipeline_keys = ("mode", "workers", "max_staleness", "hang_seconds", "max_restarts")

    def build(self) -> None:
        super().build()
        if self.options.parity_gate is not None:
            raise ConfigError(
                f"grpo.parity_gate = {self.options.parity_gate:g}: log-probabilities of older "
                "weights differ as a matter of course; leave it out, or use pipeline.mode sync"
            )
        if self.options.correction is None:
            self.algorithm.settings = self.algorithm.settings.replace(correction="decoupled")
        self.pipeline = self.config.pipeline
        self.stack = ExitStack()
        self.started = False
        self.attempt = 0
        self.discarded = 0
        """Slots that came too late."""
        self.waited = 0.0
        """Seconds of this iteration without anything to train on."""
        self.generation_seconds: list[float] = []
        """Of the slots of this iteration."""
        self.same_version: dict[str, float] = {}
        """Agreement of rollout and training on tokens of the present weights."""

    def train(self) -> str | None:
        try:
            return super().train()
        finally:
            self._end_workers()  # the closing evaluation has the machine to itself

    def iterate(self) -> dict[str, float]:
        """One update on the next groups that arrive; nothing if a stop was asked for."""
        version = self.generator.version
        warming_up = self.warm_learner is not None
        self.waited, self.generation_seconds, self.same_version = 0.0, [], {}
        start = time.monotonic()
        try:
            metrics = super().iterate()
        except _Stopped:
            return {}
        if warming_up:
            return metrics
        if self.generator.version > version:
            self.store.publish(self.generator.version, self.model.arrays())
            self.staleness.version = self.generator.version
        else:
            self.staleness.withdraw()  # what was trained on: nothing
        self.queue.admit_again()
        # Of all tokens it is the policy that has moved on, not two computations that disagree.
        names = [name for name in ("max", "mean", "kl") if f"parity/{name}" in metrics]
        drift = {name: metrics.pop(f"parity/{name}") for name in names}
        return {
            **metrics,
            **{f"staleness/log_prob_{name}": value for name, value in drift.items()},
            **self.same_version,
            **{f"staleness/{name}": value for name, value in self.staleness.metrics().items()},
            "pipeline/queue_depth": float(self.queue.stats()["ready"]),
            "pipeline/learner_idle_share": self.waited / (time.monotonic() - start),
            "pipeline/restarts": float(self.pool.restarts),
            "pipeline/discarded": float(self.discarded + self.queue.reclaimed),
            "pipeline/generation_seconds": float(np.mean(self.generation_seconds)),
        }

    def _gather(self) -> list[Rollout]:
        """Groups that workers generated; further ones while too few are worth training on."""
        if not self.started:
            self._start()
        wanted = self.options.prompts_per_iteration
        gathered: list[Rollout] = []
        most = 1 + (self.options.max_resamples if self.algorithm.settings.filter_groups else 0)
        while True:
            rollout = self._take(self._next_slot())
            if rollout is not None:
                gathered.append(rollout)
                worthwhile = sum(int(self._worthwhile(r).sum()) for r in gathered)
                if worthwhile >= wanted or len(gathered) == most:
                    return gathered
            self.staleness.withdraw()  # an update may take several slots; it counts once
            self.queue.admit_again()

    def _take(self, slot: Slot) -> Rollout | None:
        """Completions of a slot, which is given back, with their problems and scores.

        None where a token is too old, as one worker's are that is slower than the others.
        """
        options = self.options
        seed = slot.arrays["seed"].copy()
        problems = self.encoder.draw(
            self.task, generators(seed)[0], options.prompts_per_iteration, self.longest_prompt
        )
        prompts = [self.encoder.prompt(problem) for problem in problems]
        if prompts_digest(prompts) != int(slot.arrays["prompts"][0]):
            raise PipelineError(
                f"{self.task.name}: one seed gives other problems in another process; make its "
                "`sample` depend on the generator alone, or use pipeline.mode sync"
            )
        completions = read_completions(slot, options.group_size, self.n_kept > 0)
        self.generation_seconds.append(float(slot.arrays["seconds"][0]))
        self.queue.release(slot)
        assert completions.versions is not None
        inside = np.arange(completions.tokens.shape[1]) < completions.lengths[:, None]
        self.staleness.weigh(completions.versions[inside])  # counts the lags
        if self.staleness.version - completions.version > self.pipeline.max_staleness:
            self.discarded += 1
            return None
        return self.roller.judge(problems, prompts, completions)

    def _own_log_probs(self, rollout: Rollout | None) -> np.ndarray | None:
        log_probs = super()._own_log_probs(rollout)
        if log_probs is not None and rollout is not None:
            sampled = rollout.completions
            assert sampled.versions is not None
            newest = rollout.mask & (sampled.versions == self.generator.version)
            if newest.any():
                self.same_version = parity(log_probs, sampled.log_probs, newest).metrics()
        return log_probs

    def _next_slot(self) -> Slot:
        """The slot that has waited longest.

        Raises:
            EnvError: a worker failed too often.
            PipelineError: no worker begins one for a long time.
        """
        start = stuck_since = time.monotonic()
        patience = START_SECONDS + self.pipeline.hang_seconds * (1 + self.pipeline.max_restarts)
        while True:
            slot = self.queue.try_get(_POLL_SECONDS)
            self.pool.supervise()
            if self.stopping:
                raise _Stopped
            now = time.monotonic()
            if slot is not None:
                self.waited += now - start
                self.pool.delivered(int(slot.producer.split()[1]))
                return slot
            if self.queue.stats()["filling"]:
                stuck_since = now  # the watchdog knows whether those are alive
            elif now - stuck_since > patience:
                raise PipelineError(
                    f"rollout: no completions were begun for {patience:g} s; {self.pool.describe()}"
                )

    def _start(self) -> None:
        """Make the queue and the weight store, and start the workers."""
        options, pipeline = self.options, self.pipeline
        version = self.generator.version
        n = options.prompts_per_iteration * options.group_size
        cut = options.top_p < 1.0
        self.n_kept = kept_size(self.model.config.vocab_size, options.top_k, cut)
        self.staleness = StalenessManager(pipeline.max_staleness, 1, version=version)
        self.queue = SharedQueue(
            slot_layout(n, options.max_new_tokens, self.n_kept),
            pipeline.max_staleness + pipeline.workers + 1,
            self.staleness,
        )
        self.stack.callback(self.queue.close)
        arrays = self.model.arrays()
        self.store = WeightStore.create(arrays)
        self.stack.callback(self.store.close)
        self.store.publish(version, arrays)
        self.pool = WorkerPool(
            pipeline.workers,
            run_generation,
            self._task,
            lambda index: self.queue.reclaim(f"worker {index}"),
            env_id=self.config.env,
            hang_seconds=pipeline.hang_seconds,
            max_restarts=pipeline.max_restarts,
        )
        self.started = True
        self.stack.callback(self._end_workers)
        self.pool.start()

    def _task(self, index: int, attempt: int, report: str) -> GenerationTask:
        return GenerationTask(
            index=index,
            attempt=self.attempt + attempt,
            config=self.config,
            description=str(self.run.path / DESCRIPTION_FOLDER),
            place=Place(niceness=WORKER_NICENESS),
            weights=self.store.handle,
            queue=self.queue.producer(f"worker {index}"),
            heartbeats=self.pool.heartbeats,
            report=report,
        )

    def _end_workers(self) -> None:
        """Wake the workers by closing the queue they wait for, then end them."""
        if self.started:
            self.queue.close()
            self.pool.close()

    def state(self) -> dict[str, Any]:
        # Whoever resumes draws problems and noise that no worker has drawn.
        restarts = self.pool.restarts if self.started else 0
        return {**super().state(), "attempt": self.attempt + 1 + restarts}

    def restore_state(self, state: dict[str, Any]) -> None:
        super().restore_state(state)
        self.attempt = int(state["attempt"])

    def close(self) -> None:
        self.stack.close()
        super().close()
