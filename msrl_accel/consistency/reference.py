"""The policy networks in NumPy: an independent reference of the graph, layer by layer.

It is written from the weights' names and the policy's specification alone, and shares no code with
the graph. `Arithmetic` rounds the numbers on their way, which rehearses other precisions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from msrl_accel.errors import PolicyError
from msrl_accel.runtime.base import ActResult, check_inputs
from msrl_accel.spaces import ActionSpec, Observations, ObservationSpec, PolicySpec

Rounding = Callable[[np.ndarray], np.ndarray]

SQUASHED_LOG_STD = (-20.0, 2.0)
"""Bounds of the log standard deviation of squashed Gaussians."""
NATURE_STRIDES, SMALL_STRIDES = (4, 2, 1), (1, 2)
"""Strides of the convolutions on images of at least 36 pixels, and on smaller ones."""


def exact(x: np.ndarray) -> np.ndarray:
    """No rounding beyond that of the array's own dtype."""
    return x


@dataclass(frozen=True)
class Arithmetic:
    """How numbers are rounded; products are summed in `dtype`."""

    dtype: type = np.float32
    """Of every array; float64 gives a result without visible rounding."""
    weight: Rounding = exact
    """Weights of matrix products and convolutions, [out, ...] each."""
    matrix_input: Rounding = exact
    """What enters a matrix product or a convolution."""
    matrix_output: Rounding = exact
    """What leaves it, before the bias."""
    vector: Rounding = exact
    """The result of every other operator, and the observations, constants and noise."""


@dataclass
class Layer:
    """One named step of the network."""

    name: str
    output: np.ndarray
    """[B, ...]"""
    upstream: frozenset[str]
    """Layers this one depends on."""


_NOTHING: frozenset[str] = frozenset()
_NO_WEIGHT = np.empty(0)
_MEMBERS = {"torso": (" (actor)", " (critic)"), "critics.torso": (" (first)", " (second)")}
_CRITIC_HEADS = ("critic", "critics.head0", "critics.head1")


@dataclass
class _Trace:
    layers: list[Layer] = field(default_factory=list)

    def add(self, name: str, output: np.ndarray, upstream: frozenset[str]) -> frozenset[str]:
        self.layers.append(Layer(name, output, upstream))
        return upstream | {name}


