"""What every training loop shares: the loop itself, metrics, evaluation, checkpoints, resuming."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import Any

import numpy as np

from msrl_accel import envs
from msrl_accel.algorithms import algorithm_class
from msrl_accel.algorithms.base import Algorithm
from msrl_accel.checkpoint import flatten_state, unflatten_state
from msrl_accel.config import TrainConfig
from msrl_accel.device import set_up
from msrl_accel.envs.base import VectorEnv
from msrl_accel.evaluation import Evaluation, evaluate_run_policy
from msrl_accel.metrics import EpisodeStats, MetricsLogger
from msrl_accel.normalize import RewardNormalizer
from msrl_accel.observation_statistics import ObservationStatistics
from msrl_accel.progress import Progress
from msrl_accel.rollout_engine import RolloutEngine
from msrl_accel.run import POLICY_PREFIX, Run, policy_arrays
from msrl_accel.signals import GracefulStop
from msrl_accel.spaces import PolicySpec

logger = logging.getLogger("msrl_accel")


class Trainer(ABC):
    """One run: environments, rollout engine, algorithm, and everything a checkpoint holds.

    A subclass builds its parts in `build`, moves the run on in `iterate`, and says in
    `parts_state` and `restore_parts` what else a checkpoint must hold.

    Args:
        config: resolved.
        run: its directory.
    """

    env: VectorEnv
    spec: PolicySpec
    algorithm: Algorithm
    engine: RolloutEngine
    episodes: EpisodeStats
    """Of the training environments."""

    def __init__(self, config: TrainConfig, run: Run) -> None:
        set_up(config.runtime)
        self.config = config
        self.run = run
        self.step = 0
        self.saved_step = 0
        self.iteration = 0
        self.seconds = 0.0
        self.next_evaluation = config.evaluation.interval_steps
        self.resumed = False
        self._stop: GracefulStop | None = None
        self.env = self.make_env()
        try:
            self.spec = PolicySpec.from_spaces(self.env.observation_space, self.env.action_space)
            self.algorithm = algorithm_class(config.algo)(config, self.spec)
            self.engine = RolloutEngine(
                self.algorithm.policy,
                config.runtime.rollout,
                config.n_envs,
                config.runtime.batch_invariant,
                self.algorithm.n_steps,
            )
            self.statistics = (
                ObservationStatistics(self.algorithm.policy)
                if config.policy.normalize_observations
                else None
            )
            self.build()
        except BaseException:
            self.env.close()
            raise

    def make_env(self) -> VectorEnv:
        """The environments to train in."""
        config = self.config
        return envs.make_vector(
            config.env, config.n_envs, kwargs=config.env_kwargs, backend=config.vectorization
        )

    @property
    def stopping(self) -> bool:
        """Whether a signal has asked the run to end."""
        return self._stop is not None and self._stop.requested is not None

    @abstractmethod
    def build(self) -> None:
        """Make what this kind of training needs besides environments, algorithm and engine."""

    @abstractmethod
    def iterate(self) -> dict[str, float]:
        """Move the run on by one iteration, counting `step` and `iteration`; returns metrics.

        One that may take long gives up when `stopping`, and returns none.
        """

    @abstractmethod
    def parts_state(self) -> dict[str, Any]:
        """State of what `build` made."""

    @abstractmethod
    def restore_parts(self, state: dict[str, Any], reset_seed: int) -> bool:
        """Inverse of `parts_state`; returns whether the environments continue where they were.

        Args:
            reset_seed: of environments that cannot.
        """

    def make_reward_normalizer(self) -> RewardNormalizer | None:
        reward = self.config.reward
        if not reward.normalize:
            return None
        gamma = getattr(self.config.algorithm, "gamma", 0.99)
        return RewardNormalizer(self.config.n_envs, gamma, reward.clip)

    def train(self) -> str | None:
        """Run to the end; returns the name of the signal that stopped it early, or None."""
        started = time.monotonic() - self.seconds
        last_checkpoint = time.monotonic()
        c = self.config
        with ExitStack() as stack:
            stop = self._stop = stack.enter_context(GracefulStop())
            log = stack.enter_context(
                MetricsLogger(
                    self.run.path,
                    tensorboard=c.logging.tensorboard,
                    resume_step=self.step if self.resumed else None,
                )
            )
            progress = stack.enter_context(
                Progress(c.total_steps, initial=self.step, quiet=c.quiet)
            )
            while self.step < c.total_steps and stop.requested is None:
                metrics = self.iterate()
                if not metrics:  # interrupted before it was complete
                    continue
                self.seconds = time.monotonic() - started
                metrics.update(self._evaluate_when_due())
                complete = self.step >= c.total_steps
                if complete or self.iteration % c.logging.interval_iterations == 0:
                    log.log(self.step, metrics)
                progress.update(self.step, metrics.get("episode/return", np.nan))
                if time.monotonic() - last_checkpoint >= c.checkpoint.interval_seconds:
                    self.save()
                    last_checkpoint = time.monotonic()
            if self.step != self.saved_step:
                self.save()
            return stop.requested

    def _evaluate_when_due(self) -> dict[str, float]:
        interval = self.config.evaluation.interval_steps
        if not interval or self.step < self.next_evaluation:
            return {}
        self.next_evaluation = self.step - self.step % interval + interval
        result = self.evaluate(deterministic=True)
        return {"eval/return": result.mean, "eval/return_std": result.std}

    def evaluate(self, deterministic: bool) -> Evaluation:
        """Separate episodes, in environments of their own."""
        return evaluate_run_policy(
            self.engine.runtime,
            self.config,
            self.config.evaluation.episodes,
            deterministic=deterministic,
        )

    def save(self) -> None:
        """Write a checkpoint of everything the run needs to continue."""
        state = {
            "iteration": self.iteration,
            "seconds": self.seconds,
            "next_evaluation": self.next_evaluation,
            "algorithm": self.algorithm.state(),
            "statistics": self.statistics and self.statistics.state(),
            **self.parts_state(),
        }
        arrays, tree = flatten_state({"trainer": state})
        weights = self.algorithm.policy.arrays()
        arrays.update({POLICY_PREFIX + name: value for name, value in weights.items()})
        meta = {
            "algo": self.config.algo,
            "env": self.config.env,
            "spec": self.spec.to_dict(),
            "state": tree,
        }
        score = self.episodes.return_mean
        self.run.checkpoints.save(self.step, arrays, meta, score=score)
        self.saved_step = self.step

    def restore(self) -> None:
        """Continue from the newest intact checkpoint, or from the start where none was written.

        Raises:
            CheckpointError: there are checkpoints, and all are damaged.
        """
        self.resumed = True
        checkpoint = self.run.checkpoints.latest()
        if checkpoint is None:
            logger.warning(
                "%s was stopped before its first checkpoint: starting it anew", self.run.path
            )
            return
        # Left in place, a damaged one would count among the newest that are kept.
        self.run.checkpoints.discard_after(checkpoint.step)
        self.algorithm.policy.load_arrays(policy_arrays(checkpoint))
        state: dict[str, Any] = unflatten_state(checkpoint.arrays, checkpoint.meta["state"])[
            "trainer"
        ]
        self.step = self.saved_step = checkpoint.step
        self.iteration = int(state["iteration"])
        self.seconds = float(state["seconds"])
        self.next_evaluation = int(state["next_evaluation"])
        self.algorithm.restore(state["algorithm"])
        if self.statistics is not None:
            self.statistics.restore(state["statistics"])
        # Other seeds than the first reset's: new episodes must not repeat the run's first ones.
        exact = self.restore_parts(state, self.config.seed + 1 + self.iteration)
        self.engine.publish(self.iteration)
        if not exact:
            logger.warning(
                "%s cannot save its state: its environments start new episodes", self.config.env
            )

    def close(self) -> None:
        self.engine.close()
        self.env.close()
