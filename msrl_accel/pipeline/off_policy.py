"""Off-policy training: step environments into a replay, and learn from what is drawn from it."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from msrl_accel.algorithms.base import OffPolicyAlgorithm, OffPolicyConfig
from msrl_accel.envs.base import StepResult
from msrl_accel.errors import ConfigError
from msrl_accel.pipeline.trainer import Trainer
from msrl_accel.replay import PrioritySettings, ReplayBuffer
from msrl_accel.rollout import EnvironmentLoop

ITERATION_STEPS = 500
"""Least environment steps of one iteration, that is between two rows of metrics."""


class OffPolicyTrainer(Trainer):
    """Trains an off-policy algorithm; gradient steps per transition do not depend on `n_envs`."""

    algorithm: OffPolicyAlgorithm

    def build(self) -> None:
        config, options = self.config, self.config.algorithm
        assert isinstance(options, OffPolicyConfig)
        if config.reward.normalize:
            raise ConfigError(
                "reward.normalize = True: a replay would keep rewards of different scales; "
                f"leave it out with {config.algo}"
            )
        if options.learning_starts > options.buffer_size:
            raise ConfigError(
                f"{config.algo}.learning_starts = {options.learning_starts}: the replay never "
                f"holds as many; raise {config.algo}.buffer_size = {options.buffer_size}"
            )
        self.options = options
        noise_seed, replay_seed = np.random.SeedSequence(config.seed).spawn(2)
        self.loop = EnvironmentLoop(
            self.env, self.engine.runtime, np.random.default_rng(noise_seed)
        )
        self.episodes = self.loop.episodes
        self.replay_rng = np.random.default_rng(replay_seed)
        self.replay = ReplayBuffer(
            self.spec,
            options.buffer_size,
            config.n_envs,
            gamma=options.gamma,
            n_step=options.n_step,
            prioritized=PrioritySettings(options.priority_alpha, options.priority_beta)
            if options.replay == "prioritized"
            else None,
            folder=options.replay_dir,
            share_next=options.share_next_observations,
        )
        self.call_steps = options.steps_per_call(config.n_envs)
        self.per_transition = options.gradient_steps / options.train_freq
        self.due = 0.0
        self.updates = 0

    def iterate(self) -> dict[str, float]:
        """Step the environments and train, for at least `ITERATION_STEPS` steps."""
        if not self.loop.observations:
            self.loop.reset(self.config.seed)
        start = time.perf_counter()
        first_step, update_seconds = self.step, 0.0
        goal = min(self.step + ITERATION_STEPS, self.config.total_steps)
        losses: list[dict[str, float]] = []
        seen: list[tuple[np.ndarray, ...]] = []
        while self.step < goal:
            observations = self.spec.cast(self.loop.observations)
            valid = self._step_environments(observations)
            if self.statistics is not None:
                seen.append(tuple(x[valid] for x in observations))
            update_start = time.perf_counter()
            losses += self._train_when_due()
            update_seconds += time.perf_counter() - update_start
        if self.statistics is not None:
            self.statistics.update(tuple(map(np.concatenate, zip(*seen))))
        self.iteration += 1
        self.engine.publish(self.updates)
        seconds = time.perf_counter() - start
        return {
            **self.episodes.summary(),
            **{f"{self.config.algo}/{name}": value for name, value in _summary(losses).items()},
            f"{self.config.algo}/updates": float(self.updates),
            "replay/size": float(len(self.replay)),
            "time/rollout_seconds": seconds - update_seconds,
            "time/update_seconds": update_seconds,
            "time/steps_per_second": (self.step - first_step) / seconds,
        }

    def _step_environments(self, observations: tuple[np.ndarray, ...]) -> np.ndarray:
        """One step of each environment into the replay; returns which of them were real."""
        loop, spec = self.loop, self.spec
        if self.step < self.options.learning_starts:
            raw, actions = spec.random_actions(loop.rng, self.config.n_envs)
        else:
            acted = loop.runtime.act(observations, spec.draw_noise(loop.rng, (self.config.n_envs,)))
            raw, actions = self.algorithm.explore(acted, loop.rng, self.progress)
        step: StepResult = self.env.step(spec.to_environment(actions))
        loop.episodes.update(step.rewards, step.terminated | step.truncated, step.valid)
        self.replay.add(
            observations,
            raw,
            step.rewards,
            spec.cast(step.next_observations),
            step.terminated,
            step.truncated,
            step.valid,
        )
        loop.observations = step.observations
        taken = int(step.valid.sum())
        self.step += taken
        if len(self.replay) >= self.options.learning_starts:
            self.due += taken * self.per_transition
        return step.valid

    def _train_when_due(self) -> list[dict[str, float]]:
        """All gradient steps that are due, and the new weights to the rollout."""
        metrics = []
        beta = self.options.priority_beta
        beta += (1.0 - beta) * self.progress  # 1 at the end (Schaul et al. 2016, section 3.4)
        while self.due >= self.call_steps:
            self.due -= self.call_steps
            batch = self.replay.sample(
                self.replay_rng, self.options.batch_size, self.call_steps, beta
            )
            losses, errors = self.algorithm.update(batch, self.progress)
            if self.options.replay == "prioritized":
                self.replay.update_priorities(batch.indices, errors)
            self.updates += self.call_steps
            metrics.append(losses)
        if metrics:
            self.engine.publish(self.updates)
        return metrics

    @property
    def progress(self) -> float:
        """Share of the run's steps done."""
        return self.step / self.config.total_steps

    def parts_state(self) -> dict[str, Any]:
        return {
            "replay_rng": self.replay_rng.bit_generator.state,
            "loop": self.loop.state(),
            "due": self.due,
            "updates": self.updates,
            "replay": self.replay.state() if self.options.save_replay else None,
        }

    def restore_parts(self, state: dict[str, Any], reset_seed: int) -> bool:
        self.replay_rng.bit_generator.state = state["replay_rng"]
        self.due, self.updates = float(state["due"]), int(state["updates"])
        if state["replay"] is not None:
            self.replay.restore(state["replay"])
        exact = self.loop.restore(state["loop"], reset_seed)
        if not exact:
            self.replay.end_episodes()  # the next transition does not follow the newest one
        return exact

    def close(self) -> None:
        self.replay.close()
        super().close()


_COUNTS = ("grad_exploding", "grad_non_finite")


def _summary(rows: list[dict[str, float]]) -> dict[str, float]:
    """Mean of each metric over the rows, the last of each count; empty where there are none."""
    if not rows:
        return {}
    means = {name: math.fsum(row[name] for row in rows) / len(rows) for name in rows[0]}
    return {name: rows[-1][name] if name in _COUNTS else x for name, x in means.items()}