class NumpyPolicy:
    """A policy network in NumPy, with the interface of a runtime.

    Args:
        spec: the policy's tensors.
        arrays: weights and normalisation statistics, as `Policy.arrays` gives them.
        activation: 'tanh' or 'relu'.
        observation_clip: bound of normalised observations.
        arithmetic: how numbers are rounded.
        version: of the weights.

    Raises:
        PolicyError: a weight is missing.
    """

    def __init__(
        self,
        spec: PolicySpec,
        arrays: Mapping[str, np.ndarray],
        *,
        activation: str = "tanh",
        observation_clip: float = 10.0,
        arithmetic: Arithmetic | None = None,
        version: int = 0,
    ) -> None:
        self.spec = spec
        self.activation = activation
        self.observation_clip = observation_clip
        self.arithmetic = arithmetic or Arithmetic()
        self.load_weights(version, arrays)

    def load_weights(self, version: int, arrays: Mapping[str, np.ndarray]) -> None:
        heads = {"actor.weight"}
        if self.spec.has_value:
            heads.add("critics.head0.weight" if self.spec.action.squashed else "critic.weight")
        missing = heads - set(arrays)
        if missing:
            raise PolicyError(f"weights {sorted(missing)} are missing; the file is of no policy")
        a = self.arithmetic
        self._arrays = {}
        for name, array in arrays.items():
            x: np.ndarray = np.array(array, a.dtype)
            self._arrays[name] = a.weight(x) if name.endswith(".weight") else a.vector(x)
        self.version = version

    def act(self, observations: Observations, noise: np.ndarray) -> ActResult:
        check_inputs(self.spec, observations, noise)
        with np.errstate(over="ignore", invalid="ignore"):  # a narrow format may overflow
            parameters, value = self.heads(self.layers(observations, noise))
            raw, log_prob = self._sample_log_prob(parameters, noise)
            action = environment_action(self.spec.action, raw, self.arithmetic.vector)
        return ActResult(action, log_prob, value, raw, parameters)

    def close(self) -> None:
        """Nothing to release."""

    def layers(self, observations: Observations, noise: np.ndarray) -> list[Layer]:
        """Every step of the network in order, up to the heads of actor and critics.

        The noise matters where critics value the action taken.
        """
        trace = _Trace()
        with np.errstate(over="ignore", invalid="ignore"):
            checked = check_inputs(self.spec, observations)
            x, upstream = self._features(checked, trace)
            hidden, paths = self._torso("torso", x, upstream, trace)
            path = trace.add("actor", self._dense("actor", hidden[0]), paths[0])
            if self.spec.has_value and self.spec.action.squashed:
                self._twin_critics(checked, noise, path, trace)
            elif self.spec.has_value:
                trace.add("critic", self._dense("critic", hidden[-1]), paths[-1])
        return trace.layers

    def _twin_critics(
        self, observations: Observations, noise: np.ndarray, path: frozenset[str], trace: _Trace
    ) -> None:
        raw, _ = self._sample_log_prob(self._parameters(trace.layers[-1].output), noise)
        x, upstream = self._features(observations, trace, "critics.")
        x = np.concatenate([x, raw], axis=1)
        hidden, paths = self._torso("critics.torso", x, path | upstream, trace)
        for i in (0, 1):
            name = f"critics.head{i}"
            trace.add(name, self._dense(name, hidden[i]), paths[i])

    def _features(
        self, observations: Observations, trace: _Trace, prefix: str = ""
    ) -> tuple[np.ndarray, frozenset[str]]:
        a = self.arithmetic
        x: np.ndarray
        features: list[np.ndarray] = []
        upstream = _NOTHING
        for o, observation in zip(self.spec.observations, observations):
            x = a.vector(observation.astype(a.dtype))
            if o.is_image:
                x, path = self._cnn(f"{prefix}cnn.{o.name}", o, x, trace)
                upstream |= path
            else:
                x = x.reshape(len(x), o.size)
                if o.dtype == "uint8":
                    x = a.vector(x * a.dtype(1.0 / 255.0))
                elif f"normalizer.{o.name}.mean" in self._arrays:
                    x = self._normalize(o, x)
                    upstream |= trace.add(f"{prefix}normalizer.{o.name}", x, _NOTHING)
            features.append(x)
        return np.concatenate(features, axis=1), upstream

    def _normalize(self, o: ObservationSpec, x: np.ndarray) -> np.ndarray:
        mean = self._arrays[f"normalizer.{o.name}.mean"]
        inverse_std = self._arrays[f"normalizer.{o.name}.inverse_std"]
        x = self.arithmetic.vector(self.arithmetic.vector(x - mean) * inverse_std)
        return np.asarray(np.clip(x, -self.observation_clip, self.observation_clip))

    def _cnn(
        self, prefix: str, o: ObservationSpec, x: np.ndarray, trace: _Trace
    ) -> tuple[np.ndarray, frozenset[str]]:
        a, upstream = self.arithmetic, _NOTHING
        x = a.vector(x * a.dtype(1.0 / 255.0))
        if x.ndim == 3:
            x = x[:, None]
        elif not o.channels_first:
            x = x.transpose(0, 3, 1, 2)
        strides = NATURE_STRIDES if min(o.hwc[:2]) >= 36 else SMALL_STRIDES
        for i, stride in enumerate(strides):
            name = f"{prefix}.conv{i}"
            x = convolution(a.matrix_input(x), self._arrays[f"{name}.weight"], stride)
            x = a.vector(a.matrix_output(x) + self._arrays[f"{name}.bias"][:, None, None])
            x = np.maximum(x, 0)
            upstream = trace.add(name, x, upstream)
        name = f"{prefix}.dense"
        x = np.maximum(self._dense(name, x.reshape(len(x), -1)), 0)
        return x, trace.add(name, x, upstream)

    def _torso(
        self, name: str, x: np.ndarray, upstream: frozenset[str], trace: _Trace
    ) -> tuple[np.ndarray, list[frozenset[str]]]:
        """Hidden layers [M, B, width] and what each of the M torsos depends on.

        M is 1 for one torso, 2 for actor's and critic's own or for twin critics, whose weights are
        stacked.
        """
        pattern = re.compile(rf"{re.escape(name)}\.(\d+)\.weight")
        indices = sorted(int(m.group(1)) for m in map(pattern.fullmatch, self._arrays) if m)
        stacked = self._arrays.get(f"{name}.0.weight", _NO_WEIGHT).ndim == 3
        suffixes = _MEMBERS[name] if stacked else ("",)
        paths = [upstream] * len(suffixes)
        x = np.broadcast_to(x, (len(suffixes), *x.shape))
        for i in indices:
            x = self._dense(f"{name}.{i}", x if stacked else x[0])
            x = np.tanh(x) if self.activation == "tanh" else np.maximum(x, 0)
            x = self.arithmetic.vector(x)
            x = x if stacked else x[None]
            paths = [
                trace.add(f"{name}.{i}{suffix}", output, path)
                for suffix, output, path in zip(suffixes, x, paths)
            ]
        return x, paths

    def _dense(self, name: str, x: np.ndarray) -> np.ndarray:
        a, weight = self.arithmetic, self._arrays[f"{name}.weight"]
        product = a.matrix_output(a.matrix_input(x) @ np.swapaxes(weight, -1, -2))
        return a.vector(product + self._arrays[f"{name}.bias"])

    def heads(self, layers: list[Layer]) -> tuple[tuple[np.ndarray, ...], np.ndarray | None]:
        """Distribution parameters, and value [B]."""
        outputs = {layer.name: layer.output for layer in layers}
        critics = [x.reshape(-1) for name, x in outputs.items() if name in _CRITIC_HEADS]
        value = np.min(critics, axis=0) if critics else None
        return self._parameters(outputs["actor"]), value

    def _parameters(self, actor: np.ndarray) -> tuple[np.ndarray, ...]:
        if self.spec.action.squashed:
            mean, log_std = np.split(actor, 2, axis=1)
            return mean, np.clip(log_std, *SQUASHED_LOG_STD)
        if self.spec.action.kind == "continuous":
            return actor, self._arrays["log_std"]
        return (actor,)

    def _sample_log_prob(
        self, parameters: tuple[np.ndarray, ...], noise: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Raw action, and its log-probability [B]."""
        noise = self.arithmetic.vector(noise.astype(self.arithmetic.dtype))
        raw = self._sample(parameters, noise)
        if self.spec.action.squashed:
            log_prob = squashed_log_probability(raw, parameters[1], noise)
            return self.arithmetic.vector(np.tanh(raw)), log_prob
        return raw, log_probability(self.spec.action, parameters, raw)

    def _sample(self, parameters: tuple[np.ndarray, ...], noise: np.ndarray) -> np.ndarray:
        """The action as drawn; of a squashed policy, before it is squashed."""
        vector = self.arithmetic.vector
        if self.spec.action.kind == "continuous":
            mean, log_std = parameters
            return vector(mean + vector(vector(np.exp(log_std)) * noise))
        perturbed = vector(parameters[0] + noise)
        if self.spec.action.kind == "multi_binary":
            return (perturbed > 0).astype(np.int32)
        choices = [x.argmax(-1) for x in components(self.spec.action, perturbed)]
        raw = np.stack(choices, axis=1).astype(np.int32)
        return raw[:, 0] if self.spec.action.kind == "discrete" else raw


def convolution(x: np.ndarray, weight: np.ndarray, stride: int) -> np.ndarray:
    """Valid cross-correlation: x [B, C, H, W], weight [F, C, K, K] -> [B, F, H', W']."""
    kernel = weight.shape[-1]
    windows = np.lib.stride_tricks.sliding_window_view(x, (kernel, kernel), axis=(2, 3))
    windows = windows[:, :, ::stride, ::stride]
    product = np.tensordot(windows, weight, axes=((1, 4, 5), (1, 2, 3)))
    return np.asarray(product.transpose(0, 3, 1, 2))


def components(action: ActionSpec, x: np.ndarray) -> list[np.ndarray]:
    """Concatenated logits [B, sum(sizes)] -> one [B, n] a component."""
    return np.split(x, np.cumsum(action.sizes)[:-1], axis=-1)


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    shifted = x - x.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + exp(x)) without overflow."""
    return np.asarray(np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))))


