"""A language model to talk with: prompts in, completions out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from msrl_accel.envs.text import Problem
from msrl_accel.files import PathLike
from msrl_accel.lm.generation import Generator
from msrl_accel.lm.model import CausalLM
from msrl_accel.lm.opening import open_model
from msrl_accel.lm.prompts import PromptEncoder
from msrl_accel.lm.weights import save_model


class LanguageModel:
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
        self.model, self.encoder = model, encoder
        self.tokenizer = encoder.tokenizer
        self.generator = Generator(model, max_new_tokens, max_rows=rows)

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

    def complete(
        self,
        prompts: Sequence[str],
        *,
        samples: int = 1,
        seed: int | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
    ) -> list[str]:
        """`samples` completions of each prompt, one after the other.

        Args:
            seed: of the noise; None: the likeliest tokens.
            temperature, top_k, top_p: how tokens are sampled.

        Raises:
            LMError: a prompt cannot be encoded, is empty or too long.
        """
        ids = [self.encoder.prompt(Problem(prompt, "")) for prompt in prompts]
        completions = self.generator.generate(
            ids,
            samples,
            None if seed is None else np.random.default_rng(seed),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            eos_ids=self.tokenizer.eos_ids,
        )
        pairs = zip(completions.tokens, completions.lengths)
        return [self.tokenizer.decode(tokens[:length]) for tokens, length in pairs]

    def save(self, folder: PathLike, dtype: str = "float32") -> None:
        """Write a folder that transformers reads too; see `save_model`."""
        save_model(folder, self.model.config, self.model.arrays(), self.tokenizer, dtype)
