"""Network torsos as functions of explicit weights.

A module here holds no parameters. It lists the weights it needs (`weight_specs`) and takes them as
an argument, so that one and the same code runs on a policy's Parameters (rollout, export) and on
the slices of the one flat vector that the optimiser steps (training).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops.operations._grad_ops import TanhGrad

from msrl_accel.errors import ConfigError
from msrl_accel.spaces import ObservationSpec

Weights = tuple[Tensor, ...]


@dataclass(frozen=True)
class WeightSpec:
    """Name, shape and initial value of one weight tensor."""

    name: str
    shape: tuple[int, ...]
    init: Callable[[np.random.Generator], np.ndarray]

    def initial(self, rng: np.random.Generator) -> np.ndarray:
        return np.ascontiguousarray(self.init(rng), np.float32).reshape(self.shape)


def set_parameter(parameter: Parameter, array: np.ndarray) -> None:
    """Copy an array into a Parameter.

    In place: compiled graphs that share it, or use it in a loop, miss what `set_data` puts there.
    """
    ops.assign(parameter, Tensor(np.array(array, np.float32).reshape(parameter.shape)))


def orthogonal(rows: int, columns: int, gain: float, members: int = 1) -> Callable[..., np.ndarray]:
    """Initialiser of `members` matrices [rows, columns], orthogonal rows or columns times `gain`.

    Saxe et al. 2013, arXiv:1312.6120; the sign of R is fixed so that the law is uniform.
    """

    def one(rng: np.random.Generator) -> np.ndarray:
        q, r = np.linalg.qr(rng.standard_normal((max(rows, columns), min(rows, columns))))
        q = q * np.where(np.diag(r) < 0, -1.0, 1.0)
        return gain * (q if rows >= columns else q.T)

    return lambda rng: np.stack([one(rng) for _ in range(members)])


def zeros(*shape: int) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: np.zeros(shape, np.float32)


def dense_specs(
    name: str, inputs: int, outputs: int, gain: float, members: int = 0
) -> list[WeightSpec]:
    """Weight and bias of a dense layer; with `members` > 0, of that many layers stacked."""
    if members:
        return [
            WeightSpec(
                f"{name}.weight",
                (members, outputs, inputs),
                orthogonal(outputs, inputs, gain, members),
            ),
            WeightSpec(f"{name}.bias", (members, 1, outputs), zeros(members, 1, outputs)),
        ]
    return [
        WeightSpec(f"{name}.weight", (outputs, inputs), orthogonal(outputs, inputs, gain)),
        WeightSpec(f"{name}.bias", (outputs,), zeros(outputs)),
    ]


class Dense(nn.Cell):
    """x [B, in], weight [out, in], bias [out] -> [B, out].

    The bias gradient is a product with ones: on CPU the sum over rows costs four times as much.
    """

    def __init__(self) -> None:
        super().__init__()
        self.matmul = ops.MatMul()
        self.matmul_ta = ops.MatMul(transpose_a=True)
        self.matmul_tb = ops.MatMul(transpose_b=True)
        self.bias_add = ops.BiasAdd()

    def construct(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return self.bias_add(self.matmul_tb(x, weight), bias)

    def bprop(self, x, weight, bias, out, dout):  # type: ignore[no-untyped-def]
        bias_grad = self.matmul(ops.ones((1, dout.shape[0]), dout.dtype), dout)
        return (
            self.matmul(dout, weight),
            self.matmul_ta(dout, x),
            bias_grad.reshape((bias.shape[0],)),
        )


class EnsembleDense(nn.Cell):
    """x [M, B, in], weight [M, out, in], bias [M, 1, out] -> [M, B, out]: M layers at once."""

    def __init__(self) -> None:
        super().__init__()
        self.matmul = ops.BatchMatMul()
        self.matmul_ta = ops.BatchMatMul(transpose_a=True)
        self.matmul_tb = ops.BatchMatMul(transpose_b=True)

    def construct(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return self.matmul_tb(x, weight) + bias

    def bprop(self, x, weight, bias, out, dout):  # type: ignore[no-untyped-def]
        members, rows, _ = dout.shape
        bias_grad = self.matmul(ops.ones((members, 1, rows), dout.dtype), dout)
        return self.matmul(dout, weight), self.matmul_ta(dout, x), bias_grad


class FixedBatchEnsembleDense(EnsembleDense):
    """The same, bit for bit, where the batch size is a constant of the graph, as in training.

    The biases are spread by a product with ones: on CPU a broadcast costs five times an addition.
    """

    def construct(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ones = ops.ones((x.shape[0], x.shape[1], 1), x.dtype)
        return self.matmul_tb(x, weight) + self.matmul(ones, bias)


class Tanh(nn.Cell):
    """tanh to the last digits: on CPU MindSpore's own is off by 1e-4 near 5, where others are not.

    With t = tanh(x / 2), tanh(x) = 2 t / (1 + t^2), in which that error cancels.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tanh = ops.Tanh()
        self.tanh_grad = TanhGrad()

    def construct(self, x: Tensor) -> Tensor:
        t = self.tanh(x * 0.5)
        return (t + t) / (t * t + 1.0)

    def bprop(self, x, out, dout):  # type: ignore[no-untyped-def]
        return (self.tanh_grad(out, dout),)


