"""Twin critics: Q values of (observation features, raw action), two networks at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops.operations._grad_ops import ReluGrad, TanhGrad

from msrl_accel.errors import ConfigError
from msrl_accel.networks import ACTIVATIONS, MLP, Dense, Weights, WeightSpec, dense_specs

MEMBERS = 2


class TwinCritics(nn.Cell):
    """features [B, F], raw_action [B, D], weights -> the smaller of two Q values [B].

    The exported form: plain layers, any batch size. Training runs `FoldedCritics`.

    Args:
        inputs: F + D.
        hidden_sizes: widths of the hidden layers.
        activation: 'tanh' or 'relu'.
    """

    def __init__(self, inputs: int, hidden_sizes: Sequence[int], activation: str) -> None:
        super().__init__()
        self.torso = MLP(inputs, hidden_sizes, activation, MEMBERS)
        self.dense = Dense()

    def weight_specs(self, name: str) -> list[WeightSpec]:
        heads = [
            spec
            for i in range(MEMBERS)
            for spec in dense_specs(f"{name}.head{i}", self.torso.outputs, 1, gain=1.0)
        ]
        return [*self.torso.weight_specs(f"{name}.torso"), *heads]

    def construct(self, features: Tensor, raw_action: Tensor, weights: Weights) -> Tensor:
        hidden = self.torso(ops.concat((features, raw_action), 1), weights[: -2 * MEMBERS])
        first = self.dense(hidden[0], weights[-4], weights[-3])
        second = self.dense(hidden[1], weights[-2], weights[-1])
        return ops.minimum(first, second).reshape((-1,))


class FoldedCritics(nn.Cell):
    """The same networks as training runs them, at a fixed batch size, with a closed-form gradient.

    construct(features [B, F], raw_action [B, D], weights) returns (q [2, 1, B], and what the
    gradient needs). Both members are one batched product of matrices [units, B]: so the first layer
    is one product for both, and the gradient of its input is summed over them in one. A bias is the
    weight of a constant input, since on CPU a broadcast addition costs as much as several others:
    each hidden layer has one more unit, which is always 1.

    Weights (`fold` makes them): of each hidden layer [2, out + 1, in + 1], of the heads
    [2, 1, in + 1].
    """

    def __init__(
        self, features: int, actions: int, hidden_sizes: Sequence[int], activation: str, batch: int
    ) -> None:
        super().__init__()
        self.features, self.actions, self.batch = features, actions, batch
        widths = [n + 1 for n in (features + actions, *hidden_sizes)]
        self.inputs, self.first_units = widths[:2]
        self.last = len(hidden_sizes) - 1
        self.is_relu = activation == "relu"
        self.activation = ACTIVATIONS[activation]()
        self.relu_grad, self.tanh_grad = ReluGrad(), TanhGrad()
        self.product, self.product_ta = ops.MatMul(), ops.MatMul(transpose_a=True)
        self.product_tb = ops.MatMul(transpose_b=True)
        self.matmul = ops.BatchMatMul()
        self.matmul_ta = ops.BatchMatMul(transpose_a=True)
        self.matmul_tb = ops.BatchMatMul(transpose_b=True)
        self.concat = ops.Concat(1)
        self.constant_input = Tensor(np.ones((batch, 1), np.float32))
        self.trained = tuple(
            Tensor(_without_constant_unit(outputs, inputs))
            for inputs, outputs in zip(widths, widths[1:])
        )

    def construct(self, features: Tensor, raw_action: Tensor, weights: Weights) -> Weights:
        x = self.concat((features, raw_action, self.constant_input))
        first = weights[0].reshape((-1, self.inputs))
        hidden = self.product_tb(first, x).reshape((MEMBERS, self.first_units, self.batch))
        hidden = self.activation(hidden)
        kept: Weights = (x, hidden)
        for i in range(1, self.last + 1):
            hidden = self.activation(self.matmul(weights[i], hidden))
            kept = (*kept, hidden)
        return (self.matmul(weights[-1], hidden), *kept)

    def bprop(self, features, raw_action, weights, out, dout):  # type: ignore[no-untyped-def]
        x, hidden, d_q = out[1], out[2:], dout[0]
        gradients: Weights = (self.matmul_tb(d_q, hidden[self.last]),)
        d_z = self.activation_grad(self.matmul_ta(weights[-1], d_q), hidden[self.last])
        for i in range(self.last, 0, -1):
            gradient = self.matmul_tb(d_z, hidden[i - 1]) * self.trained[i]
            gradients = (gradient, *gradients)
            d_z = self.activation_grad(self.matmul_ta(weights[i], d_z), hidden[i - 1])
        d_first = d_z.reshape((-1, self.batch))
        gradient = self.product(d_first, x).reshape(weights[0].shape) * self.trained[0]
        d_features = self.input_gradient(d_first, weights[0], 0, self.features)
        d_action = self.input_gradient(d_first, weights[0], self.features, self.actions)
        return d_features, d_action, (gradient, *gradients)

    def activation_grad(self, gradient: Tensor, output: Tensor) -> Tensor:
        if self.is_relu:
            return self.relu_grad(gradient, output)
        return self.tanh_grad(output, gradient)

    def input_gradient(self, d_first: Tensor, weight: Tensor, begin: int, size: int) -> Tensor:
        """Gradient [B, size] of columns of the input, summed over the members."""
        columns = ops.slice(weight, (0, 0, begin), (MEMBERS, self.first_units, size))
        return self.product_ta(d_first, columns.reshape((-1, size)))


def _without_constant_unit(outputs: int, inputs: int) -> np.ndarray:
    """1 where a folded weight is trained, 0 in the row of the unit that stays 1."""
    mask = np.ones((MEMBERS, outputs, inputs), np.float32)
    mask[:, -1] = 0.0
    return mask


def fold(arrays: Sequence[np.ndarray], activation: str) -> list[np.ndarray]:
    """Weights in the order of `TwinCritics.weight_specs`, as `FoldedCritics` takes them."""
    folded = []
    for weight, bias in zip(arrays[:-4:2], arrays[1:-4:2]):
        matrix = np.concatenate([weight, bias.transpose(0, 2, 1)], axis=2)
        unit = np.zeros((MEMBERS, 1, matrix.shape[2]), np.float32)
        unit[..., -1] = 1.0 if activation == "relu" else 20.0  # either activation makes it 1
        folded.append(np.concatenate([matrix, unit], axis=1))
    heads = [
        np.concatenate([weight, bias[None]], axis=1)
        for weight, bias in zip(arrays[-4::2], arrays[-3::2])
    ]
    return [*folded, np.stack(heads)]


def unfold(folded: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Inverse of `fold`."""
    arrays = []
    for matrix in folded[:-1]:
        kept = matrix[:, :-1]
        arrays += [kept[..., :-1].copy(), kept[..., -1:].transpose(0, 2, 1).copy()]
    for head in folded[-1]:
        arrays += [head[:, :-1].copy(), head[0, -1:].copy()]
    return arrays


def check_hidden_sizes(hidden_sizes: Sequence[int]) -> None:
    """Raise ConfigError where the critics would have no hidden layer."""
    if not hidden_sizes:
        raise ConfigError("policy.hidden_sizes = []: critics need a hidden layer, such as [256]")
