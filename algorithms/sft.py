"""Supervised fine-tuning: maximum likelihood of right completions, packed into rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from msrl_accel.algorithms.language_model import (
    LanguageModelAlgorithm,
    LanguageModelConfig,
    Learner,
)
from msrl_accel.config import Field, TrainConfig
from msrl_accel.lm.advantages import token_weights
from msrl_accel.lm.model import CausalLM
from msrl_accel.lm.packing import Sequences
from msrl_accel.lm.update import Columns


class SFTConfig(LanguageModelConfig):
    """Supervised fine-tuning on a task's right completions. A step is one example."""

    batch_size: int = Field(32, ge=1)
    """Examples of one optimiser step."""
    updates_per_iteration: int = Field(10, ge=1)
    """Optimiser steps between two rows of metrics."""


class SFT(LanguageModelAlgorithm):
    """The mean of -log pi over the tokens of right completions, end tokens included."""

    Config = SFTConfig
    trainer = "msrl_accel.pipeline.lm:SFTTrainer"

    def __init__(self, config: TrainConfig, model: CausalLM) -> None:
        super().__init__(config, model)
        self.learner = Learner(model, None, self.options)

    def update(self, examples: Sequences, progress: float) -> dict[str, float]:
        """One optimiser step on a batch of examples; returns metrics."""
        return supervised_step(self.learner, examples, progress)

    def state(self) -> dict[str, Any]:
        return self.learner.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.learner.restore(state)


def supervised_step(learner: Learner, examples: Sequences, progress: float) -> dict[str, float]:
    """One optimiser step down the mean over tokens of -log pi."""
    weight = token_weights("token_mean", examples.mask, examples.tokens.shape[1])
    learning_rate = learner.learning_rate(progress)
    result = learner.update.step(
        learner.packer.pack(examples), Columns(weight.astype(np.float32)), learning_rate
    )
    chosen = examples.mask
    return {
        "loss": result.loss,
        "entropy": float(result.entropies[chosen].mean()),
        "learning_rate": learning_rate,
        "tokens": float(chosen.sum()),
        **learner.watch.update(np.array([result.grad_norm])),
    }
