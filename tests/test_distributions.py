from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gymnasium import spaces
from mindspore import Tensor, nn, ops
from policy_helpers import ACTION_SPACES, log_softmax, numerical_gradient, spec_of
from scipy import stats

from msrl_accel.distributions import (
    CategoricalEntropy,
    CategoricalLogProb,
    make_distribution,
)

pytestmark = pytest.mark.usefixtures("graph_mode")

ROWS = 5


class Graph(nn.Cell):
    """Everything of a distribution in one graph."""

    def __init__(self, distribution):
        super().__init__()
        self.distribution = distribution

    def construct(self, noise, *parameters):
        raw = self.distribution.sample(parameters, noise)
        log_prob, entropy = self.distribution.log_prob_entropy(parameters, raw)
        return raw, log_prob, entropy, self.distribution.action(raw)


class Distributions:
    """Compiled distributions by name of their action space, made when first asked for."""

    def __init__(self):
        self.graphs = {}

    def run(self, name, noise, *parameters):
        if name not in self.graphs:
            self.graphs[name] = Graph(make_distribution(spec_of(ACTION_SPACES[name]).action, 0.0))
        arrays = [np.asarray(x, np.float32) for x in (noise, *parameters)]
        return [o.asnumpy() for o in self.graphs[name](*map(Tensor, arrays))]


@pytest.fixture(scope="module")
def distributions():
    return Distributions()


def parameters_of(spec, rng, rows=ROWS):
    if spec.action.kind == "continuous":
        return rng.normal(size=(rows, spec.action.size)), rng.normal(size=spec.action.size) * 0.3
    head = sum(spec.action.sizes) or spec.action.size
    return (2.0 * rng.normal(size=(rows, head)),)


def reference(action, parameters, raw):
    """Log-probability and entropy [B] from scipy.stats."""
    log_prob, entropy = np.zeros(len(raw)), np.zeros(len(raw))
    for b in range(len(raw)):
        if action.kind == "continuous":
            mean, log_std = parameters
            law = stats.multivariate_normal(mean[b], np.diag(np.exp(2 * log_std)))
            log_prob[b], entropy[b] = law.logpdf(raw[b]), law.entropy()
        elif action.kind == "multi_binary":
            for bit, logit in zip(raw[b], parameters[0][b]):
                law = stats.bernoulli(1 / (1 + np.exp(-logit)))
                log_prob[b] += law.logpmf(bit)
                entropy[b] += law.entropy()
        else:
            ends = np.cumsum(action.sizes)[:-1]
            for choice, logits in zip(np.atleast_1d(raw[b]), np.split(parameters[0][b], ends)):
                p = np.exp(log_softmax(logits))
                log_prob[b] += np.log(p[choice])
                entropy[b] += stats.entropy(p)
    return log_prob, entropy


