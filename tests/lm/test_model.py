"""The decoder against a NumPy one: every layout, packing, padding, kept sets, gradients."""

from __future__ import annotations

import numpy as np
import pytest
from lm_helpers import VARIANTS, packed, random_arrays, tiny
from lm_reference import token_log_probs

pytestmark = pytest.mark.usefixtures("graph_mode")

LENGTH = 24


@pytest.fixture(scope="module")
def graphs():
    """name of a variant -> (config, arrays, compiled token_log_probs of packed rows)."""
    from mindspore import Tensor, nn

    from msrl_accel.lm.model import CausalLM

    class Evaluate(nn.Cell):
        def __init__(self, model):
            super().__init__(auto_prefix=False)
            self.model = model

        def construct(self, tokens, positions, segments, temperature):
            return self.model.token_log_probs(
                self.model.weights, tokens, positions, segments, temperature
            )

    made = {}

    def graph(variant):
        if variant not in made:
            config = tiny(variant)
            model = CausalLM(config)
            model.load_arrays(random_arrays(config))
            cell = Evaluate(model)

            def run(rows, temperature=1.0):
                inputs = [Tensor(a) for a in packed(rows, LENGTH)]
                out = cell(*inputs, Tensor(np.float32(temperature)))
                return [o.asnumpy().copy() for o in out]

            made[variant] = config, model.arrays(), run
        return made[variant]

    return graph


def sequences(config, *lengths, seed=1):
    rng = np.random.default_rng(seed)
    return [list(rng.integers(0, config.vocab_size, n)) for n in lengths]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_layout_agrees_with_numpy_packed_and_padded(graphs, variant):
    config, arrays, run = graphs(variant)
    a, b, c = sequences(config, 9, 12, 17)
    log_probs, entropies = run([[a, b], [c]], temperature=0.7)
    for found, expected in ((log_probs, 0), (entropies, 1)):
        wanted = np.zeros((2, LENGTH))
        wanted[0, :9] = token_log_probs(config, arrays, a, 0.7)[expected]
        wanted[0, 9:21] = token_log_probs(config, arrays, b, 0.7)[expected]
        wanted[1, :17] = token_log_probs(config, arrays, c, 0.7)[expected]
        np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_gradients_are_those_of_the_numpy_model(graph_mode):
    """Directional derivatives of sum(a * log_prob + b * entropy), several chunks in the head."""
    import mindspore as ms
    from mindspore import Tensor, nn, ops

    from msrl_accel.lm.model import CausalLM

    config = tiny("qwen3", qkv_bias=True)
    model = CausalLM(config)
    model.head.chunk = 7
    arrays = random_arrays(config)
    model.load_arrays(arrays)
    (row,) = sequences(config, 10)
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((2, 1, LENGTH)).astype(np.float32)

    class Loss(nn.Cell):
        def __init__(self):
            super().__init__(auto_prefix=False)
            self.model = model

        def construct(self, tokens, positions, segments, temperature):
            log_prob, entropy = self.model.token_log_probs(
                self.model.weights, tokens, positions, segments, temperature
            )
            return ops.sum(Tensor(a) * log_prob + Tensor(b) * entropy)

    gradient = ms.value_and_grad(Loss(), None, model.weights)
    inputs = [Tensor(x) for x in packed([[row]], LENGTH)]
    _, gradients = gradient(*inputs, Tensor(np.float32(0.8)))

    def loss(arrays):
        log_prob, entropy = token_log_probs(config, arrays, row, 0.8)
        return (a[0, :10] * log_prob + b[0, :10] * entropy).sum()

    for spec, g in zip(model.weight_specs, gradients):
        direction = rng.standard_normal(spec.shape)
        moved = [
            {**arrays, spec.name: arrays[spec.name] + sign * 1e-4 * direction} for sign in (1, -1)
        ]
        expected = (loss(moved[0]) - loss(moved[1])) / 2e-4
        found = float((g.asnumpy().astype(np.float64) * direction).sum())
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-3), spec.name


