"""The policy graph: the one Cell that rollout, evaluation, training and export use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype

from msrl_accel.critics import TwinCritics
from msrl_accel.distributions import Distribution, make_distribution
from msrl_accel.errors import PolicyError
from msrl_accel.networks import (
    CNN,
    MLP,
    Dense,
    Weights,
    WeightSpec,
    dense_specs,
    set_parameter,
)
from msrl_accel.spaces import PolicySpec


class PolicyOptions(Protocol):
    """The fields of the `policy` configuration section that shape the graph."""

    hidden_sizes: tuple[int, ...]
    activation: str
    torso_sharing: str
    log_std_init: float
    normalize_observations: bool
    observation_clip: float


class Encoder(nn.Cell):
    """Observation tensors -> one feature vector: normalisation, image scaling, CNN, concatenation.

    The statistics of normalised observations are Parameters (not trained): they are part of the
    graph wherever it runs.
    """

    def __init__(self, spec: PolicySpec, normalize: bool, clip: float) -> None:
        super().__init__()
        self.specs = spec.observations
        self.clip = clip
        self.normalize = normalize
        self.cnns = nn.CellList([CNN(o) for o in self.specs if o.is_image])
        means, inverse_stds = [], []
        for o in self.specs:
            if normalize and o.dtype != "uint8":
                zeros, ones = (
                    Tensor(np.zeros(o.size, np.float32)),
                    Tensor(np.ones(o.size, np.float32)),
                )
                means.append(
                    Parameter(zeros, name=f"normalizer.{o.name}.mean", requires_grad=False)
                )
                inverse_stds.append(
                    Parameter(ones, name=f"normalizer.{o.name}.inverse_std", requires_grad=False)
                )
        self.means, self.inverse_stds = ParameterTuple(means), ParameterTuple(inverse_stds)
        self.outputs = sum(o.size for o in self.specs if not o.is_image)
        self.outputs += sum(cnn.outputs for cnn in self.cnns)

    def weight_specs(self) -> list[WeightSpec]:
        images = [o.name for o in self.specs if o.is_image]
        return [s for name, cnn in zip(images, self.cnns) for s in cnn.weight_specs(f"cnn.{name}")]

    def construct(self, observations: Weights, weights: Weights) -> Tensor:
        features = []
        image, vector, used = 0, 0, 0
        for i in range(len(self.specs)):
            x = observations[i]
            if self.specs[i].is_image:
                n = 2 * len(self.cnns[image].layers) + 2
                features.append(self.cnns[image](x, weights[used : used + n]))
                image, used = image + 1, used + n
                continue
            x = x.reshape((-1, self.specs[i].size))
            if self.specs[i].dtype == "uint8":
                x = ops.cast(x, mstype.float32) * (1.0 / 255.0)
            elif self.normalize:
                x = (x - self.means[vector]) * self.inverse_stds[vector]
                x = ops.minimum(ops.maximum(x, -self.clip), self.clip)
                vector += 1
            features.append(x)
        if len(features) == 1:
            return features[0]
        return ops.concat(features, 1)


class Policy(nn.Cell):
    """Actor-critic graph: preprocessing, networks, distribution, action in environment units.

    construct(*observations [B, ...], noise [B, noise_size]) returns, in the order of
    `output_names`: action (environment units), log_prob [B], value [B], raw_action, and the
    distribution's parameters. Zero noise gives the deterministic policy.

    Args:
        spec: the environment's tensors.
        options: the `policy` configuration section.
        seed: of the initial weights.
    """

    def __init__(self, spec: PolicySpec, options: PolicyOptions, seed: int) -> None:
        # With a prefix the encoder's Parameters would be called encoder.normalizer.*.
        super().__init__(auto_prefix=False)
        self.spec = spec
        self.output_names = spec.output_names
        self.encoder = Encoder(spec, options.normalize_observations, options.observation_clip)
        self.torso = MLP(
            self.encoder.outputs, options.hidden_sizes, options.activation, self.members(options)
        )
        self.distribution: Distribution = make_distribution(spec.action, options.log_std_init)
        self.dense = Dense()
        groups = [
            self.encoder.weight_specs(),
            self.torso.weight_specs("torso"),
            dense_specs("actor", self.torso.outputs, self.distribution.head_size, gain=0.01),
            *self.value_specs(options),
            self.distribution.weight_specs(),
        ]
        self.weight_specs = [s for group in groups for s in group]
        self.ends = tuple(int(n) for n in np.cumsum([len(group) for group in groups]))
        rng = np.random.default_rng([seed, 0])
        self.weights = ParameterTuple(
            [Parameter(Tensor(s.initial(rng)), name=s.name) for s in self.weight_specs]
        )

    def members(self, options: PolicyOptions) -> int:
        """Number of torsos: one of actor and critic together, or one of each."""
        has_image = any(o.is_image for o in self.spec.observations)
        auto = options.torso_sharing == "auto" and has_image
        return 1 if auto or options.torso_sharing == "shared" else 2

    def value_specs(self, options: PolicyOptions) -> list[list[WeightSpec]]:
        """Weights that only the value needs, in groups."""
        return [dense_specs("critic", self.torso.outputs, 1, gain=1.0)]

    def forward(
        self, weights: Weights, observations: Weights, fixed_batch: bool = False
    ) -> tuple[Weights, Tensor]:
        """Distribution parameters and value [B]."""
        e = self.ends
        features = self.encoder(observations, weights[: e[0]])
        hidden = self.torso(features, weights[e[0] : e[1]], fixed_batch)
        head = self.dense(hidden[0], weights[e[1]], weights[e[1] + 1])
        value = self.dense(hidden[-1], weights[e[2]], weights[e[2] + 1])
        return self.distribution.parameters(head, weights[e[3] :]), value.reshape((-1,))

    def evaluate(
        self, weights: Weights, observations: Weights, raw_action: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability, entropy and value [B] as the loss uses them."""
        parameters, value = self.forward(weights, observations, True)
        log_prob, entropy = self.distribution.log_prob_entropy(parameters, raw_action)
        return log_prob, entropy, value

    def construct(self, *inputs: Tensor) -> Weights:
        observations, noise = inputs[:-1], inputs[-1]
        parameters, value = self.forward(self.weights, observations)
        raw, log_prob = self.distribution.sample_log_prob(parameters, noise)
        return (self.distribution.action(raw), log_prob, value, raw, *parameters)

    def arrays(self) -> dict[str, np.ndarray]:
        """Copies of every weight and normalisation statistic, by name."""
        return {p.name: p.asnumpy().copy() for p in self.get_parameters()}

    def load_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Set every weight and statistic.

        Raises:
            PolicyError: a name is missing or a shape differs.
        """
        for p in self.get_parameters():
            if p.name not in arrays:
                raise PolicyError(f"weight {p.name!r} is missing; the file is of another policy")
            value = arrays[p.name]
            if tuple(value.shape) != tuple(p.shape):
                raise PolicyError(
                    f"weight {p.name!r} has shape {tuple(value.shape)}, "
                    f"this policy needs {tuple(p.shape)}"
                )
        for p in self.get_parameters():
            set_parameter(p, arrays[p.name])

    def set_normalizer(self, name: str, mean: np.ndarray, variance: np.ndarray) -> None:
        """Put the running statistics of one observation (any shape of its size) into the graph."""
        parameters = {p.name: p for p in self.get_parameters()}
        inverse_std = 1.0 / np.sqrt(variance + 1e-8)
        set_parameter(parameters[f"normalizer.{name}.mean"], mean)
        set_parameter(parameters[f"normalizer.{name}.inverse_std"], inverse_std)


def critic_encoder_specs(encoder: Encoder) -> list[WeightSpec]:
    """Weights of the critics' encoder, which they share; none without images."""
    return [replace(s, name=f"critics.{s.name}") for s in encoder.weight_specs()]


