"""Completions that newer weights may take over half-way (partial rollouts).

A completion is generated some tokens at a time. Between two parts the model's weights may change;
the prompt with the tokens so far is then read anew, so that no key or value of older weights stays
in the cache (Fu et al. 2025, arXiv:2505.24298, section 4.1). Each token keeps the log-probability
of the policy that drew it, and that policy's version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from msrl_accel.lm.generation import Completions, Generator, rounded_up
from msrl_accel.lm.model import CausalLM
from msrl_accel.lm.sampling import kept_size


class PartialGenerator:
    """Generates groups of completions a part at a time.

    Args:
        model: whose Parameters are used.
        max_new_tokens: the most tokens of a completion.
        part: tokens generated between two looks for newer weights; None: all of them.
        rows: completions generated side by side.
        sampling: temperature, top_k, top_p.
        follow: called before each part; loads newer weights into the model where there are some,
            and returns the version it then has.
    """

    def __init__(
        self,
        model: CausalLM,
        max_new_tokens: int,
        part: int | None,
        rows: int,
        sampling: dict[str, Any],
        follow: Callable[[], int],
    ) -> None:
        self.max_new_tokens = max_new_tokens
        self.part = min(part or max_new_tokens, max_new_tokens)
        self.generator = _FewShapes(model, self.part, max_rows=rows)
        self.sampling, self.follow = sampling, follow
        top_k, top_p = sampling["top_k"], sampling["top_p"] < 1.0
        self.n_kept = kept_size(model.config.vocab_size, top_k, top_p)

    def generate(
        self,
        prompts: Sequence[np.ndarray],
        group_size: int,
        rng: np.random.Generator,
        eos_ids: Sequence[int],
    ) -> Completions:
        """`group_size` completions of each prompt, with the version of each token."""
        n, longest = len(prompts) * group_size, self.max_new_tokens
        index = np.repeat(np.arange(len(prompts), dtype=np.int32), group_size)
        whole = Completions(
            tokens=np.full((n, longest), self.generator.config.pad_id or 0, np.int32),
            lengths=np.zeros(n, np.int32),
            log_probs=np.zeros((n, longest), np.float32),
            stop=np.full(n, "length"),
            prompt_index=index,
            version=0,
            kept=np.zeros((n, longest, self.n_kept), np.int32) if self.n_kept else None,
            versions=np.zeros((n, longest), np.int64),
        )
        self.generator.rows_in_all = n
        open_rows = np.arange(n)
        for start in range(0, longest, self.part):
            self.generator.version = self.follow()
            if start:
                prefixes = [
                    np.concatenate([prompts[index[row]], whole.tokens[row, :start]])
                    for row in open_rows
                ]
            part = self.generator.generate(
                prompts if start == 0 else prefixes,
                group_size if start == 0 else 1,
                rng,
                eos_ids=eos_ids,
                max_new_tokens=min(self.part, longest - start),
                **self.sampling,
            )
            _append(whole, open_rows, part, start)
            open_rows = open_rows[part.stop == "length"]
            if not open_rows.size:
                break
        return trimmed(whole)


class _FewShapes(Generator):
    """Continues with graphs of one number of rows, however many completions are still open."""

    rows_in_all = 1

    def _sizes(self, prompts: int, rows: int) -> tuple[int, int]:
        if prompts < rows:  # groups that begin
            return super()._sizes(prompts, rows)
        n = rounded_up(max(rows, min(self.rows_in_all, self.max_rows)))
        return n, n


def _append(whole: Completions, rows: np.ndarray, part: Completions, start: int) -> None:
    """Write a part's tokens behind the first `start` of those rows."""
    inside = np.arange(part.tokens.shape[1]) < part.lengths[:, None]
    where = rows[np.nonzero(inside)[0]], start + np.nonzero(inside)[1]
    whole.tokens[where] = part.tokens[inside]
    whole.log_probs[where] = part.log_probs[inside]
    assert whole.versions is not None
    whole.versions[where] = part.version
    if whole.kept is not None and part.kept is not None:
        whole.kept[where] = part.kept[inside]
    whole.lengths[rows] += part.lengths
    whole.stop[rows] = part.stop


def trimmed(c: Completions) -> Completions:
    """Without columns that no completion reaches; `version` is the oldest token's.

    Beyond a completion's end, `versions` repeats that of its first token.
    """
    longest = int(c.lengths.max())
    assert c.versions is not None
    inside = np.arange(longest) < c.lengths[:, None]
    versions = np.where(inside, c.versions[:, :longest], c.versions[:, :1])
    return Completions(
        tokens=c.tokens[:, :longest],
        lengths=c.lengths,
        log_probs=c.log_probs[:, :longest],
        stop=c.stop,
        prompt_index=c.prompt_index,
        version=int(versions.min()),
        kept=None if c.kept is None else c.kept[:, :longest],
        versions=versions,
    )
