"""What the training loops need of an algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from msrl_accel.config import Field, Section, TrainConfig
from msrl_accel.policy import Policy
from msrl_accel.runtime.base import ActResult
from msrl_accel.spaces import PolicySpec
from msrl_accel.trajectories import Trajectories

if TYPE_CHECKING:
    from msrl_accel.replay import ReplayBatch


class Algorithm(ABC):
    """A policy graph and one compiled update.

    Args:
        config: the whole resolved configuration.
        spec: the environment's tensors.
    """

    Config: ClassVar[type[Section]]
    trainer: ClassVar[str] = ""
    """Its training loop, module:Class, where it needs one of its own."""
    async_trainer: ClassVar[str] = ""
    """Likewise of pipeline.mode async, where it has one."""
    policy: Policy
    n_steps: int = 1
    """Steps each environment takes between updates."""

    @abstractmethod
    def __init__(self, config: TrainConfig, spec: PolicySpec) -> None: ...

    @classmethod
    def build_policy(cls, config: TrainConfig, spec: PolicySpec) -> Policy:
        """The policy alone, as acting and export need it.

        Raises:
            SpaceError: the algorithm cannot act in such spaces.
        """
        return Policy(spec, config.policy, config.seed)

    @classmethod
    def with_critic(cls, config: TrainConfig, policy: Policy, state: dict[str, Any]) -> Policy:
        """The policy with a value, from the critics in a checkpoint's `state`.

        Policies that already return one are given back as they are.
        """
        return policy

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Optimiser state and counters: a tree of dicts, ndarrays and JSON values."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Inverse of `state`."""


class OnPolicyAlgorithm(Algorithm):
    """Trains on the steps its present policy has just taken."""

    evaluate: Callable[[Trajectories], tuple[np.ndarray, np.ndarray]]
    """Log-probabilities of the actions and values of the observations, [T, N] each, by the training
    graph with the present weights."""

    @abstractmethod
    def update(
        self,
        trajectories: Trajectories,
        progress: float,
        rng: np.random.Generator,
        *,
        sample_weights: np.ndarray | None = None,
        learning_rate_scale: float = 1.0,
    ) -> dict[str, float]:
        """Train on one batch of trajectories.

        Args:
            progress: share of the run's steps done before this batch, 0 to 1, for schedules.
            rng: source of shuffling.
            sample_weights: what each step counts, [T, N]; None: all the same. Steps of weight 0
                are left out; one step at least must be left.
            learning_rate_scale: factor on the scheduled learning rate.

        Returns:
            Metrics of the update.
        """

    def look(self, trajectories: Trajectories) -> tuple[np.ndarray, np.ndarray]:
        """As `evaluate`, by whichever graph is compiled in any case."""
        return self.evaluate(trajectories)


class OffPolicyConfig(Section):
    """What every algorithm that learns from a replay is asked."""

    buffer_size: int = Field(1_000_000, ge=1)
    """Transitions the replay holds; the oldest are overwritten."""
    learning_starts: int = Field(100, ge=1)
    """Transitions of random actions before the first update."""
    batch_size: int = Field(256, ge=1)
    """Transitions of one gradient step."""
    train_freq: int = Field(1, ge=1)
    """Environment transitions between updates, counted over all environments."""
    gradient_steps: int = Field(1, ge=1)
    """Gradient steps of one update, all in one call of the compiled graph."""
    gamma: float = Field(0.99, gt=0, le=1)
    """Discount."""
    n_step: int = Field(1, ge=1)
    """Rewards summed before bootstrapping."""
    replay: str = Field("uniform", choices=("uniform", "prioritized"))
    """How transitions are drawn (Schaul et al. 2016, arXiv:1511.05952)."""
    priority_alpha: float = Field(0.6, ge=0, le=1)
    """Exponent of priorities; 0 is uniform."""
    priority_beta: float = Field(0.4, ge=0, le=1)
    """Exponent of importance weights at the start; it rises to 1 over the run."""
    share_next_observations: bool = Field(False)
    """Whether successors are stored once: half the memory of images, final observations kept."""
    replay_dir: str | None = Field(None)
    """Directory of memory-mapped files for a replay larger than memory; null keeps it in memory."""
    save_replay: bool = Field(False)
    """Whether checkpoints hold the replay: resuming is then exact."""

    def steps_per_call(self, n_envs: int) -> int:
        """Gradient steps of one call of the compiled graph.

        As many as one step of all environments makes due: `gradient_steps / train_freq` of each
        transition, whatever `n_envs`.
        """
        return max(self.gradient_steps, round(n_envs * self.gradient_steps / self.train_freq))


class OffPolicyAlgorithm(Algorithm):
    """Trains on transitions drawn from a replay, whatever policy made them."""

    def explore(
        self, acted: ActResult, rng: np.random.Generator, progress: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Raw and environment actions [N, ...] taken in training: the policy's own samples.

        Args:
            progress: share of the run's steps done, 0 to 1.
        """
        return acted.raw_action, acted.action

    @abstractmethod
    def update(self, batch: ReplayBatch, progress: float) -> tuple[dict[str, float], np.ndarray]:
        """Gradient steps on batches [k, B, ...], in one call of the compiled graph.

        Args:
            progress: share of the run's steps done, 0 to 1, for schedules.

        Returns:
            Metrics, and the absolute temporal-difference errors [k, B].
        """
