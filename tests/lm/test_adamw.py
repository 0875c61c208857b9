"""AdamW on the device and on the host against the formula in float64."""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Parameter, ParameterTuple, Tensor

from msrl_accel.lm.adamw import CHUNK, AdamWOptions, DeviceAdamW, HostAdamW

pytestmark = pytest.mark.usefixtures("graph_mode")

SHAPES = ((3, 4), (5,), (CHUNK // 8, 9))
OPTIONS = AdamWOptions(0.8, 0.95, 1e-4, weight_decay=0.1, max_grad_norm=1.5)
OPTIMIZERS = (DeviceAdamW, HostAdamW)


def random_arrays(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return [(scale * rng.standard_normal(s)).astype(np.float32) for s in SHAPES]


def parameters():
    return ParameterTuple(
        [Parameter(Tensor(a), name=f"w{i}") for i, a in enumerate(random_arrays(0))]
    )


GRADIENTS = [random_arrays(seed, scale) for seed, scale in ((1, 1e-3), (2, 0.1), (3, 1e-3))]


def by_hand(learning_rate=0.01):
    """Loshchilov & Hutter 2019, algorithm 2, after clipping; norms have no decay."""
    o = OPTIONS
    weights = [w.astype(np.float64) for w in random_arrays(0)]
    first, second = [0.0 * w for w in weights], [0.0 * w for w in weights]
    for t, gradients in enumerate(GRADIENTS, start=1):
        norm = np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in gradients))
        for i, g in enumerate(gradients):
            g = g * min(1.0, o.max_grad_norm / norm)
            first[i] = o.beta1 * first[i] + (1 - o.beta1) * g
            second[i] = o.beta2 * second[i] + (1 - o.beta2) * g**2
            m_hat, v_hat = first[i] / (1 - o.beta1**t), second[i] / (1 - o.beta2**t)
            decay = o.weight_decay * weights[i] if weights[i].ndim > 1 else 0.0
            weights[i] = weights[i] - learning_rate * (m_hat / (np.sqrt(v_hat) + o.epsilon) + decay)
    return weights


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_are_those_of_the_formula(kind):
    weights = parameters()
    optimizer = kind(weights, OPTIONS)
    for gradients in GRADIENTS:
        norm = optimizer.step([Tensor(g) for g in gradients], 0.01)
        expected = np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in gradients))
        assert norm == pytest.approx(expected, rel=1e-5)
    for weight, expected in zip(weights, by_hand()):
        np.testing.assert_allclose(weight.asnumpy(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_gradient_that_is_not_finite_changes_nothing(kind):
    weights = parameters()
    optimizer = kind(weights, OPTIONS)
    optimizer.step(GRADIENTS[0], 0.01)
    before = [w.asnumpy().copy() for w in weights], optimizer.state()
    for bad in (np.nan, np.inf):
        gradients = random_arrays(4)
        gradients[1][2] = bad
        assert not np.isfinite(optimizer.step(gradients, 0.01))
    for weight, expected in zip(weights, before[0]):
        np.testing.assert_array_equal(weight.asnumpy(), expected)
    after = optimizer.state()
    assert after["steps"] == before[1]["steps"] == 1
    for name, array in after["moments"].items():
        np.testing.assert_array_equal(array, before[1]["moments"][name])


@pytest.mark.parametrize(("kind", "resumed"), [OPTIMIZERS, OPTIMIZERS[::-1]])
def test_a_restored_optimizer_goes_on_as_the_first(kind, resumed):
    weights, others = parameters(), parameters()
    first = kind(weights, OPTIONS)
    first.step(GRADIENTS[0], 0.01)
    for weight, other in zip(weights, others):
        other.set_data(Tensor(weight.asnumpy().copy()))
    second = resumed(others, OPTIONS)
    second.restore(first.state())
    first.step(GRADIENTS[1], 0.01)
    second.step(GRADIENTS[1], 0.01)
    for weight, other in zip(weights, others):
        np.testing.assert_allclose(other.asnumpy(), weight.asnumpy(), rtol=1e-6, atol=1e-7)


def test_moments_in_files_do_the_same(tmp_path):
    results = []
    for folder in (None, tmp_path / "moments"):
        weights = parameters()
        optimizer = HostAdamW(weights, OPTIONS, folder)
        for gradients in GRADIENTS:
            optimizer.step(gradients, 0.01)
        results.append([w.asnumpy() for w in weights])
    for memory, files in zip(*results):
        np.testing.assert_array_equal(memory, files)
    assert len(list((tmp_path / "moments").iterdir())) == 2 * len(SHAPES)
