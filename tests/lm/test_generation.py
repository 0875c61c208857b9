"""Generation against the NumPy decoder: log-probs, ragged prompts, ends, sampling, replay."""

from __future__ import annotations

import numpy as np
import pytest
from lm_helpers import packed, random_arrays, tiny
from lm_reference import logits, token_log_probs
from policy_helpers import count_compilations

from msrl_accel.errors import LMError

pytestmark = pytest.mark.usefixtures("graph_mode")

STEPS = 80
EOS = (1, 7)
PROMPTS = [np.array(p, np.int32) for p in ([5, 9, 2, 11, 3], [4], [8, 8, 20, 17, 6, 2, 13])]


def make(variant="qwen2", steps=STEPS, seed=0, **changes):
    from msrl_accel.lm.generation import Generator
    from msrl_accel.lm.model import CausalLM

    config = tiny(variant, **changes)
    model = CausalLM(config)
    model.load_arrays(random_arrays(config, seed, scale=0.25))
    return Generator(model, steps, prompt_buckets=(8,), max_rows=8)


@pytest.fixture(scope="module")
def generator(graph_mode):
    return make()


def rows_of(completions, prompts=PROMPTS):
    """(prompt, completion) of every row, as lists."""
    return [
        (list(prompts[i]), list(completions.tokens[n, : completions.lengths[n]]))
        for n, i in enumerate(completions.prompt_index)
    ]


def largest_difference(generator, completions, temperature=1.0, prompts=PROMPTS):
    """Between log-probs of generation and those of the whole sequences, in NumPy."""
    config, arrays = generator.model.config, generator.model.arrays()
    differences = [0.0]
    for n, (prompt, completion) in enumerate(rows_of(completions, prompts)):
        expected, _ = token_log_probs(config, arrays, prompt + completion, temperature)
        found = completions.log_probs[n, : len(completion)]
        differences.append(np.abs(found - expected[len(prompt) :]).max())
    return max(differences)


def sample(generator, seed=0, **options):
    options = {"eos_ids": (), **options}
    return generator.generate(PROMPTS, 2, np.random.default_rng(seed), **options)


def test_log_probs_are_those_of_the_whole_sequence(generator):
    completions = sample(generator, temperature=0.8)
    assert completions.tokens.shape == (6, STEPS)
    assert list(completions.prompt_index) == [0, 0, 1, 1, 2, 2]
    assert largest_difference(generator, completions, 0.8) < 1e-4
    assert largest_difference(generator, completions, 0.9) > 1e-2


@pytest.mark.parametrize("variant", ["llama", "llama3", "qwen3"])
def test_every_layout_decodes_as_it_evaluates(variant):
    generator = make(variant, steps=12)
    assert largest_difference(generator, sample(generator)) < 1e-4


def test_log_probs_tell_a_wrong_position_and_a_changed_matrix(generator):
    from mindspore import Tensor

    completions = sample(generator)
    arrays = generator.model.arrays()
    name = "model.layers.1.mlp.down_proj.weight"
    generator.model.load_arrays({**arrays, name: arrays[name] + 1e-4})
    try:
        assert largest_difference(generator, completions) > 1e-4
    finally:
        generator.model.load_arrays(arrays)

    shifted = make(steps=12)
    graph = shifted._graph(3, 8, 6, 0, False)
    for table in ("cos", "sin"):
        values = getattr(graph.decoder, table).asnumpy()
        setattr(graph.decoder, table, Tensor(np.roll(values, 1, axis=0)))
    assert largest_difference(shifted, sample(shifted)) > 1e-4


def test_the_training_graph_agrees(generator):
    from mindspore import Tensor, nn

    completions = sample(generator)

    class Evaluate(nn.Cell):
        def __init__(self):
            super().__init__(auto_prefix=False)
            self.model = generator.model

        def construct(self, *inputs):
            return self.model.token_log_probs(self.model.weights, *inputs)

    rows = rows_of(completions)
    inputs = packed([[prompt + completion] for prompt, completion in rows], 8 + STEPS)
    log_probs, _ = Evaluate()(*[Tensor(a) for a in inputs], Tensor(np.float32(1.0)))
    for n, (prompt, completion) in enumerate(rows):
        found = log_probs.asnumpy()[n, len(prompt) : len(prompt) + len(completion)]
        np.testing.assert_allclose(found, completions.log_probs[n], atol=1e-4)


