"""Generation: prompts in, sampled completions with their log-probabilities out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mindspore import Tensor

from msrl_accel.errors import LMError
from msrl_accel.lm.config import LMConfig
from msrl_accel.lm.decode import Decoder
from msrl_accel.lm.generation_graph import GenerationGraph
from msrl_accel.lm.model import CausalLM
from msrl_accel.lm.sampling import draw_noise

PROMPT_BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Lengths that prompts are padded to: every one that is met compiles once."""
COUNT_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of prompts and of rows, likewise."""

Graph = Callable[..., Any]
"""Inputs and outputs of `GenerationGraph`."""


@dataclass
class Completions:
    """N completions of at most L tokens, in the order of their prompts."""

    tokens: np.ndarray
    """[N, L] int32; pad_id (or 0) after a completion's end."""
    lengths: np.ndarray
    """[N] int32, the token that ended a completion included."""
    log_probs: np.ndarray
    """[N, L] float32, of the distribution that each token was drawn from; 0 after the end."""
    stop: np.ndarray
    """[N] str: 'eos' or 'length'."""
    prompt_index: np.ndarray
    """[N] int32, the prompt each continues."""
    version: int
    """Of the weights."""
    kept: np.ndarray | None = None
    """[N, L, K] int32, the tokens that top-k or top-p kept; unused places repeat one of them.
    None where the whole vocabulary was sampled from."""
    versions: np.ndarray | None = None
    """[N, L] int64, of the weights that drew each token, where they may differ."""


class CompletionSampler(ABC):
    """Samples completions by whatever graphs it is given; see `Generator`.

    Args:
        config: of the model.
        max_new_tokens: the most tokens of a completion; a call may ask for fewer.
        prompt_buckets: lengths that prompts are padded to, ascending.
        max_rows: completions generated side by side; more are done one batch after another.

    Attributes:
        version: of the model's weights, told with every completion; whoever changes them sets it.
    """

    def __init__(
        self,
        config: LMConfig,
        max_new_tokens: int,
        prompt_buckets: Sequence[int],
        max_rows: int,
    ) -> None:
        if max_new_tokens < 1 or max_rows < 1:
            raise LMError(
                f"max_new_tokens = {max_new_tokens} and max_rows = {max_rows} must be at least 1"
            )
        self.config = config
        self.max_new_tokens = max_new_tokens
        longest = config.max_positions - max_new_tokens
        self.prompt_buckets = sorted({min(b, longest) for b in prompt_buckets})
        if longest < 1:
            raise LMError(
                f"max_new_tokens = {max_new_tokens} leaves no room for a prompt: "
                f"the model has {config.max_positions} positions"
            )
        self.max_rows = max_rows
        self.version = 0

    @abstractmethod
    def _sizes(self, prompts: int, rows: int) -> tuple[int, int]:
        """Numbers of prompts and rows of the graph to use for so many."""

    @abstractmethod
    def _graph(self, prompts: int, length: int, rows: int, top_k: int, top_p: bool) -> Graph:
        """The graph of these sizes."""

    def generate(
        self,
        prompts: Sequence[np.ndarray],
        group_size: int = 1,
        rng: np.random.Generator | None = None,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        eos_ids: Sequence[int] | None = None,
        max_new_tokens: int | None = None,
    ) -> Completions:
        """`group_size` completions of each prompt.

        Args:
            prompts: token ids of each, at least one.
            rng: of the noise; the same state gives the same completions. None: greedy.
            temperature: divides the logits.
            top_k: sample among the k likeliest tokens; 0 for all.
            top_p: sample among the likeliest tokens of this total probability; with a vocabulary
                over `sampling.MAX_KEPT` tokens and top_k = 0, at most so many.
            eos_ids: tokens that end a completion; default the model's.
            max_new_tokens: default, and at most, the Generator's.

        Raises:
            LMError: an argument is impossible, a prompt empty or too long, or the model's weights
                are not finite.
        """
        if eos_ids is None:
            eos_ids = self.config.eos_ids
        limit = self.max_new_tokens if max_new_tokens is None else max_new_tokens
        self._check(prompts, group_size, temperature, top_k, top_p, eos_ids, limit)
        length = next(b for b in self.prompt_buckets if b >= max(len(p) for p in prompts))
        prompt_index = np.repeat(np.arange(len(prompts), dtype=np.int32), group_size)
        # A batch takes whole groups, so that each prompt is read once.
        batch = max(self.max_rows - self.max_rows % group_size, min(self.max_rows, group_size))
        is_eos = np.zeros(self.config.vocab_size, np.float32)
        is_eos[list(eos_ids)] = 1.0
        pieces = [
            self._batch(
                prompts,
                prompt_index[start : start + batch],
                length,
                rng,
                (is_eos, np.int32(limit), np.float32(temperature), np.float32(top_p)),
                (top_k, top_p < 1.0),
            )
            for start in range(0, len(prompt_index), batch)
        ]
        tokens, log_probs, kept = (np.concatenate(arrays) for arrays in zip(*pieces))
        completions: Completions = self._completions(
            tokens, log_probs, prompt_index, is_eos > 0.0, limit
        )
        if top_k > 0 or top_p < 1.0:
            completions.kept = kept[:, : completions.tokens.shape[1]]
        return completions

    def _check(self, prompts, group_size, temperature, top_k, top_p, eos_ids, limit):  # type: ignore[no-untyped-def]
        vocab_size = self.config.vocab_size
        wrong = [
            (group_size < 1, f"group_size = {group_size}: must be at least 1"),
            (
                not (0.0 < temperature < np.inf),
                f"temperature = {temperature}: must be above 0; for greedy completions pass no rng",
            ),
            (top_k < 0, f"top_k = {top_k}: must be at least 0"),
            (not 0.0 < top_p <= 1.0, f"top_p = {top_p}: must be above 0 and at most 1"),
            (
                not 1 <= limit <= self.max_new_tokens,
                f"max_new_tokens = {limit}: must be 1 to {self.max_new_tokens}",
            ),
            (
                any(not 0 <= token < vocab_size for token in eos_ids),
                f"eos_ids = {tuple(eos_ids)}: the vocabulary has {vocab_size} tokens",
            ),
            (len(prompts) == 0, "there are no prompts"),
        ]
        for is_wrong, message in wrong:
            if is_wrong:
                raise LMError(message)
        for i, prompt in enumerate(prompts):
            if not 1 <= len(prompt) <= self.prompt_buckets[-1]:
                raise LMError(
                    f"prompt {i} has {len(prompt)} tokens; it must have 1 to "
                    f"{self.prompt_buckets[-1]}"
                )
            if np.min(prompt) < 0 or np.max(prompt) >= vocab_size:
                raise LMError(
                    f"prompt {i} holds a token outside of 0 to {vocab_size - 1}; "
                    "was it encoded for another model?"
                )

    def _batch(self, prompts, prompt_index, length, rng, settings, cut):  # type: ignore[no-untyped-def]
        """tokens, log_probs [N, S] and kept [N, S, K] of the rows that continue `prompt_index`."""
        first, last = prompt_index[0], prompt_index[-1] + 1
        n_prompts, n_rows = self._sizes(last - first, len(prompt_index))
        graph = self._graph(n_prompts, length, n_rows, *cut)
        padded = np.zeros((n_prompts, length), np.int32)
        lengths = np.ones(n_prompts, np.int32)
        for i, prompt in enumerate(prompts[first:last]):
            padded[i, : len(prompt)] = prompt
            lengths[i] = len(prompt)
        rows = np.zeros(n_rows, np.int32)
        rows[: len(prompt_index)] = prompt_index - first
        idle = np.ones(n_rows, np.float32)
        idle[: len(prompt_index)] = 0.0
        is_eos, limit, temperature, top_p = settings
        noise = draw_noise(rng, self.max_new_tokens, n_rows, self.config.vocab_size)
        inputs = (padded, lengths, rows, idle, is_eos, limit, temperature, top_p, *noise)
        outputs = graph(*[Tensor(a) for a in inputs])
        return [o.asnumpy().swapaxes(0, 1)[: len(prompt_index)] for o in outputs]

    def _completions(self, tokens, log_probs, prompt_index, is_eos, limit):  # type: ignore[no-untyped-def]
        # A batch that ends early leaves tokens of an earlier call behind its rows' ends.
        ends = is_eos[tokens[:, :limit]]
        found = ends.any(axis=1)
        lengths = np.where(found, ends.argmax(axis=1) + 1, limit).astype(np.int32)
        longest = int(lengths.max())
        inside = np.arange(longest) < lengths[:, None]
        log_probs = np.where(inside, log_probs[:, :longest], np.float32(0.0))
        if not np.isfinite(log_probs).all():
            raise LMError(
                "the model gives log-probabilities that are not finite: its weights hold NaN or "
                "infinity, or have grown too large"
            )
        pad = self.config.pad_id or 0
        return Completions(
            tokens=np.where(inside, tokens[:, :longest], np.int32(pad)),
            lengths=lengths,
            log_probs=log_probs,
            stop=np.where(found, "eos", "length"),
            prompt_index=prompt_index,
            version=self.version,
        )


