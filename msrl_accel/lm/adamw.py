"""AdamW with decoupled weight decay and a clipped norm, on the device or on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Union

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops.operations.nn_ops import AdamWeightDecay

from msrl_accel.networks import Weights, set_parameter

Gradients = Sequence[Union[Tensor, np.ndarray]]
FLOAT_MAX = float(np.finfo(np.float32).max)
CHUNK = 1 << 15
"""Numbers the host optimiser works on at a time: its six arrays then stay in the cache."""


class AdamWOptions(NamedTuple):
    """Constants of AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101).

    w <- w - lr (m_hat / (sqrt(v_hat) + epsilon) + weight_decay w); only matrices decay.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


class Scalars(NamedTuple):
    """What one step needs besides arrays; the bias corrections are in it."""

    step_size: float
    epsilon: float
    decay: float
    """learning rate * weight_decay / step_size."""

    def tensors(self) -> list[Tensor]:
        """As arguments of `ClippedAdamW`."""
        return [Tensor(x, mstype.float32) for x in self]


class AdamW:
    """What both share: the number of steps and the bias correction.

    Args:
        weights: the trained Parameters, changed in place.
        options: the constants.
    """

    def __init__(self, weights: ParameterTuple, options: AdamWOptions) -> None:
        self.weights = weights
        self.options = options
        self.steps = 0

    def step(self, gradients: Gradients, learning_rate: float) -> float:
        """One step down the gradients; returns their norm before clipping.

        A gradient that is not finite changes nothing.
        """
        norm = self.apply(gradients, self.scalars(learning_rate))
        self.count(norm)
        return norm

    def count(self, norm: float) -> None:
        """Note a step with a gradient of this norm."""
        self.steps += math.isfinite(norm)

    def scalars(self, learning_rate: float) -> Scalars:
        """Of the next step, t: m_hat / (sqrt(v_hat) + eps) = c m / (sqrt(v) + eps r), with r^2 = 1
        - beta2^t and c = r / (1 - beta1^t)."""
        o, t = self.options, self.steps + 1
        root = math.sqrt(1.0 - o.beta2**t)
        correction = root / (1.0 - o.beta1**t)
        return Scalars(learning_rate * correction, o.epsilon * root, o.weight_decay / correction)

    def apply(self, gradients: Gradients, scalars: Scalars) -> float:
        """The step; returns the norm."""
        raise NotImplementedError

    def moments(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """First and second moment of each weight's gradient."""
        raise NotImplementedError

    def set_moments(self, index: int, first: np.ndarray, second: np.ndarray) -> None:
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Copies: the number of steps, and moments named as the weights."""
        arrays = {}
        for weight, (first, second) in zip(self.weights, self.moments()):
            arrays[f"{weight.name}.m"], arrays[f"{weight.name}.v"] = first.copy(), second.copy()
        return {"steps": self.steps, "moments": arrays}

    def restore(self, state: dict[str, Any]) -> None:
        self.steps = int(state["steps"])
        for i, weight in enumerate(self.weights):
            moments = state["moments"]
            self.set_moments(i, moments[f"{weight.name}.m"], moments[f"{weight.name}.v"])


class ClippedAdamW(nn.Cell):
    """construct(*Scalars, *gradients) -> their norm before clipping; the step is done in place.

    Nothing changes where the norm is not finite.
    """

    def __init__(self, weights: ParameterTuple, options: AdamWOptions) -> None:
        super().__init__(auto_prefix=False)
        self.weights = weights
        self.first, self.second = self.zeros("m"), self.zeros("v")
        self.beta1 = Tensor(options.beta1, mstype.float32)
        self.beta2 = Tensor(options.beta2, mstype.float32)
        self.zero = Tensor(0.0, mstype.float32)
        self.max_norm = options.max_grad_norm
        self.decays = tuple(len(w.shape) > 1 for w in weights)
        self.half_square_sum = ops.L2Loss()
        self.adam = AdamWeightDecay()

    def zeros(self, suffix: str) -> ParameterTuple:
        return ParameterTuple(
            [
                Parameter(Tensor(np.zeros(w.shape, np.float32)), f"adamw.{w.name}.{suffix}", False)
                for w in self.weights
            ]
        )

    def norm(self, gradients):  # type: ignore[no-untyped-def]
        halves: Weights = ()
        for gradient in gradients:
            halves = (*halves, self.half_square_sum(gradient))
        return ops.sqrt(2.0 * ops.addn(halves))

    def construct(self, step_size, epsilon, decay, *gradients):  # type: ignore[no-untyped-def]
        norm = self.norm(gradients)
        if norm <= FLOAT_MAX:  # so neither NaN nor infinite
            scale = self.max_norm / ops.maximum(norm, self.max_norm)
            for i in range(len(gradients)):
                self.adam(
                    self.weights[i],
                    self.first[i],
                    self.second[i],
                    step_size,
                    self.beta1,
                    self.beta2,
                    epsilon,
                    decay if self.decays[i] else self.zero,
                    gradients[i] * scale,
                )
        return norm


class DeviceAdamW(AdamW):
    """Moments beside the weights; one compiled graph, which may be part of a larger one."""

    def __init__(self, weights: ParameterTuple, options: AdamWOptions) -> None:
        super().__init__(weights, options)
        self.graph = ClippedAdamW(weights, options)

    def apply(self, gradients: Gradients, scalars: Scalars) -> float:
        return float(self.graph(*scalars.tensors(), *map(_tensor, gradients)).asnumpy())

    def moments(self) -> list[tuple[np.ndarray, np.ndarray]]:
        pairs = zip(self.graph.first, self.graph.second)
        return [(first.asnumpy(), second.asnumpy()) for first, second in pairs]

    def set_moments(self, index: int, first: np.ndarray, second: np.ndarray) -> None:
        set_parameter(self.graph.first[index], first)
        set_parameter(self.graph.second[index], second)


class HostAdamW(AdamW):
    """Moments in host arrays, offloaded from the device; the step is NumPy.

    Args:
        folder: keeps the moments in memory-mapped files there, which the system may drop from
            memory; None keeps them in memory.
    """

    def __init__(
        self, weights: ParameterTuple, options: AdamWOptions, folder: Path | None = None
    ) -> None:
        super().__init__(weights, options)
        self._moments = [
            (_zeros(w, folder, i, "m"), _zeros(w, folder, i, "v")) for i, w in enumerate(weights)
        ]
        self._room = np.empty((2, CHUNK), np.float32)

    def apply(self, gradients: Gradients, scalars: Scalars) -> float:
        arrays = [_array(g) for g in gradients]
        # Tensors are small enough for float32 sums; their sum is not.
        norm = math.sqrt(sum(float(np.dot(a.reshape(-1), a.reshape(-1))) for a in arrays))
        if math.isfinite(norm):
            scale = self.options.max_grad_norm / max(norm, self.options.max_grad_norm)
            for i, array in enumerate(arrays):
                self._apply_to(i, array, scale, scalars)
        return norm

    def _apply_to(self, i: int, gradient: np.ndarray, scale: float, scalars: Scalars) -> None:
        array = self.weights[i].asnumpy()  # shares memory on CPU
        if array.ndim == 1:
            scalars = scalars._replace(decay=0.0)
        flat = [x.reshape(-1) for x in (array, *self._moments[i], gradient)]
        for start in range(0, array.size, CHUNK):
            w, m, v, g = (x[start : start + CHUNK] for x in flat)
            self._apply_chunk(w, m, v, g, scale, scalars)
        if ms.get_context("device_target") != "CPU":
            set_parameter(self.weights[i], array)

    def _apply_chunk(
        self,
        w: np.ndarray,
        m: np.ndarray,
        v: np.ndarray,
        gradient: np.ndarray,
        scale: float,
        s: Scalars,
    ) -> None:
        """In place on w, m and v; the operations are those of the device's kernel."""
        o = self.options
        g, room = self._room[:, : w.size]
        np.multiply(gradient, scale, out=g)
        np.subtract(g, m, out=room)
        room *= 1.0 - o.beta1
        m += room
        np.multiply(g, g, out=g)
        g -= v
        g *= 1.0 - o.beta2
        v += g
        np.sqrt(v, out=room)
        room += s.epsilon
        np.divide(m, room, out=room)
        if s.decay:
            room += s.decay * w
        room *= s.step_size
        w -= room

    def moments(self) -> list[tuple[np.ndarray, np.ndarray]]:
        return self._moments

    def set_moments(self, index: int, first: np.ndarray, second: np.ndarray) -> None:
        self._moments[index][0][...] = first
        self._moments[index][1][...] = second


def _tensor(gradient: Tensor | np.ndarray) -> Tensor:
    return Tensor.from_numpy(gradient) if isinstance(gradient, np.ndarray) else gradient


def _array(gradient: Tensor | np.ndarray) -> np.ndarray:
    if isinstance(gradient, np.ndarray):
        return gradient
    array: np.ndarray = gradient.asnumpy()
    return array


def _zeros(weight: Parameter, folder: Path | None, index: int, suffix: str) -> np.ndarray:
    shape = tuple(weight.shape)
    if folder is None:
        return np.zeros(shape, np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    return np.memmap(folder / f"adamw.{index}.{suffix}", np.float32, "w+", shape=shape)
