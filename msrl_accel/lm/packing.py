"""Sequence packing: completions of any lengths -> micro-batches of a few fixed shapes.

A row of a micro-batch holds several sequences one after the other. `segments` tells them apart and
`positions` restart in each, so that none sees another. Completions of the same prompt share it: the
prompt stands in the row once, and each completion sees itself and its prompt (`prefixes`).

Only hidden states that predict a token with a loss are used: `sources` says where they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from msrl_accel.errors import LMError

if TYPE_CHECKING:
    from msrl_accel.lm.config import LMConfig

PADDING = -1
"""Segment of padding tokens, and slot of padding entries."""
LAUNCH_COST = 32
"""What a micro-batch costs besides its tokens, in tokens."""


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


class MicroBatch(NamedTuple):
    """B rows of T tokens, of which K predictions have a loss."""

    tokens: np.ndarray
    """[B, T] int32; 0 on padding."""
    positions: np.ndarray
    """[B, T] int32: from 0 in a prompt, continued in its completions."""
    segments: np.ndarray
    """[B, T] int32: number of the prompt or completion within the row, -1 on padding."""
    prefixes: np.ndarray
    """[B, T] int32: segment that a token sees besides its own: its prompt's."""
    sources: np.ndarray
    """[K] int32: index in B * T of the token whose hidden state predicts."""
    targets: np.ndarray
    """[K] int32: token predicted; 0 on padding."""
    sequence: np.ndarray
    """[K] int32: number of the completion within the micro-batch."""
    slots: np.ndarray
    """[K] int64: index n * L + t of the token predicted in arrays [N, L]; -1 on padding."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(B, T, K), what graphs are compiled for."""
        return (*self.tokens.shape, len(self.sources))  # type: ignore[return-value]

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

    A fit to times on CPU: a token costs its share of the matrix products and some operators on
    vectors as long as the hidden and intermediate sizes, and for every token of its row, products
    and operators on one score a head.
    """
    hidden, heads = config.hidden_size, config.n_heads
    queries = heads * config.head_dim
    keys = config.n_kv_heads * config.head_dim
    products = hidden * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    token = products / 20 + 30 * hidden + 10 * config.intermediate_size
    score = heads * (12 + 0.15 * config.head_dim)
    return max(1, round(token / score))


class _Item(NamedTuple):
    """A prompt and completions of it that stand together in one row."""

    prompt: int
    completions: list[int]
    size: int


class Packer:
    """Packs into micro-batches of at most `token_budget` tokens.

    Shapes come from a few buckets, and those used before are preferred while they cost at most a
    quarter more, because every new one is compiled.

    Args:
        token_budget: the most tokens of a micro-batch, padding included.
        share_prompts: completions in the same row share their prompt; else each repeats it.
        attention_span: as that function gives it for the model; short ones favour short rows.
    """

    def __init__(
        self, token_budget: int, *, share_prompts: bool = True, attention_span: int = 512
    ) -> None:
        if token_budget < 1:
            raise LMError(f"token_budget = {token_budget}: must be at least 1")
        self.token_budget = token_budget
        self.share_prompts = share_prompts
        self.attention_span = attention_span
        self.shapes: set[tuple[int, int, int]] = set()

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
        plans = [self._plan(sequences, chosen, t) for t in self._row_lengths(longest)]
        _, height, width, bins = min(
            (self._cost(len(bins), b, t), b, t, bins)
            for t, bins in plans
            for b in self._heights(t, len(bins))
        )
        return self._fill(sequences, bins, height, width)

    def state(self) -> list[list[int]]:
        """Shapes used so far: with them, a resumed run packs as the first would have."""
        return [list(shape) for shape in sorted(self.shapes)]

    def restore(self, state: Sequence[Sequence[int]]) -> None:
        self.shapes = {(int(b), int(t), int(k)) for b, t, k in state}

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

    def _row_lengths(self, longest: int) -> list[int]:
        """Lengths of rows to try: 2^i and 3 * 2^i from the longest sequence to the budget."""
        buckets = sorted(f << i for i in range(3, 24) for f in (1, 3))
        fitting = [b for b in buckets if longest <= b < self.token_budget]
        return [*fitting[:6], self.token_budget] if len(fitting) < 6 else fitting[:6]

    def _heights(self, width: int, n_rows: int) -> list[int]:
        """Numbers of rows to try: quarters of what the budget allows, and the known ones."""
        most = self.token_budget // width
        quarters = {max(1, -(-most * i // 4)) for i in (1, 2, 3, 4)}
        return sorted(quarters | {b for b, t, _ in self.shapes if t == width and b <= most})

    def _cost(self, n_rows: int, height: int, width: int) -> float:
        n_batches = -(-n_rows // height)
        cost = n_batches * (height * width * (1.0 + width / self.attention_span) + LAUNCH_COST)
        known = any(shape[:2] == (height, width) for shape in self.shapes)
        return cost if known else 1.25 * cost

    def _plan(self, s: Sequences, chosen: np.ndarray, width: int) -> tuple[int, list[list[_Item]]]:
        """Rows of `width` tokens by first fit, longest items first."""
        items = sorted(self._items(s, chosen, width), key=lambda item: -item.size)
        free = np.full(len(items), width)
        bins: list[list[_Item]] = []
        for item in items:
            i = int(np.argmax(free >= item.size))
            if i == len(bins):
                bins.append([])
            bins[i].append(item)
            free[i] -= item.size
        return width, bins

    def _items(self, s: Sequences, chosen: np.ndarray, width: int) -> list[_Item]:
        if not self.share_prompts:
            return [
                _Item(p, [n], len(s.prompts[p]) + int(s.lengths[n]))
                for n, p in zip(chosen.tolist(), s.prompt_index[chosen].tolist())
            ]
        by_prompt: dict[int, list[int]] = {}
        for n in chosen.tolist():
            by_prompt.setdefault(int(s.prompt_index[n]), []).append(n)
        items = []
        for prompt, completions in by_prompt.items():
            # Groups longer than a row are cut, and the prompt repeated.
            start = len(s.prompts[prompt])
            part: list[int] = []
            size = start
            for n in completions:
                length = int(s.lengths[n])
                if part and size + length > width:
                    items.append(_Item(prompt, part, size))
                    part, size = [], start
                part.append(n)
                size += length
            items.append(_Item(prompt, part, size))
        return items

    def _fill(
        self, s: Sequences, bins: list[list[_Item]], height: int, width: int
    ) -> list[MicroBatch]:
        """Rows dealt to micro-batches so that all have about the same number of predictions."""
        counts = [sum(int(s.mask[n, : s.lengths[n]].sum()) for n in _completions(r)) for r in bins]
        dealt: list[list[list[_Item]]] = [[] for _ in range(-(-len(bins) // height))]
        load = np.zeros(len(dealt), int)
        for i in np.argsort(-np.array(counts), kind="stable").tolist():
            open_batches = [j for j, batch in enumerate(dealt) if len(batch) < height]
            j = min(open_batches, key=lambda j: (load[j], j))
            dealt[j].append(bins[i])
            load[j] += counts[i]
        capacity = self._capacity(height, width, int(load.max()))
        self.shapes.add((height, width, capacity))
        return [_micro_batch(s, batch, height, width, capacity) for batch in dealt]

    def _capacity(self, height: int, width: int, needed: int) -> int:
        """K: a known one that fits, else in eighths of the tokens with some room."""
        known = [k for b, t, k in self.shapes if (b, t) == (height, width) and k >= needed]
        most = height * width
        if known and min(known) <= max(needed + most // 4, 1):
            return min(known)
        eighth = max(1, most // 8)
        return min(most, -(-(needed + needed // 16 + 1) // eighth) * eighth)


def _completions(row: list[_Item]) -> list[int]:
    return [n for item in row for n in item.completions]


def _micro_batch(
    s: Sequences, rows: list[list[_Item]], height: int, width: int, capacity: int
) -> MicroBatch:
    grids: dict[str, Any] = {
        name: np.full((height, width), fill, np.int32)
        for name, fill in (("tokens", 0), ("positions", 0), ("segments", -1), ("prefixes", -1))
    }
    lists: dict[str, list[np.ndarray]] = {"sources": [], "targets": [], "sequence": [], "slots": []}
    n_sequences = 0
    for b, row in enumerate(rows):
        at, segment = 0, 0
        for item in row:
            prompt = s.prompts[item.prompt]
            prefix, end = segment, at + len(prompt)
            _place(grids, b, at, prompt, 0, prefix, prefix)
            last_of_prompt = b * width + end - 1
            at = end
            for n in item.completions:
                length = int(s.lengths[n])
                # A completion alone with its prompt is one segment with it.
                segment += len(item.completions) > 1
                _place(grids, b, at, s.tokens[n, :length], len(prompt), segment, prefix)
                sources = b * width + at - 1 + np.arange(length)
                sources[:1] = last_of_prompt
                t = np.flatnonzero(s.mask[n, :length])
                lists["sources"].append(sources[t])
                lists["targets"].append(s.tokens[n, t])
                lists["sequence"].append(np.full(len(t), n_sequences))
                lists["slots"].append(n * s.tokens.shape[1] + t)
                n_sequences += t.size > 0
                at += length
            segment += 1
    for name, fill in (("sources", 0), ("targets", 0), ("sequence", 0), ("slots", PADDING)):
        column = np.full(capacity, fill, np.int64 if name == "slots" else np.int32)
        values = np.concatenate(lists[name]) if lists[name] else np.zeros(0, int)
        column[: len(values)] = values
        grids[name] = column
    return MicroBatch(**grids)


def _place(
    grids: dict[str, Any],
    row: int,
    at: int,
    tokens: np.ndarray,
    position: int,
    segment: int,
    prefix: int,
) -> None:
    """Write one prompt or completion into a row from column `at`."""
    end = at + len(tokens)
    grids["tokens"][row, at:end] = tokens
    grids["positions"][row, at:end] = np.arange(position, position + len(tokens))
    grids["segments"][row, at:end] = segment
    grids["prefixes"][row, at:end] = prefix