def test_greedy_takes_the_likeliest_token(generator):
    config, arrays = generator.model.config, generator.model.arrays()
    completions = generator.generate(PROMPTS, 2, eos_ids=())
    for prompt, completion in rows_of(completions):
        expected = logits(config, arrays, prompt + completion)[len(prompt) - 1 : -1]
        chosen = expected[np.arange(STEPS), completion]
        np.testing.assert_allclose(chosen, expected.max(axis=1), atol=1e-4)


def test_every_eos_ends_a_completion_and_the_last_ends_the_loop(generator):
    whole = sample(generator, seed=3)
    cut = sample(generator, seed=3, eos_ids=EOS)
    assert set(cut.stop) <= {"eos", "length"}
    ending = set()
    for n in range(6):
        ends = np.flatnonzero(np.isin(whole.tokens[n], EOS))
        length = ends[0] + 1 if ends.size else STEPS
        assert cut.lengths[n] == length
        assert cut.stop[n] == ("eos" if ends.size else "length")
        np.testing.assert_array_equal(cut.tokens[n, :length], whole.tokens[n, :length])
        np.testing.assert_allclose(
            cut.log_probs[n, :length], whole.log_probs[n, :length], atol=1e-5
        )
        assert (cut.tokens[n, length:] == generator.model.config.pad_id).all()
        assert (cut.log_probs[n, length:] == 0).all()
        ending.add(int(cut.tokens[n, length - 1]))
    assert ending == set(EOS)

    # What an ended loop did not reach is as the call before left it.
    (graph,) = generator._graphs.values()
    longest = cut.lengths.max()
    assert longest < STEPS
    left = graph.tokens.asnumpy()[longest:, :6].T
    np.testing.assert_array_equal(left, whole.tokens[:, longest:])


def test_fewer_tokens_are_the_first_ones(generator):
    whole, few = sample(generator), sample(generator, max_new_tokens=5)
    np.testing.assert_array_equal(few.tokens, whole.tokens[:, :5])
    assert list(few.stop) == ["length"] * 6


def test_a_prompt_that_is_the_eos_token_is_not_an_end(generator):
    completions = generator.generate(
        [np.array([1], np.int32)] * 3, 2, eos_ids=(1,), max_new_tokens=3
    )
    assert (completions.lengths >= 1).all()


def test_batches_and_neighbours_do_not_matter(generator):
    """Greedy, 10 rows in batches of 8 and 2: as each prompt alone."""
    prompts = [PROMPTS[i % 3] for i in range(5)]
    together = generator.generate(prompts, 2, eos_ids=(), max_new_tokens=6)
    alone = generator.generate(PROMPTS, 2, eos_ids=(), max_new_tokens=6)
    for n, i in enumerate(together.prompt_index):
        np.testing.assert_array_equal(together.tokens[n], alone.tokens[2 * (i % 3)])
        np.testing.assert_allclose(together.log_probs[n], alone.log_probs[2 * (i % 3)], atol=1e-5)


def test_one_shape_compiles_once_and_follows_the_weights(generator):
    first = sample(generator, max_new_tokens=4)
    arrays = generator.model.arrays()
    other = random_arrays(generator.model.config, seed=5, scale=0.25)
    with count_compilations() as compilations:
        try:
            generator.model.load_arrays(other)
            changed = sample(generator, temperature=1.3, max_new_tokens=7, eos_ids=EOS)
            assert largest_difference(generator, changed, 1.3) < 1e-4
        finally:
            generator.model.load_arrays(arrays)
        again = sample(generator, max_new_tokens=4)
    np.testing.assert_array_equal(again.tokens, first.tokens)
    np.testing.assert_allclose(again.log_probs, first.log_probs, atol=1e-5)
    # set_parameter compiles one Assign for each new shape, at most; never a whole graph.
    assert compilations.count <= len(arrays)


def test_graphs_of_as_many_rows_share_a_cache(graph_mode):
    generator = make(steps=6)
    for _ in range(2):
        for prompts, group_size in ((PROMPTS[:2], 2), (PROMPTS[2:], 4)):
            rng = np.random.default_rng(0)
            completions = generator.generate(prompts, group_size, rng, eos_ids=())
            assert largest_difference(generator, completions, prompts=prompts) < 1e-5
    caches = {id(graph.decoder) for graph in generator._graphs.values()}
    assert len(generator._graphs) == 2 and len(caches) == 1