class SquashedPolicy(Policy):
    """Actor whose critics value actions, as in SAC: squashed Gaussian actions.

    Its outputs have no value; where the specification asks for one, it is the smaller of the twin
    critics' values of the raw action taken.
    """

    def members(self, options: PolicyOptions) -> int:
        return 1

    def value_specs(self, options: PolicyOptions) -> list[list[WeightSpec]]:
        if not self.spec.has_value:
            return []
        inputs = self.encoder.outputs + self.spec.action.size
        self.critics = TwinCritics(inputs, options.hidden_sizes, options.activation)
        return [critic_encoder_specs(self.encoder), self.critics.weight_specs("critics")]

    def parameters(self, weights: Weights, observations: Weights) -> Weights:
        """Of the action distribution: mean and log_std [B, D]."""
        e = self.ends
        features = self.encoder(observations, weights[: e[0]])
        hidden = self.torso(features, weights[e[0] : e[1]])
        head = self.dense(hidden[0], weights[e[1]], weights[e[1] + 1])
        return self.distribution.parameters(head, ())

    def sample(
        self, weights: Weights, observations: Weights, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Raw actions [B, D] and their log-probabilities [B], as the loss uses them."""
        parameters = self.parameters(weights, observations)
        return self.distribution.sample_log_prob(parameters, noise)

    def construct(self, *inputs: Tensor) -> Weights:
        observations, noise = inputs[:-1], inputs[-1]
        parameters = self.parameters(self.weights, observations)
        raw, log_prob = self.distribution.sample_log_prob(parameters, noise)
        action = self.distribution.action(raw)
        if not self.spec.has_value:
            return (action, log_prob, raw, *parameters)
        e = self.ends
        features = self.encoder(observations, self.weights[e[2] : e[3]])
        value = self.critics(features, raw, self.weights[e[3] : e[4]])
        return (action, log_prob, value, raw, *parameters)
