"""Sequence packing: completions of any lengths -> micro-batches of a few fixed shapes.

A row of a micro-batch holds several sequences one after the other. `segments` tells them apart, so
that none sees another, and each has its own `positions`. Completions of one prompt may share it: it
then stands outside of the rows, is computed once, and seen from every row that continues it.

Only hidden states that predict a token with a loss are used: `sources` says where they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from msrl_accel.errors import LMError

if TYPE_CHECKING:
    from msrl_accel.lm.config import LMConfig

PADDING = -1
"""Segment of padding tokens, and slot of padding entries."""
COMPILE_LAUNCHES = 200
"""What compilation for a shape costs, in launches of a micro-batch."""
NO_PROMPTS = (1, 1)
"""Shape of the prompts of a micro-batch in which none is shared; they are not computed."""


class Sequences(NamedTuple):
    """Prompts and their completions; tokens are ids, never text encoded again."""

    prompts: Sequence[np.ndarray]
    """Token ids of each prompt, at least one (int32)."""
    prompt_index: np.ndarray
    """Which prompt each completion continues [N]."""
    tokens: np.ndarray
    """Token ids of the completions [N, L] (int32)."""
    lengths: np.ndarray
    """Tokens of each completion [N]; what lies beyond is not read."""
    mask: np.ndarray
    """Which tokens have a loss [N, L] (bool)."""


class Shape(NamedTuple):
    """Of a micro-batch."""

    prompts: int
    prompt_length: int
    rows: int
    length: int
    predictions: int

    @property
    def tokens(self) -> int:
        """In all of it, padding included."""
        shared = 0 if self[:2] == NO_PROMPTS else self.prompts * self.prompt_length
        return shared + self.rows * self.length


class MicroBatch(NamedTuple):
    """R rows of T tokens, M prompts of P tokens, and K predictions with a loss."""

    tokens: np.ndarray
    """[R, T] int32; 0 on padding."""
    positions: np.ndarray
    """[R, T] int32: from 0 in a prompt, continued in its completions."""
    segments: np.ndarray
    """[R, T] int32: number of the sequence within the row, -1 on padding."""
    prompts: np.ndarray
    """[M, P] int32: prompts in common; 0 on padding. Of shape NO_PROMPTS: rows hold their own."""
    prompt_index: np.ndarray
    """[R] int32: the prompt that all sequences of the row continue."""
    prompt_lengths: np.ndarray
    """[R] int32: tokens of that prompt; 0: none."""
    sources: np.ndarray
    """[K] int32: place of the token whose hidden state predicts, among M * P of prompts (but see
    NO_PROMPTS) and R * T of rows."""
    targets: np.ndarray
    """[K] int32: token predicted; 0 on padding."""
    sequence: np.ndarray
    """[K] int32: number of the completion within the micro-batch."""
    slots: np.ndarray
    """[K] int64: index n * L + t of the token predicted in arrays [N, L]; -1 on padding."""

    @property
    def shape(self) -> Shape:
        """What graphs are compiled for."""
        sizes = (*self.prompts.shape, *self.tokens.shape, len(self.sources))
        return Shape(*sizes)

    def gather(self, array: np.ndarray) -> np.ndarray:
        """Entries [K, ...] of an array [N, L, ...]; 0 on padding."""
        flat = array.reshape((-1, *array.shape[2:]))
        picked: np.ndarray = flat[np.maximum(self.slots, 0)]
        picked[self.slots == PADDING] = 0
        return picked

    def scatter(self, values: np.ndarray, array: np.ndarray) -> None:
        """Write values [K, ...] to where they belong in a contiguous array [N, L, ...]."""
        real = self.slots != PADDING
        array.reshape((-1, *array.shape[2:]))[self.slots[real]] = values[real]


def attention_span(config: LMConfig) -> int:
    """Length of a row at which attention costs about as much as the rest of the model.

    A fit to times on CPU: for every token of its row, a token takes products and operators on one
    score a head.
    """
    score = config.n_heads * (12 + 0.15 * config.head_dim)
    return max(1, round(_token_cost(config) / score))


def launch_cost(config: LMConfig) -> int:
    """What a micro-batch costs besides its tokens, in tokens: about 4 ms a layer on CPU."""
    return round(6e6 / _token_cost(config))


def _token_cost(config: LMConfig) -> float:
    """Of a token in a layer: a share of the matrix products, and operators on vectors as long as
    the hidden and intermediate sizes."""
    hidden, heads = config.hidden_size, config.n_heads
    queries = heads * config.head_dim
    keys = config.n_kv_heads * config.head_dim
    products = hidden * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    return products / 20 + 30 * hidden + 10 * config.intermediate_size


class _Row(NamedTuple):
    """Completions that stand in one row, behind each other."""

    prompt: int | None
    """The one all of them continue, outside of the row; None: each has its own before it."""
    completions: list[int]


class _Plan(NamedTuple):
    """Rows, and micro-batches of `shape` that they are dealt to; its K is not known yet."""

    shape: Shape
    batches: list[list[_Row]]


class Packer:
    """Packs into micro-batches of at most `token_budget` tokens.

    Every new shape is compiled, so those used before are preferred until what that cost adds up to
    what compilation does.

    Args:
        token_budget: the most tokens of a micro-batch, padding included.
        share_prompts: compute a prompt once for its completions where that costs less; else each
            repeats it.
        attention_span: as that function gives it for the model; short ones favour short rows.
        launch_cost: likewise; large ones favour few micro-batches.
    """

    def __init__(
        self,
        token_budget: int,
        *,
        share_prompts: bool = True,
        attention_span: int = 512,
        launch_cost: int = 32,
    ) -> None:
        if token_budget < 1:
            raise LMError(f"token_budget = {token_budget}: must be at least 1")
        self.token_budget = token_budget
        self.share_prompts = share_prompts
        self.attention_span = attention_span
        self.launch_cost = launch_cost
        self.shapes: set[Shape] = set()
        self.waste = 0.0
        """Tokens that better shapes would have saved since the last new one."""

    def pack(self, sequences: Sequences, rows: Iterable[int] | None = None) -> list[MicroBatch]:
        """Micro-batches that hold every completion once.

        Args:
            sequences: prompts and completions.
            rows: completions to pack; default all.

        Raises:
            LMError: a sequence longer than the budget, or an empty prompt.
        """
        chosen = np.arange(len(sequences.lengths)) if rows is None else np.array(list(rows), int)
        if not chosen.size:
            return []
        longest = self._check(sequences, chosen)
        plans = [*self._whole(sequences, chosen, longest), *self._shared(sequences, chosen)]
        return self._fill(sequences, self._choose(plans))

    def state(self) -> dict[str, Any]:
        """Shapes used so far and their waste: a resumed run packs as the first would have."""
        return {"shapes": [list(shape) for shape in sorted(self.shapes)], "waste": self.waste}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.shapes = {Shape(*map(int, shape)) for shape in state["shapes"]}
        self.waste = float(state["waste"])

    def _choose(self, plans: list[_Plan]) -> _Plan:
        # No two plans have the same shape.
        costs = {plan.shape: self._cost(plan) for plan in plans}
        ranked = sorted(plans, key=lambda plan: (costs[plan.shape], plan.shape))
        best = ranked[0]
        compiled = {shape[:4] for shape in self.shapes}
        known = next((plan for plan in ranked if plan.shape[:4] in compiled), None)
        if known is not None:
            self.waste += costs[known.shape] - costs[best.shape]
            if self.waste < COMPILE_LAUNCHES * self.launch_cost:
                return known
        self.waste = 0.0
        return best

    def _check(self, s: Sequences, chosen: np.ndarray) -> int:
        """Length of the longest sequence."""
        prompt_lengths = np.array([len(p) for p in s.prompts])[s.prompt_index[chosen]]
        total = prompt_lengths + s.lengths[chosen]
        worst = int(total.argmax())
        if total[worst] > self.token_budget:
            raise LMError(
                f"completion {chosen[worst]} has {total[worst]} tokens with its prompt, more than "
                f"token_budget = {self.token_budget}: raise it, or lower max_new_tokens or the "
                "prompt length"
            )
        if prompt_lengths.min() < 1:
            raise LMError(
                f"completion {chosen[prompt_lengths.argmin()]} has an empty prompt, so nothing "
                "predicts its first token: start prompts with a token such as BOS"
            )
        return int(total[worst])

    def _cost(self, plan: _Plan) -> float:
        """In tokens: padding, attention and launches included."""
        m, p, r, t, _ = shape = plan.shape
        attention = (m * p * p + r * t * (p + t)) / self.attention_span
        return len(plan.batches) * (shape.tokens + attention + self.launch_cost)

    def _whole(self, s: Sequences, chosen: np.ndarray, longest: int) -> Iterator[_Plan]:
        """Plans in which each completion stands in a row with its prompt before it."""
        sizes = {n: len(s.prompts[s.prompt_index[n]]) + int(s.lengths[n]) for n in chosen.tolist()}
        lengths = _buckets(longest, self.token_budget) or [self.token_budget]
        for length in lengths:
            rows = [_Row(None, completions) for completions in _first_fit(sizes, length)]
            most = self.token_budget // length
            known = {k.rows for k in self.shapes if k[:2] == NO_PROMPTS and k.length == length}
            for height in _heights(len(rows), most) | {r for r in known if r <= most}:
                count = -(-len(rows) // height)
                # Rows come fullest first: dealt in turn, all batches get about the same.
                batches = [rows[i::count] for i in range(count)]
                yield _Plan(Shape(*NO_PROMPTS, height, length, 0), batches)

    def _shared(self, s: Sequences, chosen: np.ndarray) -> Iterator[_Plan]:
        """Plans in which each prompt is computed once for the rows that continue it."""
        groups: dict[int, dict[int, int]] = {}
        for n in chosen.tolist():
            groups.setdefault(int(s.prompt_index[n]), {})[n] = int(s.lengths[n])
        if not self.share_prompts or len(groups) == len(chosen):
            return
        longest_prompt = max(len(s.prompts[i]) for i in groups)
        known = {k.prompt_length for k in self.shapes if k.prompt_length >= longest_prompt}
        for length in _buckets(int(s.lengths[chosen].max()), self.token_budget):
            rows = [
                [_Row(i, completions) for completions in _first_fit(sizes, length)]
                for i, sizes in groups.items()
            ]
            counts = [len(of_prompt) for of_prompt in rows]
            for p in known.union(_buckets(longest_prompt, self.token_budget)[:1]):
                for m, r in self._sizes(p, length, counts):
                    yield _Plan(Shape(m, p, r, length, 0), _deal(rows, m, r))

    def _sizes(self, p: int, length: int, counts: list[int]) -> set[tuple[int, int]]:
        """Numbers of prompts and rows of a micro-batch to try, for prompts with so many rows."""
        known = (k for k in self.shapes if (k.prompt_length, k.length) == (p, length))
        sizes = {(k.prompts, k.rows) for k in known if k.tokens <= self.token_budget}
        mean = sum(counts) / len(counts)
        for m in {-(-len(counts) // i) for i in range(1, len(counts) + 1)}:
            most = (self.token_budget - m * p) // length
            step = max(1, most // 8)
            for r in (m * max(counts), -(-math.ceil(m * mean) // step) * step, most):
                if 1 <= r <= most:
                    sizes.add((m, min(r, m * max(counts))))
        return sizes

    def _fill(self, s: Sequences, plan: _Plan) -> list[MicroBatch]:
        needed = max(
            sum(int(s.mask[n, : s.lengths[n]].sum()) for row in batch for n in row.completions)
            for batch in plan.batches
        )
        shape = plan.shape._replace(predictions=self._predictions(plan.shape, needed))
        self.shapes.add(shape)
        return [_micro_batch(s, batch, shape) for batch in plan.batches]

    def _predictions(self, shape: Shape, needed: int) -> int:
        """K: a known one that fits, else in eighths of the rows' tokens with some room.

        Rows of shared prompts hold completions alone: then nearly all their tokens.
        """
        most = shape.rows * shape.length
        if shape[:2] != NO_PROMPTS:
            return most
        known = [k.predictions for k in self.shapes if k[:4] == shape[:4]]
        fitting = [k for k in known if k >= needed]
        if fitting:
            return min(fitting)
        eighth = max(1, most // 8)
        return min(most, -(-(needed + needed // 16 + 1) // eighth) * eighth)


def _buckets(length: int, most: int) -> list[int]:
    """The next four of 8, 12, 16, 24, 32, 48 ... (2^i and 3 * 2^i) that are at most so many."""
    buckets = sorted(f << i for f, first in ((1, 3), (3, 2)) for i in range(first, 24))
    return [b for b in buckets if length <= b <= most][:4]


def _heights(rows: int, most: int) -> set[int]:
    """Numbers of rows of a micro-batch to try, of 1, 2, 3, 4, 6, 8, 12 ... and `most`."""
    buckets = sorted({f << i for f in (1, 3) for i in range(24)})
    even = [-(-rows // count) for count in range(1, 9)]
    return {min(most, next(b for b in buckets if b >= height)) for height in even}


def _first_fit(sizes: Mapping[int, int], length: int) -> list[list[int]]:
    """Completions of these sizes in rows, longest first, each in the first row with room."""
    rows: list[list[int]] = []
    free = np.full(len(sizes), length)
    for n in sorted(sizes, key=lambda n: -sizes[n]):
        i = int(np.argmax(free >= sizes[n]))
        if i == len(rows):
            rows.append([])
        rows[i].append(n)
        free[i] -= sizes[n]
    return rows


def _deal(rows: list[list[_Row]], m: int, r: int) -> list[list[_Row]]:
    """Rows of each prompt, in order, to micro-batches of at most m prompts and r rows."""
    batches: list[list[_Row]] = []
    n_prompts = m
    for of_prompt in rows:
        n_prompts += 1
        for row in of_prompt:
            if n_prompts > m or len(batches[-1]) == r:
                batches.append([])
                n_prompts = 1
            batches[-1].append(row)
    return batches


def _micro_batch(s: Sequences, rows: list[_Row], shape: Shape) -> MicroBatch:
    batch = _empty(shape)
    local: dict[int, int] = {}
    n_sequences = filled = 0
    for b, row in enumerate(rows):
        if row.prompt is not None:
            _place_prompt(batch, b, s.prompts[row.prompt], local.setdefault(row.prompt, len(local)))
        at = 0
        for segment, n in enumerate(row.completions):
            prompt, tokens = s.prompts[s.prompt_index[n]], s.tokens[n, : s.lengths[n]]
            own = tokens if row.prompt is not None else np.concatenate([prompt, tokens])
            end = at + len(own)
            batch.tokens[b, at:end] = own
            batch.positions[b, at:end] = np.arange(len(own)) + len(prompt) + len(tokens) - len(own)
            batch.segments[b, at:end] = segment
            t = np.flatnonzero(s.mask[n, : len(tokens)])
            predicted = slice(filled, filled + len(t))
            batch.sources[predicted] = _predictors(batch, b, end, len(tokens))[t]
            batch.targets[predicted] = tokens[t]
            batch.sequence[predicted] = n_sequences
            batch.slots[predicted] = n * s.tokens.shape[1] + t
            at = end
            filled += len(t)
            n_sequences += len(t) > 0
    return batch


def _empty(shape: Shape) -> MicroBatch:
    def zeros(*size: int) -> np.ndarray:
        return np.zeros(size, np.int32)

    m, p, r, t, k = shape
    return MicroBatch(
        tokens=zeros(r, t),
        positions=zeros(r, t),
        segments=zeros(r, t) + PADDING,
        prompts=zeros(m, p),
        prompt_index=zeros(r),
        prompt_lengths=zeros(r),
        sources=zeros(k),
        targets=zeros(k),
        sequence=zeros(k),
        slots=np.full(k, PADDING, np.int64),
    )


def _place_prompt(batch: MicroBatch, row: int, prompt: np.ndarray, index: int) -> None:
    batch.prompts[index, : len(prompt)] = prompt
    batch.prompt_index[row] = index
    batch.prompt_lengths[row] = len(prompt)


def _predictors(batch: MicroBatch, row: int, end: int, length: int) -> np.ndarray:
    """Places of the tokens before each of the `length` tokens that end in column `end`."""
    start = batch.shape.tokens - batch.tokens.size + row * batch.tokens.shape[1]
    places: np.ndarray = start + end - length - 1 + np.arange(length)
    if batch.prompt_lengths[row]:
        last = batch.prompt_lengths[row] - 1
        places[:1] = batch.prompt_index[row] * batch.prompts.shape[1] + last
    return places
