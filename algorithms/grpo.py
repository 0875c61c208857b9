"""Group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300) and its relatives.

Several completions of each prompt are sampled and scored. The advantage of a completion is its
reward compared with the others of its group; how, and what becomes of it, is a row of the table in
`lm/losses.py`, chosen by `preset` and changed by the keys of the same name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from msrl_accel.algorithms.language_model import (
    LanguageModelAlgorithm,
    LanguageModelConfig,
    Learner,
)
from msrl_accel.config import Field, TrainConfig
from msrl_accel.config_schema import fields_of
from msrl_accel.errors import CheckpointError, ConfigError
from msrl_accel.lm.advantages import overlong_penalty, token_weights
from msrl_accel.lm.losses import PRESETS, LossSettings, loss_settings, weigh_tokens
from msrl_accel.lm.model import CausalLM
from msrl_accel.lm.parity import parity
from msrl_accel.lm.rollout import Rollout
from msrl_accel.lm.update import Columns, policy_metrics
from msrl_accel.networks import Weights


class GRPOConfig(LanguageModelConfig):
    """GRPO and its relatives. A step is one completion. Parts of the loss are as the preset has
    them where they are null.
    """

    fixed: ClassVar[tuple[str, ...]] = (
        *LanguageModelConfig.fixed,
        "warm_start_examples",
        "warm_start_accuracy",
    )

    preset: str = Field("grpo", choices=tuple(PRESETS))
    """Which of the family (docs/language-models.md): values of the parts of the loss below."""
    prompts_per_iteration: int = Field(16, ge=1)
    """Problems of one iteration."""
    group_size: int = Field(8, ge=1)
    """Completions of each problem, whose rewards are compared."""
    epochs: int = Field(1, ge=1)
    """Passes over the completions of one iteration."""
    updates_per_epoch: int = Field(1, ge=1)
    """Optimiser steps of one pass, each on some of the groups."""
    temperature: float = Field(1.0, gt=0)
    """Logits are divided by it, in sampling and in the loss."""
    top_k: int = Field(0, ge=0)
    """Likeliest tokens sampled from; the loss is over the same. 0: all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Total probability of the likeliest tokens sampled from; the loss is over the same."""
    max_resamples: int = Field(3, ge=0)
    """Further batches of completions in an iteration, while filter_groups leaves groups missing."""
    partial_tokens: int | None = Field(None, ge=1)
    """For pipeline.mode async: tokens after which a completion goes on with newer weights; null:
    completions are generated whole."""
    parity_gate: float | None = Field(None, gt=0)
    """The run ends where log-probabilities of rollout and training differ by more."""
    warm_start_examples: int | None = Field(None, ge=0)
    """Right completions that supervised training shows the model first; null: 32000 for a model
    that knows nothing, none for others. They count as steps."""
    warm_start_accuracy: float | None = Field(None, gt=0, le=1)
    """Share of training problems answered right, greedily, at which the warm start ends before
    that; null: never. How soon a model from nothing gets there varies much between seeds."""
    warm_start_batch_size: int = Field(32, ge=1)
    """Examples of one optimiser step of the warm start."""
    warm_start_learning_rate: float = Field(2e-3, gt=0)
    """Step size of the warm start, constant after its rise."""

    advantage: str | None = Field(None)
    """grpo, dr_grpo, rloo or reinforce++."""
    population_std: bool | None = Field(None)
    """For grpo: standard deviation over n instead of n - 1."""
    gamma: float | None = Field(None)
    """For reinforce++: discount of one token."""
    filter_groups: bool | None = Field(None)
    """Leave out groups whose rewards are all equal, and sample others."""
    overlong_buffer: float | None = Field(None)
    """Share of max_new_tokens over which a penalty grows from 0 to -1; 0: none."""
    ratio: str | None = Field(None)
    """Level of the ratio pi / pi_old: token or sequence."""
    clip: str | None = Field(None)
    """none, ppo, dual or cispo."""
    clip_low: float | None = Field(None)
    """The ratio is clipped at 1 - clip_low."""
    clip_high: float | None = Field(None)
    """The ratio is clipped at 1 + clip_high."""
    dual_clip: float | None = Field(None)
    """Bound of the dual clip."""
    cispo_cap: float | None = Field(None)
    """Largest weight of cispo."""
    aggregation: str | None = Field(None)
    """token_mean, sequence_mean or constant_length."""
    correction: str | None = Field(None)
    """none, tis or decoupled: for a rollout that computes differently, or whose weights are old."""
    correction_cap: float | None = Field(None)
    """Largest weight of the correction."""
    kl: str | None = Field(None)
    """Estimate of the KL divergence to the reference: k1, k2 or k3."""
    kl_coef: float | None = Field(None)
    """Weight of the KL term; the reference is the model that GRPO starts from. 0: none."""
    kl_in_reward: bool | None = Field(None)
    """For reinforce++: subtract the KL from the rewards instead of adding a loss."""

    @property
    def sampling(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}

    def loss(self) -> LossSettings:
        """The row of the table: the preset with what was set.

        Raises:
            ConfigError: a value, or a combination, that cannot be.
        """
        overrides = {name: getattr(self, name) for name in fields_of(LossSettings)}
        settings = loss_settings(self.preset, **overrides)
        if self.group_size < 2 and settings.advantage != "reinforce++":
            raise ConfigError(
                f"grpo.group_size = {self.group_size}: advantage = {settings.advantage!r} compares "
                "the completions of a group, so it needs at least 2"
            )
        return settings


class GRPO(LanguageModelAlgorithm):
    """Advantages, packing, and the optimiser steps of one iteration."""

    Config = GRPOConfig
    trainer = "msrl_accel.pipeline.grpo:GRPOTrainer"
    async_trainer = "msrl_accel.pipeline.grpo_async:AsyncGRPOTrainer"
    options: GRPOConfig

    def __init__(self, config: TrainConfig, model: CausalLM) -> None:
        super().__init__(config, model)
        self.settings = self.options.loss()
        self.learner = Learner(
            model, self.settings, self.options, temperature=self.options.temperature
        )
        self.reference: Mapping[str, np.ndarray] = {}
        """Weights of the reference model by name; empty before `start`, and where none is used."""
        self.started = False

    def start(self) -> None:
        """Take the model as it is for the reference."""
        self.started = True
        if self.settings.kl_coef > 0:
            self.reference = self.model.arrays()

    @property
    def needs_log_probs(self) -> bool:
        """Whether `update` needs the model's own log-probabilities before its first step."""
        return self.settings.correction != "none" or self.settings.kl_in_reward

    def log_probs(self, rollout: Rollout) -> np.ndarray:
        """Of the completions' tokens [N, L], by the model as it is."""
        return self._evaluate(rollout, None)

    def rewards(self, rollout: Rollout) -> np.ndarray:
        """Rewards that advantages are made of [N]: with the penalty of long completions."""
        longest = self.options.max_new_tokens
        buffer = round(self.settings.overlong_buffer * longest)
        if not buffer:
            return rollout.rewards
        penalty = overlong_penalty(rollout.completions.lengths, longest, buffer)
        penalised: np.ndarray = rollout.rewards + penalty
        return penalised

    def update(
        self,
        rollout: Rollout,
        progress: float,
        rng: np.random.Generator,
        log_probs: np.ndarray | None = None,
    ) -> dict[str, float]:
        """All optimiser steps on one iteration's completions.

        Args:
            rollout: whole groups, each completion with a reward.
            progress: share of the run that is done, for schedules.
            rng: source of shuffling.
            log_probs: `log_probs` of the rollout; they may be left out unless `needs_log_probs`.

        Returns:
            Metrics: means over the steps, over the completions that have a gradient; `parity/...`
            compares rollout and training.
        """
        settings, sampled, mask = self.settings, rollout.completions, rollout.mask
        longest = self.options.max_new_tokens
        reference = None
        if self.reference:
            frozen = self.learner.update.frozen_weights(self.reference)
            reference = self._evaluate(rollout, frozen)
        weighted = weigh_tokens(
            settings,
            self.rewards(rollout),
            sampled.prompt_index,
            mask,
            longest,
            log_probs=log_probs,
            rollout_log_probs=sampled.log_probs,
            reference_log_probs=reference,
        )
        old = sampled.log_probs if settings.correction == "none" else log_probs
        columns = Columns(weighted.weight, weighted.advantage, old, reference, sampled.kept)
        steps = []
        agreement = None if log_probs is None else parity(log_probs, sampled.log_probs, mask)
        for rows in self._parts(rollout, rng):
            chosen = np.zeros_like(mask)
            chosen[rows] = mask[rows]
            weight = token_weights(settings.aggregation, chosen, longest).astype(np.float32)
            learning_rate = self.learner.learning_rate(progress)
            needed = self._with_gradient(rows, weighted.advantage)
            chosen[np.setdiff1d(rows, needed)] = False
            part = columns._replace(weight=np.where(chosen, weight, np.float32(0)))
            batches = self.learner.packer.pack(rollout.sequences(), needed)
            result = self.learner.update.step(batches, part, learning_rate)
            steps.append(policy_metrics(settings, part, result))
            if agreement is None:
                agreement = parity(result.log_probs, sampled.log_probs, chosen)
        metrics = {name: float(np.mean([step[name] for step in steps])) for name in steps[0]}
        metrics["ratio_error"] = steps[0]["ratio_error"]
        norms = np.array([step["grad_norm"] for step in steps])
        assert agreement is not None
        return {
            **{f"grpo/{name}": value for name, value in metrics.items()},
            **{f"grpo/{name}": value for name, value in self.learner.watch.update(norms).items()},
            "grpo/learning_rate": learning_rate,
            "grpo/updates": float(self.learner.updates),
            **agreement.metrics(),
        }

    def _with_gradient(self, rows: np.ndarray, advantage: np.ndarray) -> np.ndarray:
        """The rows that change the step: not those of groups whose rewards are all equal.

        Weights were made for all of them, so leaving some out saves time and changes nothing.
        """
        has_advantage = (advantage[rows] != 0).any(axis=1)
        if self.settings.kl_in_loss or not has_advantage.any():
            return rows
        chosen: np.ndarray = rows[has_advantage]
        return chosen

    def _parts(self, rollout: Rollout, rng: np.random.Generator) -> Iterator[np.ndarray]:
        """Rows of each optimiser step: whole groups, in another order each epoch."""
        groups = np.arange(len(rollout.problems))
        count = min(self.options.updates_per_epoch, len(groups))
        for _ in range(self.options.epochs):
            order = rng.permutation(groups) if count > 1 else groups
            for part in np.array_split(order, count):
                yield np.flatnonzero(np.isin(rollout.completions.prompt_index, part))

    def _evaluate(self, rollout: Rollout, weights: Weights | None) -> np.ndarray:
        sampled = rollout.completions
        batches = self.learner.packer.pack(rollout.sequences())
        update = self.learner.update
        return update.log_probs(batches, sampled.tokens.shape, sampled.kept, weights)[0]

    def state(self) -> dict[str, Any]:
        return {
            "learner": self.learner.state(),
            "started": self.started,
            "reference": dict(self.reference),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.learner.restore(state["learner"])
        self.started = bool(state["started"])
        self.reference = state["reference"]
        if self.settings.kl_coef > 0 and not self.reference and self.started:
            raise CheckpointError(
                f"grpo.kl_coef = {self.settings.kl_coef}: the run started without a KL term and "
                "has no reference model; leave it out to resume, or start a new run"
            )
