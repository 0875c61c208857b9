"""Action distributions as graph Cells: sample from noise, log-probability, entropy, action.

A distribution holds no weights. `parameters` is what the policy head gave it, [B, ...]; `raw` is
the action as drawn ([B] int32, or [B, D]), which training keeps; `action` is what the environment
takes, in its units. Zero noise gives the mode.
"""

from __future__ import annotations

import math

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from msrl_accel.networks import Exp, Weights, WeightSpec
from msrl_accel.spaces import ActionSpec

LOG_TWO_PI = math.log(2.0 * math.pi)
LARGEST = float(np.finfo(np.float32).max)
"""A bound this far off, or further, is an open one."""
LOG_STD_BOUNDS = (-20.0, 2.0)
"""Of squashed Gaussians, before squashing."""


class Distribution(nn.Cell):
    """What the policy needs of an action distribution."""

    head_size: int
    """Width of the policy head."""
    parameter_names: tuple[str, ...]
    """Names of `parameters`, for exported graphs and reports."""

    def weight_specs(self) -> list[WeightSpec]:
        """Weights of the distribution's own, beside the head."""
        return []

    def parameters(self, head: Tensor, weights: Weights) -> Weights:
        """Head output [B, head_size] and own weights -> distribution parameters."""
        return (head,)

    def sample_log_prob(self, parameters: Weights, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Raw action, and its log-probability [B]."""
        raw = self.sample(parameters, noise)
        log_prob, _ = self.log_prob_entropy(parameters, raw)
        return raw, log_prob


class CategoricalLogProb(nn.Cell):
    """logits [B, n], one_hot [B, n] -> log-probability [B], with closed-form gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.log_softmax = ops.LogSoftmax(-1)
        self.sum = ops.ReduceSum()

    def construct(self, logits: Tensor, one_hot: Tensor) -> Tensor:
        return self.sum(self.log_softmax(logits) * one_hot, -1)

    def bprop(self, logits, one_hot, out, dout):  # type: ignore[no-untyped-def]
        # d log p(a) / d logits = one_hot - p
        p = ops.exp(self.log_softmax(logits))
        return (one_hot - p) * dout.expand_dims(-1), ops.zeros_like(one_hot)


class CategoricalEntropy(nn.Cell):
    """logits [B, n] -> entropy [B], with closed-form gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.log_softmax = ops.LogSoftmax(-1)
        self.sum = ops.ReduceSum()

    def construct(self, logits: Tensor) -> Tensor:
        log_p = self.log_softmax(logits)
        return -self.sum(ops.exp(log_p) * log_p, -1)

    def bprop(self, logits, out, dout):  # type: ignore[no-untyped-def]
        # d H / d logits = -p (log p + H)
        log_p = self.log_softmax(logits)
        grad = ops.exp(log_p) * (log_p + out.expand_dims(-1))
        return (-grad * dout.expand_dims(-1),)


class Categorical(Distribution):
    """Discrete actions start .. start + n - 1; Gumbel noise, argmax(logits + noise)."""

    parameter_names = ("logits",)

    def __init__(self, spec: ActionSpec) -> None:
        super().__init__()
        self.head_size = spec.sizes[0]
        self.start = spec.starts[0]
        self.argmax = ops.Argmax(axis=-1, output_type=mstype.int32)
        self.one_hot = ops.OneHot()
        self.one = Tensor(1.0, mstype.float32)
        self.zero = Tensor(0.0, mstype.float32)
        self.log_prob = CategoricalLogProb()
        self.entropy = CategoricalEntropy()

    def sample(self, parameters: Weights, noise: Tensor) -> Tensor:
        return self.argmax(parameters[0] + noise)

    def log_prob_entropy(self, parameters: Weights, raw: Tensor) -> tuple[Tensor, Tensor]:
        one_hot = self.one_hot(raw, self.head_size, self.one, self.zero)
        return self.log_prob(parameters[0], one_hot), self.entropy(parameters[0])

    def action(self, raw: Tensor) -> Tensor:
        return raw + self.start if self.start else raw


class Columns(nn.Cell):
    """x [B, width] -> its columns begin .. begin + size - 1, [B, size].

    The size -1 takes every row whatever the batch; the shape of x would be a constant in exported
    graphs. MindSpore has no gradient for it.
    """

    def __init__(self, begin: int, size: int, width: int) -> None:
        super().__init__()
        self.begin, self.size = begin, size
        self.padding = (begin, width - begin - size)

    def construct(self, x: Tensor) -> Tensor:
        return ops.slice(x, (0, self.begin), (-1, self.size))

    def bprop(self, x, out, dout):  # type: ignore[no-untyped-def]
        parts: Weights = (dout,)
        if self.padding[0]:
            parts = (ops.zeros((dout.shape[0], self.padding[0]), dout.dtype), *parts)
        if self.padding[1]:
            parts = (*parts, ops.zeros((dout.shape[0], self.padding[1]), dout.dtype))
        return (ops.concat(parts, 1) if len(parts) > 1 else dout,)


class MultiCategorical(Distribution):
    """Independent categoricals, one a component; logits concatenated, [B, sum(sizes)]."""

    parameter_names = ("logits",)

    def __init__(self, spec: ActionSpec) -> None:
        super().__init__()
        self.sizes = spec.sizes
        self.head_size = sum(spec.sizes)
        ends = [int(end) for end in np.cumsum(spec.sizes)]
        self.columns = nn.CellList(
            [Columns(end - n, n, self.head_size) for n, end in zip(spec.sizes, ends)]
        )
        self.shape = spec.shape
        self.starts = Tensor(np.array(spec.starts, np.int32))
        self.argmax = ops.Argmax(axis=-1, output_type=mstype.int32)
        self.one_hot = ops.OneHot()
        self.one = Tensor(1.0, mstype.float32)
        self.zero = Tensor(0.0, mstype.float32)
        self.log_prob = CategoricalLogProb()
        self.entropy = CategoricalEntropy()

    def sample(self, parameters: Weights, noise: Tensor) -> Tensor:
        perturbed = parameters[0] + noise
        choices: Weights = ()
        for i in range(len(self.sizes)):
            choices = (*choices, self.argmax(self.columns[i](perturbed)))
        return ops.stack(choices, 1)

    def log_prob_entropy(self, parameters: Weights, raw: Tensor) -> tuple[Tensor, Tensor]:
        columns = ops.split(raw, 1, 1)
        log_prob, entropy = 0.0, 0.0
        for i in range(len(self.sizes)):
            index = columns[i].reshape((-1,))
            one_hot = self.one_hot(index, self.sizes[i], self.one, self.zero)
            logits = self.columns[i](parameters[0])
            log_prob = log_prob + self.log_prob(logits, one_hot)
            entropy = entropy + self.entropy(logits)
        return log_prob, entropy

    def action(self, raw: Tensor) -> Tensor:
        return (raw + self.starts).reshape((-1, *self.shape))


class Bernoulli(Distribution):
    """Independent bits; logistic noise, logit + noise > 0."""

    parameter_names = ("logits",)

    def __init__(self, spec: ActionSpec) -> None:
        super().__init__()
        self.head_size = spec.size
        self.shape = spec.shape
        self.sum = ops.ReduceSum()

    def sample(self, parameters: Weights, noise: Tensor) -> Tensor:
        return ops.cast(parameters[0] + noise > 0, mstype.int32)

    def log_prob_entropy(self, parameters: Weights, raw: Tensor) -> tuple[Tensor, Tensor]:
        logits = parameters[0]
        # softplus(l) = max(l, 0) + log(1 + exp(-|l|)) does not overflow.
        softplus = ops.relu(logits) + ops.log(1.0 + ops.exp(-ops.abs(logits)))
        log_prob = self.sum(ops.cast(raw, mstype.float32) * logits - softplus, -1)
        return log_prob, self.sum(softplus - logits * ops.sigmoid(logits), -1)

    def action(self, raw: Tensor) -> Tensor:
        return raw.reshape((-1, *self.shape))


class BoxDistribution(Distribution):
    """Actions drawn in units where bounds are -1 and 1.

    A component bounded on both sides is mapped to its bounds; every action is clipped to them.
    """

    parameter_names = ("mean", "log_std")

    def __init__(self, spec: ActionSpec) -> None:
        super().__init__()
        self.shape = spec.shape
        scale, offset = action_scale(spec)
        self.scale, self.offset = Tensor(scale), Tensor(offset)
        self.low = Tensor(np.clip(spec.low, -LARGEST, LARGEST).astype(np.float32))
        self.high = Tensor(np.clip(spec.high, -LARGEST, LARGEST).astype(np.float32))

    def action(self, raw: Tensor) -> Tensor:
        action = raw * self.scale + self.offset
        return ops.minimum(ops.maximum(action, self.low), self.high).reshape((-1, *self.shape))


class Gaussian(BoxDistribution):
    """Diagonal Gaussian with a state-independent log standard deviation.

    `raw` is the action before mapping and clipping.
    """

    def __init__(self, spec: ActionSpec, log_std_init: float) -> None:
        super().__init__(spec)
        self.head_size = spec.size
        self.log_std_init = log_std_init
        self.sum = ops.ReduceSum()

    def weight_specs(self) -> list[WeightSpec]:
        value = np.full(self.head_size, self.log_std_init, np.float32)
        return [WeightSpec("log_std", (self.head_size,), lambda rng: value)]

    def parameters(self, head: Tensor, weights: Weights) -> Weights:
        return head, weights[0]

    def sample(self, parameters: Weights, noise: Tensor) -> Tensor:
        mean, log_std = parameters
        return mean + ops.exp(log_std) * noise

    def log_prob_entropy(self, parameters: Weights, raw: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = parameters
        z = (raw - mean) * ops.exp(-log_std)
        log_scale = self.sum(log_std)
        log_prob = -0.5 * self.sum(z * z, -1) - (log_scale + 0.5 * self.head_size * LOG_TWO_PI)
        entropy = log_scale + 0.5 * self.head_size * (1.0 + LOG_TWO_PI)
        return log_prob, ops.zeros_like(log_prob) + entropy


class Clamp(nn.Cell):
    """x within [low, high]; no gradient where it is outside."""

    def __init__(self, low: float, high: float) -> None:
        super().__init__()
        self.low, self.high = low, high
        self.equal, self.select = ops.Equal(), ops.Select()

    def construct(self, x: Tensor) -> Tensor:
        return ops.clamp(x, self.low, self.high)

    def bprop(self, x, out, dout):  # type: ignore[no-untyped-def]
        return (self.select(self.equal(x, out), dout, ops.zeros_like(dout)),)


class TanhGaussianSample(nn.Cell):
    """mean, log_std, noise [B, D] -> a = tanh(x) [B, D] of x = mean + std noise; log p(a) [B].

    log p(a) = log N(x) - sum log(1 - tanh(x)^2), and log(1 - tanh(x)^2) is
    2 (log 2 - x - softplus(-2 x)), which neither overflows nor inverts tanh. The gradient is in
    closed form: d log p / d x = 2 a. tanh(x) is 1 - 2 sigmoid(-2 x): on CPU MindSpore's own tanh is
    off by 1e-4 near 5.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.exp, self.sigmoid, self.softplus = Exp(), ops.Sigmoid(), ops.Softplus()
        self.matmul = ops.MatMul()
        # One product sums over the components: on CPU a sum costs several times as much.
        factors = np.repeat([2.0, -1.0, -0.5], size).reshape(-1, 1)
        self.factors = Tensor(factors.astype(np.float32))
        self.constant = -size * (0.5 * LOG_TWO_PI + 2.0 * math.log(2.0))

    def construct(self, mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        x = mean + self.exp(log_std) * noise
        y = -2.0 * x
        terms = ops.concat((x + self.softplus(y), log_std, noise * noise), 1)
        log_prob = self.matmul(terms, self.factors) + self.constant
        return 1.0 - 2.0 * self.sigmoid(y), log_prob.reshape((-1,))

    def bprop(self, mean, log_std, noise, out, dout):  # type: ignore[no-untyped-def]
        a, d_log_prob = out[0], dout[1].reshape((-1, 1))
        # d a (1 - a^2) + 2 a d log p
        d_x = dout[0] - a * (a * dout[0] - 2.0 * d_log_prob)
        d_log_std = d_x * (self.exp(log_std) * noise) - d_log_prob
        return d_x, d_log_std, ops.zeros_like(noise)


class TanhGaussian(BoxDistribution):
    """Diagonal Gaussian squashed by tanh, mean and standard deviation from the head.

    Haarnoja et al. 2018, arXiv:1812.05905, appendix C. `raw` is the action in [-1, 1].
    """

    def __init__(self, spec: ActionSpec) -> None:
        super().__init__(spec)
        self.head_size = 2 * spec.size
        self.split = ops.Split(1, 2)
        self.clamp = Clamp(*LOG_STD_BOUNDS)
        self.draw = TanhGaussianSample(spec.size)

    def parameters(self, head: Tensor, weights: Weights) -> Weights:
        mean, log_std = self.split(head)
        return mean, self.clamp(log_std)

    def sample_log_prob(self, parameters: Weights, noise: Tensor) -> tuple[Tensor, Tensor]:
        raw, log_prob = self.draw(parameters[0], parameters[1], noise)
        return raw, log_prob


def action_scale(spec: ActionSpec) -> tuple[np.ndarray, np.ndarray]:
    """Scale and offset [D] float32 that map [-1, 1] to the bounds; 1 and 0 where one is open."""
    low, high = np.array(spec.low, np.float64), np.array(spec.high, np.float64)
    bounded = (np.abs(low) < LARGEST) & (np.abs(high) < LARGEST)
    low, high = np.where(bounded, low, -1.0), np.where(bounded, high, 1.0)
    return ((high - low) / 2).astype(np.float32), ((high + low) / 2).astype(np.float32)


def make_distribution(spec: ActionSpec, log_std_init: float) -> Distribution:
    """The distribution of an action space."""
    if spec.squashed:
        return TanhGaussian(spec)
    if spec.kind == "continuous":
        return Gaussian(spec, log_std_init)
    return {"discrete": Categorical, "multi_discrete": MultiCategorical, "multi_binary": Bernoulli}[
        spec.kind
    ](spec)
