"""Completions that go on with newer weights: tokens, log-probabilities and versions."""

from __future__ import annotations

import numpy as np
import pytest
from lm_helpers import random_arrays, tiny
from mindspore import Tensor

from msrl_accel.lm.generation import Generator
from msrl_accel.lm.model import CausalLM
from msrl_accel.lm.partial import PartialGenerator

pytestmark = pytest.mark.usefixtures("graph_mode")

STEPS, PART, GROUP = 7, 3, 2
SAMPLING = {"temperature": 0.8, "top_k": 0, "top_p": 1.0}
PROMPTS = [np.array(p, np.int32) for p in ([3, 4, 5], [6], [7, 8, 9, 10, 11])]


@pytest.fixture(scope="module")
def model(request):
    request.getfixturevalue("graph_mode")
    return CausalLM(tiny(n_layers=1), seed=None)


def generate(model, weights, part, eos_ids, **sampling):
    """Completions, where `weights[i]` are the model's weights in part i."""
    parts = iter(range(100))

    def follow():
        version = min(next(parts), len(weights) - 1)
        model.load_arrays(weights[version])
        return version

    generator = PartialGenerator(model, STEPS, part, 64, {**SAMPLING, **sampling}, follow)
    return generator.generate(PROMPTS, GROUP, np.random.default_rng(5), eos_ids)


def test_each_token_has_the_log_probability_and_version_of_the_weights_that_drew_it(model):
    weights = [random_arrays(model.config, seed) for seed in (1, 2, 3)]
    found = generate(model, weights, PART, eos_ids=[])
    assert found.tokens.shape == (6, STEPS)
    assert found.versions.tolist() == [[0, 0, 0, 1, 1, 1, 2]] * 6
    assert found.version == 0
    assert (found.stop == "length").all()
    for version, arrays in enumerate(weights):
        model.load_arrays(arrays)
        expected = training_log_probs(model, found)
        drawn = found.versions == version
        np.testing.assert_allclose(found.log_probs[drawn], expected[drawn], atol=1e-4)
        assert np.abs(found.log_probs - expected)[~drawn].max() > 0.1


def training_log_probs(model, completions):
    """From the whole rows at once, on the model's present weights."""
    rows = [
        np.concatenate([PROMPTS[i], tokens])
        for i, tokens in zip(completions.prompt_index, completions.tokens)
    ]
    length = max(map(len, rows))
    tokens = np.array([np.pad(row, (0, length - len(row))) for row in rows], np.int32)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    segments = np.array([[0] * len(r) + [-1] * (length - len(r)) for r in rows], np.int32)
    logits = model(*(Tensor(np.ascontiguousarray(a)) for a in (tokens, positions, segments)))
    scaled = logits.asnumpy().astype(np.float64) / SAMPLING["temperature"]
    log_probs = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    found = [
        [log_probs[i, len(r) - STEPS + t - 1, r[len(r) - STEPS + t]] for t in range(STEPS)]
        for i, r in enumerate(rows)
    ]
    return np.array(found)


def test_parts_with_the_same_weights_are_what_greedy_generation_gives(model):
    arrays = random_arrays(model.config, 4)
    eos_ids = list(range(12))  # half of the tokens, so that rows end in all parts
    follow_nothing = {"temperature": 1.0, "top_k": 1}
    found = generate(model, [arrays], PART, eos_ids, **follow_nothing)
    whole = Generator(model, STEPS).generate(PROMPTS, GROUP, None, eos_ids=eos_ids)
    assert found.tokens.tolist() == whole.tokens.tolist()
    assert found.lengths.tolist() == whole.lengths.tolist()
    assert found.stop.tolist() == whole.stop.tolist()
    assert found.prompt_index.tolist() == whole.prompt_index.tolist()
    assert found.kept.shape == (*found.tokens.shape, 1)
    inside = np.arange(found.tokens.shape[1]) < found.lengths[:, None]
    np.testing.assert_array_equal(found.kept[..., 0][inside], found.tokens[inside])
