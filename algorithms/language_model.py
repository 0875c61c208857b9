"""What algorithms that train a language model share: what they are asked, and their optimiser."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from msrl_accel.algorithms.base import Algorithm
from msrl_accel.config import Field, Section, TrainConfig
from msrl_accel.envs.text import Scorer, TextTask, parse_rewards
from msrl_accel.errors import ConfigError
from msrl_accel.learner import GradientWatch, schedule
from msrl_accel.lm.adamw import AdamWOptions
from msrl_accel.lm.losses import LossSettings
from msrl_accel.lm.model import CausalLM
from msrl_accel.lm.packing import Packer, attention_span, launch_cost
from msrl_accel.lm.prompts import STYLES
from msrl_accel.lm.update import LMUpdate

ALARM = 100.0
"""Gradient norms above so many times `max_grad_norm` are warned of."""


class LanguageModelConfig(Section):
    """What every algorithm that trains a language model is asked."""

    run_defaults = {  # noqa: RUF012
        "evaluation": {"episodes": 256},
        "checkpoint": {"interval_seconds": 300.0, "keep_last": 2},
        "runtime": {"threads": 2},
    }

    fixed: ClassVar[tuple[str, ...]] = (
        "model",
        "prompt",
        "system_prompt",
        "max_prompt_tokens",
        "max_new_tokens",
    )

    model: str | None = Field(None)
    """A folder, a .gguf file, or smollm2; null makes a model of about a million parameters that
    knows nothing and reads single characters."""
    prompt: str = Field("auto", choices=STYLES)
    """How a problem is put: plain text, or a user's message in the model's chat template; auto
    takes the template where there is one."""
    system_prompt: str | None = Field(None)
    """A system message before it; null leaves that to the template."""
    max_prompt_tokens: int = Field(256, ge=1)
    """Problems with longer prompts are left out."""
    max_new_tokens: int = Field(32, ge=1)
    """Longest completion, end token included."""
    rollout_rows: int = Field(128, ge=1)
    """Completions generated side by side; bounds memory."""
    learning_rate: float = Field(1e-4, gt=0)
    """Step size of AdamW."""
    learning_rate_schedule: str = Field("constant", choices=("constant", "linear"))
    """Constant, or linear to 0 at the end of the run."""
    warmup_updates: int = Field(20, ge=0)
    """Optimiser steps over which the step size rises to its value."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of AdamW's second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """Of AdamW, on matrices."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients of a larger norm are scaled down to it."""
    token_budget: int = Field(4096, ge=1)
    """Most tokens of a micro-batch, padding included: bounds memory and changes no result."""
    recompute: bool | None = Field(None)
    """Whether activations are computed again in the backward pass, for less memory; null: for large
    models."""
    offload: bool | None = Field(None)
    """Whether the optimiser's moments are kept on the host; null: for large models."""
    rewards: str = Field("task")
    """Formula of rewards, such as math + 0.2*format (docs/text-tasks.md)."""
    reward_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of rewards, by their names."""
    scoring_workers: int | None = Field(None, ge=0)
    """Processes of verifiers that could hang or crash; null: one a core, at most 4."""
    scoring_timeout: float = Field(10.0, gt=0)
    """Seconds a verifier may take for one completion."""
    pass_samples: int = Field(4, ge=1)
    """Samples of each held-out problem, for pass@k."""

    @property
    def sampling(self) -> dict[str, Any]:
        """How completions are sampled: arguments of `Roller`."""
        return {}

    def make_scorer(self, task: TextTask) -> Scorer:
        """The verifiers.

        Raises:
            ConfigError: arguments for a reward that is not in the formula.
            EnvError: a reward that cannot be made.
        """
        specs = parse_rewards(self.rewards)
        for name in self.reward_kwargs:
            if name not in [spec.name for spec in specs]:
                raise ConfigError(
                    f"reward_kwargs = {self.reward_kwargs}: {name!r} is not in the formula "
                    f"rewards = {self.rewards!r}"
                )
        rewards = [replace(s, kwargs=self.reward_kwargs.get(s.name) or {}) for s in specs]
        return Scorer(task, rewards, workers=self.scoring_workers, timeout=self.scoring_timeout)


class LanguageModelAlgorithm(Algorithm):
    """A language model and the steps that train it.

    Args:
        config: the whole resolved configuration.
        model: trained in place.
    """

    Config: ClassVar[type[LanguageModelConfig]]

    def __init__(self, config: TrainConfig, model: CausalLM) -> None:
        options = config.algorithm
        assert isinstance(options, LanguageModelConfig)
        self.options = options
        self.model = model


class Learner:
    """Optimiser steps on packed sequences, and everything they depend on.

    Args:
        model: trained in place.
        loss: a policy loss; None for the supervised one.
        options: of the algorithm.
        learning_rate: instead of that in `options`.
        temperature: of sampling.
    """

    def __init__(
        self,
        model: CausalLM,
        loss: LossSettings | None,
        options: LanguageModelConfig,
        *,
        learning_rate: float | None = None,
        temperature: float = 1.0,
    ) -> None:
        self.options = options
        self.base_rate = options.learning_rate if learning_rate is None else learning_rate
        self.packer = Packer(
            options.token_budget,
            attention_span=attention_span(model.config),
            launch_cost=launch_cost(model.config),
        )
        self.update = LMUpdate(
            model,
            loss,
            AdamWOptions(
                beta2=options.beta2,
                weight_decay=options.weight_decay,
                max_grad_norm=options.max_grad_norm,
            ),
            temperature=temperature,
            recompute=options.recompute,
            offload=options.offload,
        )
        self.watch = GradientWatch(options.max_grad_norm, ALARM)

    @property
    def updates(self) -> int:
        """Optimiser steps taken."""
        return self.update.optimizer.steps

    def learning_rate(self, progress: float) -> float:
        """Of the next step, where `progress` is the share of the run that is done."""
        o = self.options
        rise = min(1.0, (self.updates + 1) / (o.warmup_updates + 1))
        return rise * schedule(o.learning_rate_schedule, self.base_rate, progress)

    def state(self) -> dict[str, Any]:
        return {
            "update": self.update.state(),
            "shapes": self.packer.state(),
            "watch": self.watch.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.update.restore(state["update"])
        self.packer.restore(state["shapes"])
        self.watch.restore(state["watch"])