class Exp(nn.Cell):
    """exp to the last digits: on CPU MindSpore's own is off by 4e-6 of it, where others are not."""

    def __init__(self) -> None:
        super().__init__()
        self.pow = ops.Pow()

    def construct(self, x: Tensor) -> Tensor:
        return self.pow(np.e, x)

    def bprop(self, x, out, dout):  # type: ignore[no-untyped-def]
        return (out * dout,)


ACTIVATIONS = {"tanh": Tanh, "relu": ops.ReLU}


class MLP(nn.Cell):
    """One or several multi-layer perceptrons of the same shape on the same input.

    Args:
        inputs: width of the input.
        hidden_sizes: widths of the hidden layers; may be empty (the output is then the input).
        activation: 'tanh' or 'relu', after every layer.
        members: number of perceptrons, evaluated together.
    """

    def __init__(
        self, inputs: int, hidden_sizes: Sequence[int], activation: str, members: int = 1
    ) -> None:
        super().__init__()
        self.widths = (inputs, *hidden_sizes)
        self.n_layers = len(hidden_sizes)
        self.members = members
        self.is_relu = activation == "relu"
        self.activation = ACTIVATIONS[activation]()
        self.dense = Dense()
        self.ensemble_dense = EnsembleDense()
        self.fixed_batch_ensemble_dense = FixedBatchEnsembleDense()
        self.unstack = ops.Split(0, members)

    @property
    def outputs(self) -> int:
        return self.widths[-1]

    def weight_specs(self, name: str) -> list[WeightSpec]:
        """Weights in the order `construct` takes them; gain sqrt(2) (Andrychowicz et al. 2021)."""
        members = self.members if self.members > 1 else 0
        specs: list[WeightSpec] = []
        for i, (inputs, outputs) in enumerate(zip(self.widths, self.widths[1:])):
            specs += dense_specs(f"{name}.{i}", inputs, outputs, np.sqrt(2.0), members)
        return specs

    def construct(self, x: Tensor, weights: Weights, fixed_batch: bool = False) -> Weights:
        """x [B, in] -> one [B, out] for each member."""
        if self.n_layers == 0:
            return (x,) * self.members
        if self.members == 1:
            for i in range(self.n_layers):
                x = self.activation(self.dense(x, weights[2 * i], weights[2 * i + 1]))
            return (x,)
        x = ops.tile(x.reshape((1, -1, self.widths[0])), (self.members, 1, 1))
        for i in range(self.n_layers):
            if fixed_batch:
                x = self.fixed_batch_ensemble_dense(x, weights[2 * i], weights[2 * i + 1])
            else:
                x = self.ensemble_dense(x, weights[2 * i], weights[2 * i + 1])
            x = self.activation(x)
        outputs: Weights = ()
        for member in self.unstack(x):
            outputs = (*outputs, member.reshape((-1, self.widths[-1])))
        return outputs


# (filters, kernel, stride) of each layer
NATURE_LAYERS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
SMALL_LAYERS = ((16, 3, 1), (32, 3, 2))


class CNN(nn.Cell):
    """Convolutional encoder of uint8 images: Mnih et al. 2015 from 36 pixels on, smaller below.

    construct: image [B, *shape] uint8, weights -> features [B, outputs].
    """

    def __init__(self, spec: ObservationSpec) -> None:
        super().__init__()
        height, width, channels = spec.hwc
        self.grayscale = len(spec.shape) == 2
        self.channels_last = not self.grayscale and not spec.channels_first
        large = min(height, width) >= 36
        self.layers = NATURE_LAYERS if large else SMALL_LAYERS
        self.outputs = 512 if large else 128
        self.channels = channels
        for _, kernel, stride in self.layers:
            height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        if min(height, width) < 1:
            raise ConfigError(f"observation {spec.name!r}: image {spec.shape} is too small")
        self.flat = self.layers[-1][0] * height * width
        convs = [
            # A pair: ONNX export does not take one number.
            ops.Conv2D(filters, (kernel, kernel), pad_mode="valid", stride=stride)
            for filters, kernel, stride in self.layers
        ]
        self.conv_0, self.conv_1, self.conv_2 = (*convs, None)[:3]
        self.bias_add = ops.BiasAdd()
        self.relu = ops.ReLU()
        self.dense = Dense()

    def weight_specs(self, name: str) -> list[WeightSpec]:
        specs: list[WeightSpec] = []
        channels = self.channels
        for i, (filters, kernel, _) in enumerate(self.layers):
            init = orthogonal(filters, channels * kernel * kernel, np.sqrt(2.0))
            specs.append(
                WeightSpec(f"{name}.conv{i}.weight", (filters, channels, kernel, kernel), init)
            )
            specs.append(WeightSpec(f"{name}.conv{i}.bias", (filters,), zeros(filters)))
            channels = filters
        return specs + dense_specs(f"{name}.dense", self.flat, self.outputs, np.sqrt(2.0))

    def construct(self, image: Tensor, weights: Weights) -> Tensor:
        x = ops.cast(image, mstype.float32) * (1.0 / 255.0)
        if self.grayscale:
            x = x.reshape((-1, 1, *image.shape[1:]))
        if self.channels_last:
            x = ops.transpose(x, (0, 3, 1, 2))
        x = self.relu(self.bias_add(self.conv_0(x, weights[0]), weights[1]))
        x = self.relu(self.bias_add(self.conv_1(x, weights[2]), weights[3]))
        if self.conv_2 is not None:
            x = self.relu(self.bias_add(self.conv_2(x, weights[4]), weights[5]))
        return self.relu(self.dense(x.reshape((-1, self.flat)), weights[-2], weights[-1]))