@pytest.mark.parametrize("name", ACTION_SPACES)
def test_log_prob_and_entropy_equal_scipys(distributions, name):
    spec = spec_of(ACTION_SPACES[name])
    rng = np.random.default_rng(0)
    parameters = parameters_of(spec, rng)
    noise = spec.draw_noise(rng, (ROWS,))
    raw, log_prob, entropy, _ = distributions.run(name, noise, *parameters)
    assert raw.shape == (ROWS, *spec.action.raw_shape)
    assert raw.dtype == spec.action.raw_dtype
    expected = reference(spec.action, parameters, raw)
    np.testing.assert_allclose(log_prob, expected[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(entropy, expected[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ACTION_SPACES)
def test_sampled_actions_are_inside_the_space(distributions, name):
    space = ACTION_SPACES[name]
    spec = spec_of(space)
    rng = np.random.default_rng(1)
    parameters = [10.0 * p for p in parameters_of(spec, rng, 64)]
    *_, action = distributions.run(name, spec.draw_noise(rng, (64,)), *parameters)
    actions = spec.to_environment(action)
    assert actions.shape == (64, *space.shape)
    assert all(space.contains(a if space.shape else space.dtype.type(a)) for a in actions)


@pytest.mark.parametrize("name", ACTION_SPACES)
def test_zero_noise_is_the_mode(distributions, name):
    spec = spec_of(ACTION_SPACES[name])
    parameters = parameters_of(spec, np.random.default_rng(2))
    raw, *_ = distributions.run(name, spec.zero_noise((ROWS,)), *parameters)
    if spec.action.kind == "continuous":
        np.testing.assert_allclose(raw, parameters[0], rtol=1e-6)
    elif spec.action.kind == "multi_binary":
        np.testing.assert_array_equal(raw, parameters[0] > 0)
    else:
        parts = np.split(parameters[0], np.cumsum(spec.action.sizes)[:-1], axis=1)
        expected = np.stack([p.argmax(axis=1) for p in parts], axis=1)
        np.testing.assert_array_equal(raw.reshape(ROWS, -1), expected)


def test_discrete_actions_begin_at_start(distributions):
    # stable-baselines3 issue 2241: Discrete(1, start=2) was sent 0.
    *_, action = distributions.run("one_choice", np.zeros((ROWS, 1)), np.zeros((ROWS, 1)))
    np.testing.assert_array_equal(spec_of(ACTION_SPACES["one_choice"]).to_environment(action), 2)
    raw, _, _, action = distributions.run("discrete", np.eye(4), np.zeros((4, 4)))
    np.testing.assert_array_equal(raw, [0, 1, 2, 3])
    np.testing.assert_array_equal(action, [2, 3, 4, 5])


def test_multi_discrete_components_keep_their_place_and_start(distributions):
    logits = np.zeros((1, 10))
    logits[0, [2, 3, 5, 9]] = 5.0  # components of 3, 2, 1 and 4 choices
    raw, _, _, action = distributions.run("multi_discrete", np.zeros((1, 10)), logits)
    np.testing.assert_array_equal(raw, [[2, 0, 0, 3]])
    np.testing.assert_array_equal(action, [[[3, 0], [5, 1]]])


N_SAMPLES = 20_000


@pytest.mark.parametrize("name", ["discrete", "multi_discrete"])
def test_categorical_samples_have_the_stated_frequencies(distributions, name):
    spec = spec_of(ACTION_SPACES[name])
    rng = np.random.default_rng(7)
    (logits,) = parameters_of(spec, rng, 1)
    noise = spec.draw_noise(rng, (N_SAMPLES,))
    raw, *_ = distributions.run(name, noise, np.repeat(logits, N_SAMPLES, axis=0))
    parts = np.split(logits[0], np.cumsum(spec.action.sizes)[:-1])
    for choices, part in zip(raw.reshape(N_SAMPLES, -1).T, parts):
        if len(part) > 1:
            counts = np.bincount(choices, minlength=len(part))
            expected = np.exp(log_softmax(part)) * N_SAMPLES
            assert stats.chisquare(counts, expected).pvalue > 0.01


def test_bits_have_the_stated_frequencies(distributions):
    spec = spec_of(ACTION_SPACES["multi_binary"])
    rng = np.random.default_rng(7)
    (logits,) = parameters_of(spec, rng, 1)
    noise = spec.draw_noise(rng, (N_SAMPLES,))
    raw, *_ = distributions.run("multi_binary", noise, np.repeat(logits, N_SAMPLES, axis=0))
    for bits, p in zip(raw.T, 1 / (1 + np.exp(-logits[0]))):
        assert stats.binomtest(int(bits.sum()), N_SAMPLES, p).pvalue > 0.001


def test_gaussian_samples_have_the_stated_law(distributions):
    spec = spec_of(ACTION_SPACES["box"])
    rng = np.random.default_rng(7)
    mean, log_std = np.array([0.5, -1.0]), np.array([0.3, -1.0])
    noise = spec.draw_noise(rng, (N_SAMPLES,))
    raw, *_ = distributions.run("box", noise, np.tile(mean, (N_SAMPLES, 1)), log_std)
    for i in range(2):
        assert stats.kstest(raw[:, i], stats.norm(mean[i], np.exp(log_std[i])).cdf).pvalue > 0.01


def test_bounded_components_map_minus_one_and_one_to_their_bounds(distributions):
    raw = np.array([[-1.0, -1.0], [1.0, 1.0], [0.0, 0.0], [-5.0, 7.0]])
    *_, action = distributions.run("box", np.zeros((4, 2)), raw, np.zeros(2))
    expected = [[-1.0, 0.0], [3.0, 0.5], [1.0, 0.25], [-1.0, 0.5]]
    np.testing.assert_allclose(action, expected, atol=1e-7)


def test_components_with_an_open_bound_keep_their_units(distributions):
    raw = np.array([[-7.0, -1.5, -1.0, 100.0], [9.0, -9.0, 1.0, -100.0]])
    *_, action = distributions.run("half_open_box", np.zeros((2, 4)), raw, np.zeros(4))
    expected = [[[-7.0, -1.5], [0.0, 100.0]], [[1.0, -2.0], [1.0, -100.0]]]
    np.testing.assert_allclose(action, expected, atol=1e-6)


@pytest.mark.parametrize("bound", [1e300, float(np.finfo(np.float32).max)])
def test_huge_bounds_give_finite_actions(bound):
    spec = spec_of(spaces.Box(-bound, bound, (1,), np.float64))
    graph = Graph(make_distribution(spec.action, 0.0))
    mean, log_std = (Tensor(np.full(shape, 0.5, np.float32)) for shape in ((2, 1), (1,)))
    *_, action = graph(Tensor(spec.zero_noise((2,))), mean, log_std)
    np.testing.assert_allclose(spec.to_environment(action.asnumpy()), 0.5)


def test_log_probabilities_stay_finite_at_extreme_logits(distributions):
    logits = np.array([[1e4, 0.0, -1e4, 0.0]])
    _, log_prob, entropy, _ = distributions.run("discrete", np.zeros((1, 4)), logits)
    np.testing.assert_allclose([log_prob[0], entropy[0]], 0.0, atol=1e-6)
    logits = np.array([[1e4, -1e4, 0.0, 90.0, -90.0, 0.0]])
    _, log_prob, entropy, _ = distributions.run("multi_binary", np.zeros((1, 6)), logits)
    np.testing.assert_allclose([log_prob[0], entropy[0]], [-2 * np.log(2), 2 * np.log(2)], 1e-5)


LOG_PROB_WEIGHTS = np.array([0.7, -1.3, 0.0, 2.0])
ENTROPY_WEIGHTS = np.array([0.5, 0.0, -0.8, 1.5])


class WeightedTerms(nn.Cell):
    """A scalar of both results, so that both gradients take part."""

    def __init__(self, terms):
        super().__init__()
        self.terms = terms
        self.a = Tensor(LOG_PROB_WEIGHTS.astype(np.float32))
        self.b = Tensor(ENTROPY_WEIGHTS.astype(np.float32))

    def construct(self, logits, one_hot):
        log_prob, entropy = self.terms(logits, one_hot)
        return (self.a * log_prob + self.b * entropy).sum()


class PlainTerms(nn.Cell):
    """The definition, differentiated by MindSpore."""

    def construct(self, logits, one_hot):
        p = ops.exp(logits) / ops.exp(logits).sum(-1, keepdims=True)
        return (ops.log(p) * one_hot).sum(-1), -(p * ops.log(p)).sum(-1)


class ClosedFormTerms(nn.Cell):
    def __init__(self):
        super().__init__()
        self.log_prob, self.entropy = CategoricalLogProb(), CategoricalEntropy()

    def construct(self, logits, one_hot):
        return self.log_prob(logits, one_hot), self.entropy(logits)


def test_the_categorical_gradient_equals_finite_differences_and_autodiff():
    rng = np.random.default_rng(3)
    logits, choices = rng.normal(size=(4, 3)), np.array([0, 2, 1, 1])
    one_hot = np.eye(3)[choices]

    def scalar(x):
        log_p = log_softmax(x)
        entropy = -(np.exp(log_p) * log_p).sum(axis=1)
        return (LOG_PROB_WEIGHTS * log_p[np.arange(4), choices] + ENTROPY_WEIGHTS * entropy).sum()

    arguments = Tensor(logits.astype(np.float32)), Tensor(one_hot.astype(np.float32))
    closed_form, derived = (
        ops.grad(WeightedTerms(terms))(*arguments).asnumpy()
        for terms in (ClosedFormTerms(), PlainTerms())
    )
    np.testing.assert_allclose(closed_form, numerical_gradient(scalar, logits), atol=1e-5)
    np.testing.assert_allclose(closed_form, derived, atol=1e-5)


class LogProbEntropySum(nn.Cell):
    def __init__(self, distribution):
        super().__init__()
        self.distribution = distribution

    def construct(self, raw, *parameters):
        log_prob, entropy = self.distribution.log_prob_entropy(parameters, raw)
        return (log_prob + 0.5 * entropy).sum()


@pytest.mark.parametrize("name", ["multi_discrete", "multi_binary", "box"])
def test_gradients_of_log_prob_and_entropy_equal_finite_differences(name):
    spec = spec_of(ACTION_SPACES[name])
    rng = np.random.default_rng(4)
    parameters = parameters_of(spec, rng, 2)
    raw = {
        "multi_discrete": np.array([[2, 0, 0, 3], [0, 1, 0, 1]], np.int32),
        "multi_binary": np.array([[0, 1, 1, 0, 0, 1], [1, 1, 0, 1, 0, 0]], np.int32),
        "box": rng.normal(size=(2, 2)).astype(np.float32),
    }[name]
    graph = LogProbEntropySum(make_distribution(spec.action, 0.0))
    positions = tuple(range(1, 1 + len(parameters)))
    tensors = [Tensor(p.astype(np.float32)) for p in parameters]
    gradients = ops.grad(graph, positions)(Tensor(raw), *tensors)
    if len(parameters) == 1:
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    for i, gradient in enumerate(gradients):

        def scalar(x, i=i):
            changed = [x if j == i else p for j, p in enumerate(parameters)]
            log_prob, entropy = reference(spec.action, changed, raw)
            return (log_prob + 0.5 * entropy).sum()

        expected = numerical_gradient(scalar, parameters[i])
        np.testing.assert_allclose(gradient.asnumpy(), expected, rtol=1e-3, atol=1e-4)


class Squashed(nn.Cell):
    """A squashed Gaussian from its head: action in the environment, log-probability, raw."""

    def __init__(self, spec):
        super().__init__()
        self.distribution = make_distribution(replace(spec, squashed=True), 0.0)

    def construct(self, head, noise):
        parameters = self.distribution.parameters(head, ())
        raw, log_prob = self.distribution.sample_log_prob(parameters, noise)
        return self.distribution.action(raw), log_prob, raw


def squashed(space, head, noise):
    graph = Squashed(spec_of(space).action)
    arrays = [Tensor(np.asarray(x, np.float32)) for x in (head, noise)]
    return graph, [o.asnumpy() for o in graph(*arrays)]


def squashed_log_prob(head, noise):
    """By the change of variables, from the sample before tanh; float64."""
    mean, log_std = np.split(np.asarray(head, np.float64), 2, axis=1)
    std = np.exp(np.clip(log_std, -20, 2))
    x = mean + std * noise
    log_det = np.log(4) - 2 * np.logaddexp(x, -x)  # log(1 - tanh(x)^2)
    return (stats.norm.logpdf(x, mean, std) - log_det).sum(axis=1)


def test_a_squashed_gaussians_log_prob_equals_scipys_density():
    rng = np.random.default_rng(0)
    head, noise = rng.normal(0, 1, (200, 6)), rng.normal(size=(200, 3))
    _, (_, log_prob, raw) = squashed(spaces.Box(-1, 1, (3,)), head, noise)
    np.testing.assert_allclose(log_prob, squashed_log_prob(head, noise), rtol=1e-5, atol=2e-5)
    # Of moderate actions, the density of tanh(X) from its distribution function as well.
    head[:, 3] = np.minimum(head[:, 3], 1.5)
    mean, std = head[:, 0], np.exp(head[:, 3])
    _, (_, log_prob, raw) = squashed(spaces.Box(-1, 1, (1,)), head[:, [0, 3]], noise[:, :1])
    moderate = np.abs(raw[:, 0]) < 0.95
    a, h = raw[moderate, 0].astype(np.float64), 1e-6
    above, below = (
        stats.norm.cdf(np.arctanh(a + d), mean[moderate], std[moderate]) for d in (h, -h)
    )
    np.testing.assert_allclose(log_prob[moderate], np.log((above - below) / (2 * h)), atol=1e-4)


@pytest.mark.parametrize("mean", [-80.0, -20.0, 9.0, 30.0, 300.0])
def test_a_saturated_squashed_gaussian_has_a_finite_log_prob(mean):
    # Where tanh rounds to 1, the action says nothing of the sample: atanh would be infinite.
    head = np.array([[mean, 0.5]])
    _, (action, log_prob, raw) = squashed(spaces.Box(0, 1, (1,)), head, [[0.3]])
    assert raw == np.sign(mean)
    assert action == (mean > 0)
    np.testing.assert_allclose(log_prob, squashed_log_prob(head, [[0.3]]), rtol=1e-5)


def test_a_squashed_gaussians_spread_is_bounded():
    rng = np.random.default_rng(1)
    head = np.concatenate([rng.normal(size=(5, 2)), rng.choice([-60.0, 50.0], (5, 2))], axis=1)
    noise = rng.normal(size=(5, 2))
    _, (_, log_prob, raw) = squashed(spaces.Box(-1, 1, (2,)), head, noise)
    std = np.where(head[:, 2:] < 0, np.exp(-20), np.exp(2))
    np.testing.assert_allclose(raw, np.tanh(head[:, :2] + std * noise), atol=1e-5)
    np.testing.assert_allclose(log_prob, squashed_log_prob(head, noise), rtol=1e-5)


def test_zero_noise_is_tanh_of_the_mean_in_environment_units():
    space = spaces.Box(np.array([-1.0, 0.0]), np.array([3.0, 0.5]), dtype=np.float64)
    head = np.array([[0.3, -1.2, 0.5, -0.5]])
    _, (action, _, raw) = squashed(space, head, np.zeros((1, 2)))
    np.testing.assert_allclose(raw, np.tanh(head[:, :2]), atol=2e-6)
    np.testing.assert_allclose(action, [1.0, 0.25] + raw * [2.0, 0.25], rtol=1e-6)


def test_a_squashed_gaussians_gradient_equals_finite_differences():
    rng = np.random.default_rng(2)
    head, noise = rng.normal(0, 1, (4, 4)), rng.normal(size=(4, 2))
    head[0, 2], head[1, 3] = 2.5, -21.0  # outside of the bounds: no gradient
    weights = rng.normal(size=(4, 3))
    graph, _ = squashed(spaces.Box(-1, 1, (2,)), head, noise)

    class Weighted(nn.Cell):
        def __init__(self):
            super().__init__()
            self.graph = graph
            self.weights = Tensor(weights.astype(np.float32))

        def construct(self, head, noise):
            _, log_prob, raw = self.graph(head, noise)
            return (raw * self.weights[:, :2]).sum() + (log_prob * self.weights[:, 2]).sum()

    def loss(x):
        mean, log_std = np.split(x, 2, axis=1)
        raw = np.tanh(mean + np.exp(np.clip(log_std, -20, 2)) * noise)
        return (raw * weights[:, :2]).sum() + (squashed_log_prob(x, noise) * weights[:, 2]).sum()

    tensors = [Tensor(np.asarray(x, np.float32)) for x in (head, noise)]
    gradient = ops.grad(Weighted())(*tensors).asnumpy()
    np.testing.assert_allclose(gradient, numerical_gradient(loss, head), rtol=1e-3, atol=1e-4)
    assert gradient[0, 2] == gradient[1, 3] == 0
