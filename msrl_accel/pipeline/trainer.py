"""What the training loops of policies share: environments, algorithm and rollout engine."""

from __future__ import annotations

import logging
from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np

from msrl_accel import envs
from msrl_accel.algorithms import algorithm_class
from msrl_accel.algorithms.base import Algorithm
from msrl_accel.config import TrainConfig
from msrl_accel.envs.base import VectorEnv
from msrl_accel.evaluation import Evaluation, evaluate_run_policy
from msrl_accel.graph_cache import GraphCache
from msrl_accel.metrics import EpisodeStats
from msrl_accel.normalize import RewardNormalizer
from msrl_accel.observation_statistics import ObservationStatistics
from msrl_accel.pipeline.loop import TrainingLoop
from msrl_accel.rollout_engine import RolloutEngine
from msrl_accel.run import Run
from msrl_accel.spaces import PolicySpec

logger = logging.getLogger("msrl_accel")


class Trainer(TrainingLoop):
    """One run of a policy: environments, rollout engine, algorithm.

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
    checks_engine_first: ClassVar[bool] = True
    """Whether the rollout engine is checked when it is made, or later by `iterate`."""

    def __init__(self, config: TrainConfig, run: Run) -> None:
        super().__init__(config, run)
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
                check=self.checks_engine_first,
                cache=GraphCache(config, self.spec),
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

    @abstractmethod
    def build(self) -> None:
        """Make what this kind of training needs besides environments, algorithm and engine."""

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

    def evaluate(self, deterministic: bool) -> Evaluation:
        """Separate episodes, in environments of their own."""
        return evaluate_run_policy(
            self.engine.runtime,
            self.config,
            self.config.evaluation.episodes,
            deterministic=deterministic,
        )

    def next_steps(self) -> dict[str, str]:
        command = f"python -m msrl_accel.evaluate {self.run.path} --render episode.gif"
        return {"watch it act": command}

    @property
    def score(self) -> float:
        """Mean training return."""
        return self.episodes.return_mean

    def weights(self) -> dict[str, np.ndarray]:
        return self.algorithm.policy.arrays()

    def load_weights(self, arrays: dict[str, np.ndarray]) -> None:
        self.algorithm.policy.load_arrays(arrays)

    def meta(self) -> dict[str, Any]:
        return {"spec": self.spec.to_dict()}

    def state(self) -> dict[str, Any]:
        return {
            "algorithm": self.algorithm.state(),
            "statistics": self.statistics and self.statistics.state(),
            **self.parts_state(),
        }

    def restore_state(self, state: dict[str, Any]) -> None:
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