def test_completions_that_share_a_prompt_see_it_and_not_each_other(graph_mode):
    from mindspore import Tensor, nn

    from msrl_accel.lm.model import CausalLM

    config = tiny("qwen2")
    model = CausalLM(config)
    arrays = random_arrays(config)
    model.load_arrays(arrays)

    class Evaluate(nn.Cell):
        def __init__(self):
            super().__init__(auto_prefix=False)
            self.model = model

        def construct(self, tokens, positions, segments, prompts, index, lengths, sources, targets):
            weights, shared = self.model.weights, (prompts, index, lengths)
            hidden = self.model.forward(weights, tokens, positions, segments, shared)
            return self.model.target_log_probs(weights, hidden, sources, targets, Tensor(1.0))

    short, long, a, b, c = sequences(config, 3, 5, 6, 7, 4)
    prompts = np.array([[*short, 9, 9], long], np.int32)  # what lies behind a prompt is not seen
    tokens, positions, segments = packed([[a, b], [c]], 16)
    positions[0, :6], positions[0, 6:13], positions[1, :4] = 5 + np.arange(6), 5 + np.arange(7), 3
    positions[1, :4] += np.arange(4)
    shared = (prompts, np.array([1, 0], np.int32), np.array([5, 3], np.int32))
    sources = [9, *range(10, 15), 9, *range(16, 22), 2, *range(26, 29)]
    inputs = (tokens, positions, segments, *shared, np.array(sources, np.int32))
    log_probs, _ = Evaluate()(*map(Tensor, inputs), Tensor(np.array(a + b + c, np.int32)))
    expected = [
        token_log_probs(config, arrays, prompt + completion)[0][len(prompt) :]
        for prompt, completion in ((long, a), (long, b), (short, c))
    ]
    np.testing.assert_allclose(log_probs.asnumpy(), np.concatenate(expected), atol=2e-5)


def test_a_kept_set_is_what_the_softmax_runs_over(graph_mode):
    from mindspore import Tensor, nn

    from msrl_accel.lm.model import CausalLM

    config = tiny()
    model = CausalLM(config)
    arrays = random_arrays(config)
    model.load_arrays(arrays)

    class Evaluate(nn.Cell):
        def __init__(self):
            super().__init__(auto_prefix=False)
            self.model = model

        def construct(self, tokens, positions, segments, temperature, kept):
            return self.model.token_log_probs(
                self.model.weights, tokens, positions, segments, temperature, kept
            )

    (row,) = sequences(config, 12)
    rng = np.random.default_rng(3)
    kept = np.zeros((1, LENGTH, 5), np.int32)
    for t, token in enumerate(row):
        others = rng.choice(config.vocab_size, rng.integers(0, 5), replace=False)
        kept[0, t] = token
        kept[0, t, 1 : 1 + len(others)] = others
    inputs = [Tensor(x) for x in packed([[row]], LENGTH)]
    found = Evaluate()(*inputs, Tensor(np.float32(0.7)), Tensor(kept))
    expected = token_log_probs(config, arrays, row, 0.7, kept[0])
    for f, e in zip(found, expected):
        np.testing.assert_allclose(f.asnumpy()[0, :12], e, atol=2e-5)


def test_the_head_keeps_no_room_for_each_logit(graph_mode):
    """Operators that broadcast or transpose do, as long as their graph lives."""
    import psutil
    from mindspore import Tensor, nn, ops

    from msrl_accel.lm.head import LogProbHead

    class Sum(nn.Cell):
        def __init__(self, head):
            super().__init__()
            self.head = head

        def construct(self, *inputs):
            return self.head(*inputs)[0].sum()

    rows, vocab_size = 256, 49152
    inputs = [np.ones((n, 8), np.float32) for n in (rows, vocab_size)]
    inputs += [np.zeros(rows, np.int32), np.float32(1.0), np.zeros((rows, 1), np.int32)]
    gradient = ops.grad(Sum(LogProbHead(vocab_size, restricted=False)), (0, 1))
    process = psutil.Process()
    before = process.memory_info().rss
    gradient(*[Tensor(array) for array in inputs])[0].asnumpy()
    kept = process.memory_info().rss - before
    assert kept < 40 * rows * vocab_size