def log_probability(
    action: ActionSpec, parameters: tuple[np.ndarray, ...], raw: np.ndarray
) -> np.ndarray:
    """log p(raw) [B] of the action as drawn."""
    if action.kind == "continuous":
        mean, log_std = parameters
        z = (raw - mean) * np.exp(-log_std)
        terms = -0.5 * z * z - log_std - 0.5 * math.log(2 * math.pi)
        return np.asarray(terms.sum(axis=-1))
    if action.kind == "multi_binary":
        return np.asarray((raw * parameters[0] - softplus(parameters[0])).sum(axis=-1))
    columns = raw.reshape(len(raw), -1)
    return np.asarray(
        sum(
            np.take_along_axis(log_softmax(x), columns[:, i : i + 1], axis=-1)[:, 0]
            for i, x in enumerate(components(action, parameters[0]))
        )
    )


def squashed_log_probability(x: np.ndarray, log_std: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """log p(tanh x) [B] of x = mean + exp(log_std) noise: log N(x) + sum of log cosh(x)^2."""
    gaussian = -0.5 * noise * noise - log_std - 0.5 * math.log(2 * math.pi)
    return np.asarray((gaussian + 2 * (np.logaddexp(x, -x) - math.log(2))).sum(axis=-1))


def environment_action(action: ActionSpec, raw: np.ndarray, rounding: Rounding) -> np.ndarray:
    """The action as drawn, in environment units and within the bounds."""
    if action.kind == "multi_binary":
        return raw.reshape(-1, *action.shape)
    if action.kind != "continuous":
        return (raw + np.array(action.starts, np.int32)).reshape(-1, *action.shape)
    low, high = np.array(action.low), np.array(action.high)
    largest = np.finfo(np.float32).max
    bounded = (np.abs(low) < largest) & (np.abs(high) < largest)
    scale = np.where(bounded, (np.where(bounded, high, 1) - np.where(bounded, low, -1)) / 2, 1.0)
    offset = np.where(bounded, (np.where(bounded, high, 0) + np.where(bounded, low, 0)) / 2, 0.0)
    mapped = rounding(rounding(raw * scale.astype(raw.dtype)) + offset.astype(raw.dtype))
    clipped = np.clip(mapped, low.astype(raw.dtype), high.astype(raw.dtype))
    return np.asarray(clipped.reshape(-1, *action.shape))
