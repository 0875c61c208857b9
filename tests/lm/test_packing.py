"""Packing: every token once, nothing mixed, budgets held, whatever the lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrl_accel.errors import LMError
from msrl_accel.lm.config import LMConfig
from msrl_accel.lm.packing import MicroBatch, Packer, Sequences, attention_span, launch_cost


def make_sequences(prompt_lengths, prompt_index, lengths, seed=0, keep=1.0):
    """Random tokens from 1 on, so that 0 is padding alone."""
    rng = np.random.default_rng(seed)
    longest = max([*lengths, 1])
    mask = np.arange(longest) < np.array(lengths)[:, None]
    return Sequences(
        prompts=[rng.integers(1, 1000, n).astype(np.int32) for n in prompt_lengths],
        prompt_index=np.array(prompt_index),
        tokens=rng.integers(1, 1000, (len(lengths), longest)).astype(np.int32),
        lengths=np.array(lengths),
        mask=mask & (rng.random(mask.shape) < keep),
    )


def contexts(batch: MicroBatch):
    """(slot, target, tokens seen, their positions) of every prediction, as the model has it."""
    shared = batch.shape.tokens - batch.tokens.size
    for source, target, slot in zip(batch.sources, batch.targets, batch.slots):
        if slot < 0:
            continue
        if source < shared:
            index, last = divmod(source, batch.prompts.shape[1])
            yield slot, target, batch.prompts[index, : last + 1], np.arange(last + 1)
            continue
        row, column = divmod(source - shared, batch.tokens.shape[1])
        segments = batch.segments[row]
        seen = (segments == segments[column]) & (np.arange(len(segments)) <= column)
        prompt = batch.prompts[batch.prompt_index[row], : batch.prompt_lengths[row]]
        yield (
            slot,
            target,
            np.concatenate([prompt, batch.tokens[row, seen]]),
            np.concatenate([np.arange(len(prompt)), batch.positions[row, seen]]),
        )


def computed(batches):
    """Tokens that are not padding."""
    return sum(int((b.tokens > 0).sum() + (b.prompts > 0).sum()) for b in batches)


@st.composite
def cases(draw):
    n_prompts = draw(st.integers(1, 6))
    prompt_lengths = draw(st.lists(st.integers(1, 9), min_size=n_prompts, max_size=n_prompts))
    n = draw(st.integers(1, 25))
    prompt_index = draw(st.lists(st.integers(0, n_prompts - 1), min_size=n, max_size=n))
    lengths = draw(st.lists(st.integers(0, 12), min_size=n, max_size=n))
    keep = draw(st.sampled_from((1.0, 0.6, 0.0)))
    sequences = make_sequences(prompt_lengths, prompt_index, lengths, draw(st.integers(0, 9)), keep)
    return sequences, draw(st.integers(21, 200)), draw(st.booleans())


@given(cases())
@settings(max_examples=150, deadline=None)
def test_each_prediction_once_and_sees_its_own_sequence_only(case):
    sequences, budget, share = case
    width = sequences.tokens.shape[1]
    seen: list[int] = []
    for batch in Packer(budget, share_prompts=share).pack(sequences):
        assert batch.shape.tokens <= budget
        for slot, target, tokens, positions in contexts(batch):
            n, t = divmod(int(slot), width)
            prompt = sequences.prompts[sequences.prompt_index[n]]
            assert target == sequences.tokens[n, t]
            assert tokens.tolist() == [*prompt, *sequences.tokens[n, :t]]
            assert positions.tolist() == list(range(len(tokens)))
            seen.append(int(slot))
    assert sorted(seen) == np.flatnonzero(sequences.mask).tolist()


@given(cases())
@settings(max_examples=50, deadline=None)
def test_completions_keep_apart_and_padding_is_marked(case):
    sequences, budget, share = case
    width = sequences.tokens.shape[1]
    for batch in Packer(budget, share_prompts=share).pack(sequences):
        padding = batch.slots < 0
        assert np.all(batch.tokens[batch.segments < 0] == 0)
        assert np.all(batch.tokens[batch.segments >= 0] > 0)
        assert not batch.targets[padding].any() and not batch.sources[padding].any()
        owner = batch.slots[~padding] // width
        pairs = set(zip(owner.tolist(), batch.sequence[~padding].tolist()))
        assert len(pairs) == len({n for n, _ in pairs}) == len({s for _, s in pairs})


@given(cases())
@settings(max_examples=50, deadline=None)
def test_gather_and_scatter_are_inverse(case):
    sequences, budget, share = case
    values = np.random.default_rng(0).standard_normal((*sequences.tokens.shape, 2))
    back = np.zeros_like(values)
    for batch in Packer(budget, share_prompts=share).pack(sequences):
        gathered = batch.gather(values)
        assert not gathered[batch.slots < 0].any()
        batch.scatter(gathered, back)
    np.testing.assert_array_equal(back, np.where(sequences.mask[..., None], values, 0.0))


def test_a_chosen_part_is_packed_alone():
    sequences = make_sequences([3, 4], [0, 0, 1, 1], [2, 3, 4, 1])
    batches = Packer(64).pack(sequences, rows=[1, 2])
    slots = np.concatenate([b.slots[b.slots >= 0] for b in batches])
    assert sorted(set(slots // 4)) == [1, 2]
    assert Packer(64).pack(sequences, rows=[]) == []


def test_a_shared_prompt_is_computed_once():
    sequences = make_sequences([10, 30], np.repeat([0, 1], 8), [4] * 16)
    assert computed(Packer(256).pack(sequences)) == 10 + 30 + 16 * 4
    assert computed(Packer(256, share_prompts=False).pack(sequences)) == 8 * (10 + 30) + 16 * 4


def test_a_group_in_several_micro_batches_repeats_its_prompt_in_each():
    batches = Packer(72).pack(make_sequences([24], [0] * 8, [12] * 8))
    assert len(batches) == 2
    assert computed(batches) == 2 * 24 + 8 * 12


def test_without_sharing_prompt_and_completion_are_one_segment():
    (batch,) = Packer(64, share_prompts=False).pack(make_sequences([2, 3], [0, 1], [2, 1]))
    assert not batch.prompt_lengths.any()
    assert sorted(np.unique(batch.segments[batch.segments >= 0], return_counts=True)[1]) == [4, 4]


def test_single_completions_are_packed_across_prompts():
    """Rows of one prompt each would waste most of the place."""
    batches = Packer(256).pack(make_sequences([3] * 20, range(20), [40] + [2] * 19))
    assert sum(b.shape.tokens for b in batches) <= 192


def test_shapes_stay_the_same_while_lengths_vary_a_little():
    packer = Packer(2048)
    rng = np.random.default_rng(0)
    for _ in range(30):
        lengths = rng.integers(20, 41, 64)
        packer.pack(make_sequences([9] * 8, np.repeat(np.arange(8), 8), lengths.tolist()))
    assert len(packer.shapes) <= 2


def test_a_shape_is_kept_until_another_has_paid_for_its_compilation():
    packer = Packer(1024, launch_cost=8)
    (first,) = packer.pack(make_sequences([8] * 8, np.repeat(np.arange(8), 4), [16] * 32))
    few = make_sequences([8], [0] * 4, [16] * 4)
    shapes = [packer.pack(few)[0].shape for _ in range(8)]
    assert shapes[:3] == [first.shape] * 3
    assert shapes[-1].tokens < first.shape.tokens / 4
    assert len(packer.shapes) == 2


def test_a_resumed_packer_packs_as_the_first():
    first, second = Packer(512), Packer(512)
    for n in (5, 20, 33):
        first.pack(make_sequences([7], [0] * 6, [n] * 6))
    second.restore(first.state())
    sequences = make_sequences([7], [0] * 6, [21] * 6)
    for a, b in zip(first.pack(sequences), second.pack(sequences)):
        assert a.shape == b.shape
        np.testing.assert_array_equal(a.slots, b.slots)


def test_predictions_are_spread_evenly_over_micro_batches():
    lengths = [30] * 8 + [3] * 56
    batches = Packer(256, share_prompts=False).pack(make_sequences([2] * 64, range(64), lengths))
    counts = [int((b.slots >= 0).sum()) for b in batches]
    assert len(counts) > 1 and max(counts) - min(counts) <= 32


def test_a_sequence_longer_than_the_budget_is_an_error():
    sequences = make_sequences([10, 10], [0, 1], [5, 30])
    with pytest.raises(LMError, match=r"completion 1 has 40 tokens .*token_budget = 32"):
        Packer(32).pack(sequences)


def test_an_empty_prompt_and_no_budget_are_errors():
    with pytest.raises(LMError, match="completion 1 has an empty prompt"):
        Packer(32).pack(make_sequences([3, 0], [0, 1], [5, 5]))
    with pytest.raises(LMError, match="token_budget = 0"):
        Packer(0)


def test_attention_weighs_more_in_small_models():
    """Measured: about 280 tokens for a model of 1M parameters."""
    small = LMConfig("llama", 64, 128, 384, 5, 4, 2, 32)
    large = LMConfig("llama", 49152, 576, 1536, 30, 9, 3, 64)
    assert 150 < attention_span(small) < 500 < attention_span(large) < 3000
    rows = {}
    for span in (16, 2048):
        batches = Packer(2048, share_prompts=False, attention_span=span).pack(
            make_sequences([20] * 48, range(48), [14] * 48)
        )
        rows[span] = batches[0].shape.length
    assert rows[16] < rows[2048]


def test_a_small_model_gets_fewer_and_larger_micro_batches():
    small = LMConfig("llama", 64, 128, 384, 5, 4, 2, 32)
    large = LMConfig("llama", 49152, 576, 1536, 30, 9, 3, 64)
    assert launch_cost(small) > 200 > 50 > launch_cost(large) > 0