class Generator(CompletionSampler):
    """Samples completions on the weights that a model has at the moment.

    Each shape (numbers of prompts and rows, prompt length) compiles once; few occur, since all
    three are rounded up.

    Args:
        model: whose Parameters are used; nothing is copied when they change.
        max_new_tokens, prompt_buckets: see `CompletionSampler`.
        max_rows: likewise. Memory for the cache is proportional to it.
    """

    def __init__(
        self,
        model: CausalLM,
        max_new_tokens: int,
        prompt_buckets: Sequence[int] = PROMPT_BUCKETS,
        max_rows: int = 128,
    ) -> None:
        super().__init__(model.config, max_new_tokens, prompt_buckets, max_rows)
        self.model = model
        self._graphs: dict[tuple[int, int, int, int, bool], GenerationGraph] = {}
        self._decoders: dict[tuple[int, int], Decoder] = {}
        """By prompt length and rows: graphs that differ in other things share their cache."""

    def _sizes(self, prompts: int, rows: int) -> tuple[int, int]:
        return rounded_up(prompts), rounded_up(rows)

    def _graph(self, prompts: int, length: int, rows: int, top_k: int, top_p: bool) -> Graph:
        key = (prompts, length, rows, top_k, top_p)
        if key not in self._graphs:
            sizes = (prompts, length, rows, self.max_new_tokens, top_k, top_p)
            graph = GenerationGraph(self.model, *sizes, self._decoders.get((length, rows)))
            self._graphs[key], self._decoders[length, rows] = graph, graph.decoder
        return self._graphs[key]


def rounded_up(count: int) -> int:
    """The next larger of COUNT_BUCKETS; beyond them `count` itself."""
    return next((b for b in COUNT_BUCKETS if b >= count), count)