def test_tokens_are_drawn_as_their_probabilities_say(generator):
    config, arrays = generator.model.config, generator.model.arrays()
    rng = np.random.default_rng(11)
    prompt = PROMPTS[0]
    counts = np.zeros(config.vocab_size)
    for _ in range(60):
        completions = generator.generate([prompt] * 3, 2, rng, eos_ids=(), max_new_tokens=1)
        counts += np.bincount(completions.tokens[:, 0], minlength=config.vocab_size)
    z = logits(config, arrays, list(prompt))[-1]
    p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    total = counts.sum()
    rare = p * total < 5
    expected = np.append(p[~rare], p[rare].sum()) * total
    found = np.append(counts[~rare], counts[rare].sum())
    # Chi-square: mean k, deviation sqrt(2 k); five deviations, and the seed is fixed.
    k = len(expected) - 1
    assert ((found - expected) ** 2 / np.maximum(expected, 1e-9)).sum() < k + 5 * np.sqrt(2 * k)


def nucleus(z, top_k, top_p):
    """Tokens that top-k, then top-p keep, by their definitions."""
    order = np.argsort(-z, kind="stable")[: top_k or None]
    p = np.exp(z[order] - z[order].max())
    p /= p.sum()
    kept, total = [], 0.0
    for token, probability in zip(order, p):
        if total >= top_p:
            break
        kept.append(int(token))
        total += probability
    return kept


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.8), (6, 0.9), (4, 1.0), (1, 1.0)])
def test_the_kept_set_is_the_one_sampled_from(top_k, top_p):
    generator = make("llama", steps=12, n_layers=1)
    config, arrays = generator.model.config, generator.model.arrays()
    completions = sample(generator, top_k=top_k, top_p=top_p, temperature=0.7)
    for n, (prompt, completion) in enumerate(rows_of(completions)):
        z = logits(config, arrays, prompt + completion)[len(prompt) - 1 : -1] / 0.7
        kept = [nucleus(row, top_k, top_p) for row in z]
        for t, tokens in enumerate(kept):
            assert set(completions.kept[n, t]) == set(tokens)
            assert completion[t] in tokens
        unused = [range(config.vocab_size)] * len(prompt)
        expected, _ = token_log_probs(config, arrays, prompt + completion, 0.7, unused + kept)
        found = completions.log_probs[n, : len(completion)]
        np.testing.assert_allclose(found, expected[len(prompt) :], atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "no prompts"),
        ({"prompts": [np.array([], np.int32)]}, "prompt 0 has 0 tokens"),
        ({"prompts": [np.zeros(9, np.int32)]}, "prompt 0 has 9 tokens"),
        ({"prompts": [np.array([23], np.int32)]}, "another model"),
        ({"prompts": PROMPTS, "group_size": 0}, "group_size"),
        ({"prompts": PROMPTS, "temperature": 0.0}, "temperature"),
        ({"prompts": PROMPTS, "temperature": float("nan")}, "temperature"),
        ({"prompts": PROMPTS, "top_k": -1}, "top_k"),
        ({"prompts": PROMPTS, "top_p": 0.0}, "top_p"),
        ({"prompts": PROMPTS, "eos_ids": (23,)}, "eos_ids"),
        ({"prompts": PROMPTS, "max_new_tokens": 81}, "max_new_tokens"),
    ],
)
def test_impossible_arguments_are_refused(generator, arguments, message):
    with pytest.raises(LMError, match=message):
        generator.generate(**arguments)


def test_weights_that_are_not_finite_are_told(generator):
    arrays = generator.model.arrays()
    broken = {name: a.copy() for name, a in arrays.items()}
    broken["model.norm.weight"][:] = np.nan
    generator.model.load_arrays(broken)
    try:
        with pytest.raises(LMError, match="not finite"):
            sample(generator)
    finally:
        generator.model.load_arrays(arrays)


def test_no_room_for_a_prompt_is_told(generator):
    from msrl_accel.lm.generation import Generator

    with pytest.raises(LMError, match="positions"):
        Generator(generator.model, 128)


def test_noise_of_a_large_vocabulary_is_gumbel_and_replays():
    from msrl_accel.lm.sampling import draw_noise

    noise = draw_noise(np.random.default_rng(0), 2, 3, 20_001)
    again = draw_noise(np.random.default_rng(0), 2, 3, 20_001)
    dense = noise.dense(20_001)
    assert dense.shape == (2, 3, 20_001)
    assert noise.table.size <= 2**19
    np.testing.assert_array_equal(dense, again.dense(20_001))
    assert dense.mean() == pytest.approx(np.euler_gamma, abs=0.02)
    assert dense.var() == pytest.approx(np.pi**2 / 6, rel=0.03)
    flat = dense.reshape(6, -1)
    assert np.abs(np.corrcoef(flat) - np.eye(6)).max() < 0.05
    assert (draw_noise(None, 2, 3, 20_001).dense(20_001) == 0).all()
