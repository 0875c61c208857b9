from __future__ import annotations

import logging

import numpy as np
import pytest
from mindspore import Parameter, ParameterTuple, Tensor, nn

from msrl_accel.learner import FlatAdam, GradientWatch, adam_step_sizes, schedule

pytestmark = pytest.mark.usefixtures("graph_mode")

SHAPES = ((2, 3), (4,), (1, 2, 2))
LEARNING_RATE, EPSILON = 0.05, 1e-3
MAX_NORM = 1.0


class Step(nn.Cell):
    """One optimiser step on given gradients, from and to the weights."""

    def __init__(self, weights, max_norm):
        super().__init__(auto_prefix=False)
        self.optimizer = FlatAdam(weights, max_norm)

    def construct(self, step_size, epsilon, *gradients):
        self.optimizer.gather()
        norm = self.optimizer(gradients, step_size, epsilon)
        self.optimizer.scatter()
        return norm


class NumpyAdam:
    """torch.optim.Adam after clip_grad_norm_, in float64."""

    def __init__(self, weights, max_norm):
        self.weights = [w.astype(np.float64) for w in weights]
        self.m = [np.zeros_like(w) for w in self.weights]
        self.v = [np.zeros_like(w) for w in self.weights]
        self.t = 0
        self.max_norm = max_norm

    def step(self, gradients):
        norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients))
        scale = min(1.0, self.max_norm / (norm + 1e-6))
        self.t += 1
        for i, g in enumerate(gradients):
            g = g.astype(np.float64) * scale
            self.m[i] = 0.9 * self.m[i] + 0.1 * g
            self.v[i] = 0.999 * self.v[i] + 0.001 * g**2
            m_hat = self.m[i] / (1 - 0.9**self.t)
            v_hat = self.v[i] / (1 - 0.999**self.t)
            self.weights[i] -= LEARNING_RATE * m_hat / (np.sqrt(v_hat) + EPSILON)
        return norm


class Optimizer:
    """The compiled step with the host's step sizes."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.initial = [rng.normal(size=s).astype(np.float32) for s in SHAPES]
        self.weights = ParameterTuple(
            [Parameter(Tensor(w), name=f"w{i}") for i, w in enumerate(self.initial)]
        )
        self.graph = Step(self.weights, MAX_NORM)
        self.reset()

    def reset(self):
        for parameter, value in zip(self.weights, self.initial):
            parameter.set_data(Tensor(value))
        adam = self.graph.optimizer
        for moment in (adam.moment1, adam.moment2):
            moment.set_data(Tensor(np.zeros(moment.shape, np.float32)))
        self.t = 0

    def step(self, gradients):
        sizes, epsilons = adam_step_sizes(LEARNING_RATE, EPSILON, self.t, 1)
        self.t += 1
        tensors = [Tensor(g.astype(np.float32)) for g in gradients]
        return float(self.graph(Tensor(sizes[0]), Tensor(epsilons[0]), *tensors).asnumpy())

    def arrays(self):
        return [w.asnumpy().copy() for w in self.weights]


@pytest.fixture(scope="module")
def compiled():
    return Optimizer()


@pytest.fixture
def optimizer(compiled):
    compiled.reset()
    return compiled


def gradients_of_norm(rng, norm):
    gradients = [rng.normal(size=s) for s in SHAPES]
    total = np.sqrt(sum((g**2).sum() for g in gradients))
    return [g * (norm / total) for g in gradients]


def test_twenty_steps_equal_numpys_adam_with_clipped_norm(optimizer):
    rng = np.random.default_rng(1)
    reference = NumpyAdam(optimizer.initial, MAX_NORM)
    for t in range(20):
        # Every other gradient is over the norm; the tiny ones show epsilon's effect.
        gradients = gradients_of_norm(rng, [0.5, 3.0, 1e-3, 50.0][t % 4])
        norm = optimizer.step(gradients)
        assert norm == pytest.approx(reference.step(gradients), rel=1e-5)
        for ours, theirs in zip(optimizer.arrays(), reference.weights):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_gradient_that_is_not_finite_counts_as_zero(optimizer, value, everywhere):
    rng = np.random.default_rng(2)
    first, last = gradients_of_norm(rng, 0.5), gradients_of_norm(rng, 0.5)
    bad = gradients_of_norm(rng, 0.5)
    bad[1][...] = value
    if everywhere:
        bad = [np.full_like(g, value) for g in bad]
    results = []
    for middle in (bad, [np.zeros_like(g) for g in bad]):
        optimizer.reset()
        optimizer.step(first)
        norm = optimizer.step(middle)
        assert np.isfinite(norm) == (middle is not bad)
        optimizer.step(last)
        results.append(optimizer.arrays())
    for ours, expected in zip(*results):
        assert np.isfinite(ours).all()
        np.testing.assert_array_equal(ours, expected)


def test_step_sizes_hold_the_bias_correction():
    sizes, epsilons = adam_step_sizes(1e-3, 1e-5, 4, 3)
    assert sizes.dtype == epsilons.dtype == np.float32
    m, v = 0.3, 0.02
    for i, t in enumerate((5, 6, 7)):
        expected = 1e-3 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-5)
        assert sizes[i] * m / (np.sqrt(v) + epsilons[i]) == pytest.approx(expected, rel=1e-6)


def test_step_sizes_stay_finite_late_in_a_run():
    sizes, epsilons = adam_step_sizes(1e-3, 1e-5, 10**8, 2)
    np.testing.assert_allclose(sizes, 1e-3, rtol=1e-6)
    np.testing.assert_allclose(epsilons, 1e-5, rtol=1e-6)


def test_schedules():
    assert [schedule("constant", 0.2, p) for p in (0.0, 0.5, 1.0)] == [0.2, 0.2, 0.2]
    falling = [schedule("linear", 0.2, p) for p in (0.0, 0.25, 1.0, 1.5)]
    assert falling == pytest.approx([0.2, 0.15, 0.0, 0.0])


def test_the_watch_counts_and_says_what_is_wrong(caplog):
    watch = GradientWatch(max_grad_norm=0.5, alarm=100.0)
    with caplog.at_level(logging.WARNING, "msrl_accel"):
        metrics = watch.update(np.array([0.1, 0.3, 1.0, 2.0]))
        assert not caplog.records
        assert metrics["grad_norm"] == pytest.approx(0.85)
        assert metrics["grad_norm_max"] == 2.0
        assert metrics["grad_clipped"] == 0.5
        assert metrics["grad_non_finite"] == metrics["grad_exploding"] == 0

        metrics = watch.update(np.array([0.1, 51.0]))
        assert "1 of 2 gradients were over 100 times max_grad_norm" in caplog.text
        assert metrics["grad_exploding"] == 1

        metrics = watch.update(np.array([0.25, np.nan, np.inf]))
        assert "2 of 3 gradients were not finite and were not applied" in caplog.text
        assert metrics["grad_non_finite"] == 2
        assert metrics["grad_norm"] == metrics["grad_norm_max"] == 0.25

    metrics = watch.update(np.array([np.nan]))
    assert metrics["grad_non_finite"] == 3
    assert np.isnan(metrics["grad_norm"])

    restored = GradientWatch(max_grad_norm=0.5, alarm=100.0)
    restored.restore(watch.state())
    assert restored.update(np.array([60.0]))["grad_exploding"] == 2
    assert restored.non_finite == 3
