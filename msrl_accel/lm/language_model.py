"""A language model to talk with: prompts in, completions out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from msrl_accel.envs.text import Problem
from msrl_accel.files import PathLike
from msrl_accel.lm.generation import CompletionSampler, Generator
from msrl_accel.lm.model import CausalLM
from msrl_accel.lm.opening import open_model
from msrl_accel.lm.prompts import PromptEncoder
from msrl_accel.lm.weights import save_model

WHOLE_DISTRIBUTION: Mapping[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}


class Completer:
    """Text in, completions out.

    Args:
        encoder: of prompts.
        generator: of completions.
        sampling: how tokens are sampled where a call does not say.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        generator: CompletionSampler,
        sampling: Mapping[str, Any] = WHOLE_DISTRIBUTION,
    ) -> None:
        self.encoder, self.generator, self.sampling = encoder, generator, sampling
        self.tokenizer = encoder.tokenizer

    def complete(
        self,
        prompts: Sequence[str],
        *,
        samples: int = 1,
        seed: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> list[str]:
        """`samples` completions of each prompt, one after the other.

        Args:
            seed: of the noise; None: the likeliest tokens.
            temperature, top_k, top_p: how tokens are sampled; default `sampling`.

        Raises:
            LMError: a prompt cannot be encoded, is empty or too long.
        """
        asked = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        completions = self.generator.generate(
            [self.encoder.prompt(Problem(prompt, "")) for prompt in prompts],
            samples,
            None if seed is None else np.random.default_rng(seed),
            eos_ids=self.tokenizer.eos_ids,
            **{**self.sampling, **{k: v for k, v in asked.items() if v is not None}},
        )
        pairs = zip(completions.tokens, completions.lengths)
        return [self.tokenizer.decode(tokens[:length]) for tokens, length in pairs]


class LanguageModel(Completer):
    """A model with its tokenizer, and with the way prompts are put to it.

    Args:
        model: whose weights are used as they are at the moment.
        encoder: of prompts.
        max_new_tokens: the most tokens of a completion.
        rows: completions generated side by side.
    """

    def __init__(
        self, model: CausalLM, encoder: PromptEncoder, max_new_tokens: int = 256, rows: int = 128
    ) -> None:
        super().__init__(encoder, Generator(model, max_new_tokens, max_rows=rows))
        self.model = model

    @classmethod
    def load(
        cls,
        source: str,
        *,
        prompt: str = "auto",
        system_prompt: str | None = None,
        max_new_tokens: int = 256,
    ) -> LanguageModel:
        """The model of a folder, a .gguf file, or "smollm2".

        Args:
            prompt, system_prompt: as `grpo.prompt` and `grpo.system_prompt`.

        Raises:
            LMError: there is no usable model.
        """
        opened = open_model(source)
        model = CausalLM(opened.config, seed=None)
        assert opened.arrays is not None
        model.load_arrays(opened.arrays)
        encoder = PromptEncoder(opened.tokenizer, prompt, system_prompt)
        return cls(model, encoder, max_new_tokens)

    def save(self, folder: PathLike, dtype: str = "float32") -> None:
        """Write a folder that transformers reads too; see `save_model`."""
        save_model(folder, self.model.config, self.model.arrays(), self.tokenizer, dtype)
