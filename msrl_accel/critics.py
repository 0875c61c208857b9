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

    construct(features [B, F], raw_action [B, D], weights) returns (q [2, B, 1], and what the
    gradient needs). Both members are one batched product. A bias is the weight of a constant
    input, since on CPU a broadcast addition costs as much as several others: each hidden layer but
    the last has one more unit, which is always 1.

    Weights (`fold` makes them): of each hidden layer [2, in + 1, out + 1], of the last of them
    [2, in + 1, out]; of the heads [2, 1, in] and [2, 1, 1].
    """

    def __init__(
        self, features: int, actions: int, hidden_sizes: Sequence[int], activation: str, batch: int
    ) -> None:
        super().__init__()
        self.features, self.actions, self.batch = features, actions, batch
        self.inputs = features + actions + 1
        self.n_layers = len(hidden_sizes)
        self.is_relu = activation == "relu"
        self.activation = ACTIVATIONS[activation]()
        self.relu_grad, self.tanh_grad = ReluGrad(), TanhGrad()
        self.matmul = ops.BatchMatMul()
        self.matmul_ta = ops.BatchMatMul(transpose_a=True)
        self.matmul_tb = ops.BatchMatMul(transpose_b=True)
        self.concat = ops.Concat(1)
        self.tile, self.split = ops.Tile(), ops.Split(0, MEMBERS)
        self.constant_input = Tensor(np.ones((batch, 1), np.float32))
        self.row_sum = Tensor(np.ones((MEMBERS, 1, batch), np.float32))
        widths = (self.inputs - 1, *hidden_sizes)
        self.trained: tuple[Tensor, ...] = tuple(
            Tensor(_without_constant_unit(inputs + 1, outputs + 1))
            for inputs, outputs in zip(widths, hidden_sizes[:-1])
        )

    def construct(self, features: Tensor, raw_action: Tensor, weights: Weights) -> Weights:
        x = self.concat((features, raw_action, self.constant_input))
        x = self.tile(x.reshape((1, self.batch, self.inputs)), (MEMBERS, 1, 1))
        kept: Weights = (x,)
        for i in range(self.n_layers):
            x = self.activation(self.matmul(x, weights[i]))
            kept = (*kept, x)
        return (self.matmul_tb(x, weights[-2]) + weights[-1], *kept)

    def bprop(self, features, raw_action, weights, out, dout):  # type: ignore[no-untyped-def]
        inputs, d_q, last = out[1:], dout[0], self.n_layers - 1
        d_z = self.activation_grad(self.matmul(d_q, weights[-2]), inputs[-1])
        gradients: Weights = (
            self.matmul_ta(inputs[last], d_z),
            self.matmul_ta(d_q, inputs[-1]),
            self.matmul(self.row_sum, d_q),
        )
        for i in range(last - 1, -1, -1):
            d_z = self.activation_grad(self.matmul_tb(d_z, weights[i + 1]), inputs[i + 1])
            gradients = (self.matmul_ta(inputs[i], d_z) * self.trained[i], *gradients)
        d_features = self.input_gradient(d_z, weights[0], 0, self.features)
        d_action = self.input_gradient(d_z, weights[0], self.features, self.actions)
        return d_features, d_action, gradients

    def activation_grad(self, gradient: Tensor, output: Tensor) -> Tensor:
        if self.is_relu:
            return self.relu_grad(gradient, output)
        return self.tanh_grad(output, gradient)

    def input_gradient(self, d_z: Tensor, weight: Tensor, begin: int, size: int) -> Tensor:
        """Gradient [B, size] of columns of the input, summed over the members."""
        rows = ops.slice(weight, (0, begin, 0), (MEMBERS, size, weight.shape[2]))
        first, second = self.split(self.matmul_tb(d_z, rows))
        return (first + second).reshape((self.batch, size))


def _without_constant_unit(inputs: int, outputs: int) -> np.ndarray:
    """1 where a folded weight is trained, 0 in the column of the unit that stays 1."""
    mask = np.ones((MEMBERS, inputs, outputs), np.float32)
    mask[:, :, -1] = 0.0
    return mask


def fold(arrays: Sequence[np.ndarray], activation: str) -> list[np.ndarray]:
    """Weights in the order of `TwinCritics.weight_specs`, as `FoldedCritics` takes them."""
    layers = list(zip(arrays[:-4:2], arrays[1:-4:2]))
    folded = []
    for i, (weight, bias) in enumerate(layers):
        matrix = np.concatenate([weight.transpose(0, 2, 1), bias], axis=1)
        if i < len(layers) - 1:
            unit = np.zeros((*matrix.shape[:2], 1), np.float32)
            unit[:, -1] = 1.0 if activation == "relu" else 20.0  # either activation makes it 1
            matrix = np.concatenate([matrix, unit], axis=2)
        folded.append(np.ascontiguousarray(matrix, np.float32))
    heads = np.stack([arrays[-4], arrays[-2]])
    biases = np.stack([arrays[-3], arrays[-1]]).reshape(MEMBERS, 1, 1)
    return [*folded, heads, biases]


def unfold(folded: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Inverse of `fold`."""
    arrays = []
    hidden, heads, biases = folded[:-2], folded[-2], folded[-1]
    for i, matrix in enumerate(hidden):
        kept = matrix if i == len(hidden) - 1 else matrix[:, :, :-1]
        arrays += [kept[:, :-1].transpose(0, 2, 1).copy(), kept[:, -1:].copy()]
    for i in range(MEMBERS):
        arrays += [heads[i].copy(), biases[i].reshape(1).copy()]
    return arrays


def check_hidden_sizes(hidden_sizes: Sequence[int]) -> None:
    """Raise ConfigError where the critics would have no hidden layer."""
    if not hidden_sizes:
        raise ConfigError("policy.hidden_sizes = []: critics need a hidden layer, such as [256]")
