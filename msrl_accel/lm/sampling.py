"""Drawing tokens: Gumbel noise from outside, top-k and top-p with the kept set told."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from msrl_accel.lm.layers import MASKED

BLOCK = 128
WHOLE_ROW = 512
"""Vocabularies up to here have rows of noise of their own; larger ones are put together."""
TABLE_ENTRIES = 2**19
MAX_KEPT = 1024
"""Most tokens that top-p alone keeps; a larger vocabulary is cut to the likeliest of these."""


class Noise(NamedTuple):
    """Noise [steps, N, V] of a rollout, as rows of a table.

    Entry [t, n] is the rows index[t, n] of the table, one after the other, cut to V numbers.
    """

    table: np.ndarray
    """[R, W] float32, Gumbel distributed, or zero for the likeliest token always."""
    index: np.ndarray  # type: ignore[assignment]
    """[steps, N, ceil(V / W)] int32."""

    def dense(self, vocab_size: int) -> np.ndarray:
        """[steps, N, V]"""
        rows = self.table[self.index].reshape((*self.index.shape[:2], -1))
        noise: np.ndarray = rows[..., :vocab_size]
        return noise


def noise_shapes(steps: int, rows: int, vocab_size: int) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Shapes of the table and the index of `Noise`."""
    width = vocab_size if vocab_size <= WHOLE_ROW else BLOCK
    index = (steps, rows, -(-vocab_size // width))
    return (min(int(np.prod(index)), max(1, TABLE_ENTRIES // width)), width), index


def draw_noise(rng: np.random.Generator | None, steps: int, rows: int, vocab_size: int) -> Noise:
    """Gumbel noise from `rng`; None gives zeros, which make sampling greedy.

    Where all of [steps, rows, vocab_size] would take more than TABLE_ENTRIES numbers, blocks of a
    table of so many are picked at random instead: each number is still Gumbel distributed.
    """
    table_shape, index_shape = noise_shapes(steps, rows, vocab_size)
    count = int(np.prod(index_shape))
    if rng is None:
        return Noise(np.zeros(table_shape, np.float32), np.zeros(index_shape, np.int32))
    # In float64: a float32 exponential is exactly 0 often enough to be met.
    table = -np.log(rng.standard_exponential(table_shape))
    if count <= table_shape[0]:
        index = np.arange(count)
    else:
        index = rng.integers(0, table_shape[0], count)
    return Noise(table.astype(np.float32), index.astype(np.int32).reshape(index_shape))


class Sampler(nn.Cell):
    """One token for each row: the argmax of logits / temperature + noise.

    construct(logits [N, V] already divided by the temperature, table [R, W], index [N, n],
    top_p scalar) -> token [N] int32, its probability [N] in the distribution sampled from, kept
    [N, K] int32: the tokens of that distribution, likeliest first, unused places repeating the
    first; [N, 1] zeros where nothing is cut. The logarithm is left to whoever has several steps,
    and log-softmax costs three times as much as softmax on CPU.

    Args:
        vocab_size: V.
        top_k: tokens kept, 0 for all.
        top_p: whether only the likeliest tokens of a total probability `top_p` are kept.
    """

    def __init__(self, vocab_size: int, top_k: int, top_p: bool) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.top_k, self.top_p = top_k, top_p
        self.n_kept = kept_size(vocab_size, top_k, top_p)
        self.arg_max = ops.ArgMaxWithValue(-1)
        self.softmax = ops.Softmax(-1)
        self.largest = ops.TopK(sorted=True)

    def noise(self, table: Tensor, index: Tensor) -> Tensor:
        """[N, V]"""
        noise = ops.gather(table, index, 0).reshape((index.shape[0], -1))
        if noise.shape[1] > self.vocab_size:
            noise = ops.slice(noise, (0, 0), (noise.shape[0], self.vocab_size))
        return noise

    def draw(self, logits: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Place of the token [N, 1] int32 and its probability [N]."""
        place, _ = self.arg_max(logits + noise)
        place = ops.cast(place, mstype.int32).reshape((-1, 1))
        return place, ops.gather_elements(self.softmax(logits), 1, place).reshape((-1,))

    def construct(
        self, logits: Tensor, table: Tensor, index: Tensor, top_p: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        noise = self.noise(table, index)
        if self.n_kept == 0:
            place, probability = self.draw(logits, noise)
            return place.reshape((-1,)), probability, ops.zeros((logits.shape[0], 1), mstype.int32)
        largest, ids = self.largest(logits, self.n_kept)
        if self.top_p:
            if self.top_k > 0:
                probability = self.softmax(largest)
            else:
                probability = ops.gather_elements(self.softmax(logits), 1, ids)
            before = ops.cumsum(probability, 1) - probability
            kept = ops.logical_or(before < top_p, ops.arange(0, self.n_kept) == 0)
            largest = ops.select(kept, largest, ops.full_like(largest, MASKED))
            ids = ops.select(kept, ids, ops.tile(ids[:, :1], (1, self.n_kept)))
        place, drawn = self.draw(largest, ops.gather_elements(noise, 1, ids))
        return ops.gather_elements(ids, 1, place).reshape((-1,)), drawn, ids


def kept_size(vocab_size: int, top_k: int, top_p: bool) -> int:
    """Width of the kept sets; 0 where the whole vocabulary is sampled from."""
    if top_k > 0:
        return min(top_k, vocab_size)
    return min(MAX_KEPT, vocab_size) if top_p else 0
