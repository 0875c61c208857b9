"""Synchronous on-policy training: collect, update, publish, one after the other."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from msrl_accel.algorithms.base import OnPolicyAlgorithm
from msrl_accel.errors import ConfigError
from msrl_accel.pipeline.trainer import Trainer
from msrl_accel.rollout import Collector
from msrl_accel.rollout_engine import relative_difference
from msrl_accel.trajectories import Trajectories


class SyncTrainer(Trainer):
    """Trains an on-policy algorithm on batches that its present policy collects."""

    algorithm: OnPolicyAlgorithm
    checks_engine_first = False  # but on its first batch: that needs no graph of its own

    def build(self) -> None:
        config = self.config
        noise_seed, shuffle_seed = np.random.SeedSequence(config.seed).spawn(2)
        self.shuffle_rng = np.random.default_rng(shuffle_seed)
        self.collector = Collector(
            self.env,
            self.engine.runtime,
            self.algorithm.n_steps,
            np.random.default_rng(noise_seed),
            self.make_reward_normalizer(),
        )
        self.episodes = self.collector.episodes
        batch = self.algorithm.n_steps * config.n_envs
        if config.total_steps < batch:
            raise ConfigError(
                f"total_steps = {config.total_steps}: less than one batch of n_envs * "
                f"{config.algo}.n_steps = {batch}; raise total_steps, or lower "
                f"{config.algo}.n_steps or n_envs"
            )

    def iterate(self) -> dict[str, float]:
        """Collect one batch and train on it."""
        if not self.collector.observations:
            self.collector.reset(self.config.seed)
        start = time.perf_counter()
        trajectories = self.collector.collect()
        if not self.engine.verified:
            trajectories = self._verify_engine(trajectories)
        collected = time.perf_counter()
        losses = self.algorithm.update(
            trajectories, self.step / self.config.total_steps, self.shuffle_rng
        )
        updated = time.perf_counter()
        if self.statistics is not None:
            self.statistics.update(tuple(map(trajectories.flat, trajectories.observations)))
        self.step += int(trajectories.valid.sum())
        self.iteration += 1
        self.engine.publish(self.iteration)
        return {
            **self.collector.episodes.summary(),
            **{f"{self.config.algo}/{name}": value for name, value in losses.items()},
            "time/rollout_seconds": collected - start,
            "time/update_seconds": updated - collected,
            "time/steps_per_second": trajectories.valid.sum() / (updated - start),
        }

    def _verify_engine(self, trajectories: Trajectories) -> Trajectories:
        """Compare the first batch with the training graph; collect another if that takes over."""
        seen = self.algorithm.look(trajectories)
        difference = max(
            relative_difference(a[trajectories.valid], b[trajectories.valid])
            for a, b in zip(seen, (trajectories.log_probs, trajectories.values))
        )
        if self.engine.verify(difference):
            return trajectories
        self.collector.runtime = self.engine.runtime
        return self.collector.collect()

    def parts_state(self) -> dict[str, Any]:
        return {
            "shuffle_rng": self.shuffle_rng.bit_generator.state,
            "collector": self.collector.state(),
        }

    def restore_parts(self, state: dict[str, Any], reset_seed: int) -> bool:
        self.shuffle_rng.bit_generator.state = state["shuffle_rng"]
        return self.collector.restore(state["collector"], reset_seed)
