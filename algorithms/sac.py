"""Soft actor-critic with adaptive temperature (Haarnoja et al. 2018, arXiv:1812.05905)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype

from msrl_accel.algorithms.base import OffPolicyAlgorithm, OffPolicyConfig
from msrl_accel.config import Field, TrainConfig
from msrl_accel.critics import FoldedCritics, TwinCritics, check_hidden_sizes, fold, unfold
from msrl_accel.distributions import LARGEST
from msrl_accel.errors import SpaceError, TrainingError
from msrl_accel.learner import BETA1, BETA2, adam_step_sizes, schedule
from msrl_accel.networks import Weights, set_parameter
from msrl_accel.policy import Policy, SquashedPolicy, critic_encoder_specs
from msrl_accel.spaces import PolicySpec

if TYPE_CHECKING:
    from msrl_accel.replay import ReplayBatch


class SACConfig(OffPolicyConfig):
    """Hyperparameters; defaults are those of Haarnoja et al. 2018, table 1."""

    run_defaults = {  # noqa: RUF012
        "policy": {"hidden_sizes": [256, 256], "activation": "relu"},
        "runtime": {"threads": 2},
    }

    learning_rate: float = Field(3e-4, gt=0)
    """Adam step size of actor, critics and temperature at the start."""
    learning_rate_schedule: str = Field("constant", choices=("constant", "linear"))
    """'linear' falls to 0 over the run."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """Adam's denominator term."""
    tau: float = Field(0.005, gt=0, le=1)
    """Share of the critics that moves into the target critics with each step."""
    temperature: float | None = Field(None, gt=0)
    """Weight of the entropy; null adapts it to `target_entropy`."""
    initial_temperature: float = Field(1.0, gt=0)
    """Where an adapted temperature starts."""
    target_entropy: float | None = Field(None)
    """Entropy that the temperature is adapted to; null is minus the number of action components."""


class SquaredErrors(nn.Cell):
    """q [2, 1, B], y and weight [1, 1, B] -> sum of weight (q - y)^2 / 2 over members and rows.

    The gradient is in closed form. The loss is the root of what is differentiated: its own incoming
    gradient is 1.
    """

    def construct(self, q: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        error = q - y
        return 0.5 * (error * error * weight).sum()

    def bprop(self, q, y, weight, out, dout):  # type: ignore[no-untyped-def]
        return (q - y) * weight, ops.zeros_like(y), ops.zeros_like(weight)


class ActorLoss(nn.Cell):
    """q [2, 1, B], log_prob [B], alpha [1] -> mean of alpha log pi - min(Q1, Q2), eq. 9.

    The gradient is in closed form, and 0 for alpha; the loss is the root of what is differentiated.
    """

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.shares = Tensor(np.full(batch, 1.0 / batch, np.float32))
        self.minus = Tensor(np.full((1, 1, batch), -1.0 / batch, np.float32))
        self.none = Tensor(np.zeros((1, 1, batch), np.float32))
        self.split, self.concat, self.select = ops.Split(0, 2), ops.Concat(0), ops.Select()

    def construct(self, q: Tensor, log_prob: Tensor, alpha: Tensor) -> Tensor:
        return (self.shares * (alpha * log_prob - q.min(axis=0).reshape((-1,)))).sum()

    def bprop(self, q, log_prob, alpha, out, dout):  # type: ignore[no-untyped-def]
        first, second = self.split(q)
        first_is_smaller = first <= second
        d_first = self.select(first_is_smaller, self.minus, self.none)
        d_second = self.select(first_is_smaller, self.none, self.minus)
        return self.concat((d_first, d_second)), self.shares * alpha, ops.zeros_like(alpha)


class SACUpdate(nn.Cell):
    """All gradient steps of one update, in one graph.

    construct(actions [k, B, D], rewards, discounts, weights [k, 1, 1, B] (importance / B), noise,
    next_noise [k, B, D], step_sizes [k], epsilons [k], *observations [k, B, ...],
    *next_observations); for k = 1 all of them without the first axis, which needs no loop. What
    each step saw is in `records` [k, 6, B]: both Q, their target, log pi(a|s) of new actions a in
    s, and both Q of them.

    Every weight has an Adam of its own: one vector of all, as PPO has, would be split and joined at
    a cost above that of the steps.
    """

    def __init__(self, policy: SquashedPolicy, config: SACConfig, seed: int, steps: int) -> None:
        super().__init__(auto_prefix=False)
        # MindSpore's name for graphs that get arguments of the same shapes at every call: it does
        # not look for another compiled graph then, which takes half a millisecond.
        self.phase = "increment"
        self.policy, self.steps, self.batch = policy, steps, config.batch_size
        self.n_observations = len(policy.spec.observations)
        size = policy.spec.action.size
        activation = "relu" if policy.torso.is_relu else "tanh"
        shape = (policy.encoder.outputs, size, policy.torso.widths[1:], activation)
        self.critics = FoldedCritics(*shape, self.batch)
        plain = TwinCritics(shape[0] + size, *shape[2:])
        rng = np.random.default_rng([seed, 1])
        encoder = [s.initial(rng) for s in critic_encoder_specs(policy.encoder)]
        initial = encoder + fold(
            [s.initial(rng) for s in plain.weight_specs("critics")], activation
        )
        self.n_encoder = len(encoder)
        self.critic_weights = _parameters("critic", initial)
        self.target_weights = _parameters("target", initial)
        self.adaptive = config.temperature is None
        start = config.initial_temperature if config.temperature is None else config.temperature
        self.log_alpha = Parameter(Tensor(np.log([start]).astype(np.float32)), name="log_alpha")
        entropy = -size if config.target_entropy is None else config.target_entropy
        self.target_entropy = Tensor(np.full(1, entropy, np.float32))
        trained = [*policy.weights, *self.critic_weights, self.log_alpha]
        self.moments1 = _parameters("moment1", [np.zeros(p.shape) for p in trained])
        self.moments2 = _parameters("moment2", [np.zeros(p.shape) for p in trained])
        self.records = Parameter(
            Tensor(np.zeros((steps, 6, self.batch), np.float32)), name="records"
        )

        self.squared_errors, self.actor_objective = SquaredErrors(), ActorLoss(self.batch)
        self.critic_grad = ops.grad(self.critic_loss, 0, None, has_aux=True)
        self.actor_grad = ops.grad(self.actor_loss, 0, None, has_aux=True)
        self.adam, self.lower = ops.Adam(), ops.ApplyGradientDescent()
        self.zero = Tensor(0.0, mstype.float32)
        self.beta1, self.beta2 = Tensor(BETA1, mstype.float32), Tensor(BETA2, mstype.float32)
        self.tau = Tensor(config.tau, mstype.float32)
        self.minus_mean = Tensor(np.full((1, self.batch), -1.0 / self.batch, np.float32))
        self.take, self.write, self.matmul = ops.Gather(), ops.ScatterUpdate(), ops.MatMul()
        self.split, self.concat = ops.Split(0, 2), ops.Concat(0)

    def q(self, weights, observations, raw_action):  # type: ignore[no-untyped-def]
        """Q of both members [2, 1, B]."""
        features = self.policy.encoder(observations, weights[: self.n_encoder])
        return self.critics(features, raw_action, weights[self.n_encoder :])[0]

    def critic_loss(self, weights, observations, actions, y, importance):  # type: ignore[no-untyped-def]
        q = self.q(weights, observations, actions)
        return self.squared_errors(q, y, importance), q

    def actor_loss(self, weights, critic_weights, observations, noise, alpha):  # type: ignore[no-untyped-def]
        action, log_prob = self.policy.sample(weights, observations, noise)
        q = self.q(critic_weights, observations, action)
        return self.actor_objective(q, log_prob, alpha), q, log_prob

    def loaded(self, parameters):  # type: ignore[no-untyped-def]
        """Values of Parameters as they are now; each use of a Parameter would copy it anew."""
        values: Weights = ()
        for parameter in parameters:
            values = (*values, ops.stop_gradient(parameter))
        return values

    def descend(self, parameters, loaded, first, gradients, step_size, epsilon):  # type: ignore[no-untyped-def]
        """An Adam step on each; their moments begin at `first`. Returns the new values.

        `loaded` is the memory that the step changes, so it holds them once the step is done: to
        load them again would copy them before and after it.
        """
        values: Weights = ()
        for i in range(len(parameters)):
            updated = self.adam(
                parameters[i],
                self.moments1[first + i],
                self.moments2[first + i],
                self.zero,
                self.zero,
                step_size,
                self.beta1,
                self.beta2,
                epsilon,
                gradients[i],
            )
            values = (*values, ops.depend(loaded[i], updated))
        return values

    def step(self, i, inputs):  # type: ignore[no-untyped-def]
        """One gradient step of critics, actor and temperature, then of the target critics."""
        actions, rewards, discounts, importance, noise, next_noise, step_size, epsilon = inputs[:8]
        n = self.n_observations
        observations, next_observations = inputs[8 : 8 + n], inputs[8 + n :]
        actor_weights = self.loaded(self.policy.weights)
        target_weights = self.loaded(self.target_weights)
        # The temperature before its own step, in all losses.
        alpha = ops.exp(self.log_alpha)

        # y = r + discount (min Q'(s', a') - alpha log pi(a'|s')), a' ~ pi(.|s')
        next_action, next_log_prob = self.policy.sample(
            actor_weights, next_observations, next_noise
        )
        first, second = self.split(self.q(target_weights, next_observations, next_action))
        entropy_bonus = alpha * next_log_prob.reshape((1, 1, self.batch))
        y = rewards + discounts * (ops.minimum(first, second) - entropy_bonus)

        critic_weights = self.loaded(self.critic_weights)
        gradients, (q,) = self.critic_grad(critic_weights, observations, actions, y, importance)
        critic_weights = self.descend(
            self.critic_weights, critic_weights, len(actor_weights), gradients, step_size, epsilon
        )
        gradients, (q_new, log_prob) = self.actor_grad(
            actor_weights, critic_weights, observations, noise, alpha
        )
        self.descend(self.policy.weights, actor_weights, 0, gradients, step_size, epsilon)
        if self.adaptive:
            # d/d log_alpha of -log_alpha (log pi + target entropy)
            entropy = self.matmul(self.minus_mean, log_prob.reshape((-1, 1))).reshape((1,))
            gradient = entropy - self.target_entropy
            last = len(self.moments1) - 1
            self.descend((self.log_alpha,), (alpha,), last, (gradient,), step_size, epsilon)
        for j in range(len(target_weights)):
            difference = target_weights[j] - critic_weights[j]
            self.lower(self.target_weights[j], self.tau, difference)
        rows = (q, y, log_prob.reshape((1, 1, self.batch)), q_new)
        self.write(self.records, i, self.concat(rows).reshape((6, self.batch)))
        return i

    def construct(self, *inputs):  # type: ignore[no-untyped-def]
        i = Tensor(0, mstype.int32)
        if self.steps == 1:
            return self.step(i, inputs)
        while i < self.steps:
            picked: Weights = ()
            for tensor in inputs:
                picked = (*picked, self.take(tensor, i, 0))
            self.step(i, picked)
            i = i + 1
        return i


def _parameters(name: str, arrays: list[np.ndarray]) -> ParameterTuple:
    return ParameterTuple(
        [
            Parameter(Tensor(np.array(array, np.float32)), name=f"{name}.{i}", requires_grad=False)
            for i, array in enumerate(arrays)
        ]
    )


class SAC(OffPolicyAlgorithm):
    """SAC on bounded continuous actions, which the replay holds in [-1, 1]."""

    Config = SACConfig

    def __init__(self, config: TrainConfig, spec: PolicySpec) -> None:
        assert isinstance(config.algorithm, SACConfig)
        self.config: SACConfig = config.algorithm
        self.policy: SquashedPolicy = self.build_policy(config, spec)
        steps = self.config.steps_per_call(config.n_envs)
        self.graph = SACUpdate(self.policy, self.config, config.seed, steps)
        self.rng = np.random.default_rng([config.seed, 2])
        self.steps = 0

    @classmethod
    def build_policy(cls, config: TrainConfig, spec: PolicySpec) -> SquashedPolicy:
        """The actor; with critics where `spec` is of an exported actor that has them."""
        action = spec.action
        if action.kind != "continuous":
            raise SpaceError(f"sac needs a Box action space, this one is {action.kind}; use ppo")
        if not np.all(np.abs([action.low, action.high]) < LARGEST):
            raise SpaceError(
                f"sac needs an action space with bounds, this one is Box({list(action.low)}, "
                f"{list(action.high)}); use gymnasium.wrappers.RescaleAction, or ppo"
            )
        check_hidden_sizes(config.policy.hidden_sizes)
        if not action.squashed:
            spec = replace(spec, action=replace(action, squashed=True), has_value=False)
        return SquashedPolicy(spec, config.policy, config.seed)

    @classmethod
    def with_critic(cls, config: TrainConfig, policy: Policy, state: dict[str, Any]) -> Policy:
        valued = cls.build_policy(config, replace(policy.spec, has_value=True))
        folded = [state["critics"][str(i)] for i in range(len(state["critics"]))]
        n_encoder = len(critic_encoder_specs(valued.encoder))
        arrays = [*folded[:n_encoder], *unfold(folded[n_encoder:])]
        names = [s.name for s in valued.weight_specs if s.name.startswith("critics.")]
        valued.load_arrays({**policy.arrays(), **dict(zip(names, arrays))})
        return valued

    def update(self, batch: ReplayBatch, progress: float) -> tuple[dict[str, float], np.ndarray]:
        c = self.config
        k, b = batch.rewards.shape
        learning_rate = schedule(c.learning_rate_schedule, c.learning_rate, progress)
        step_sizes, epsilons = adam_step_sizes(learning_rate, c.adam_epsilon, self.steps, k)
        columns = (batch.rewards, batch.discounts, batch.weights / np.float32(b))
        noise = self.rng.standard_normal((2, *batch.actions.shape), np.float32)
        inputs = (
            batch.actions,
            *(x.reshape((k, 1, 1, b)) for x in columns),
            *noise,
            step_sizes,
            epsilons,
            *self.policy.spec.cast(batch.observations),
            *self.policy.spec.cast(batch.next_observations),
        )
        if k == 1:
            inputs = tuple(x.reshape(x.shape[1:]) for x in inputs)
        alpha = float(np.exp(self.graph.log_alpha.asnumpy()[0]))
        self.graph(*map(Tensor.from_numpy, inputs))
        self.steps += k
        metrics, errors = sac_metrics(self.graph.records.asnumpy(), batch.weights, alpha)
        if not np.isfinite(metrics["critic_loss"]):
            raise TrainingError(
                f"sac diverged at gradient step {self.steps}: Q is not finite; lower "
                f"sac.learning_rate = {c.learning_rate:g}, or scale the rewards down"
            )
        metrics.update(learning_rate=learning_rate, temperature=alpha, updates=float(self.steps))
        return metrics, errors

    def state(self) -> dict[str, Any]:
        graph = self.graph
        return {
            "critics": _arrays(graph.critic_weights),
            "targets": _arrays(graph.target_weights),
            "moments1": _arrays(graph.moments1),
            "moments2": _arrays(graph.moments2),
            "log_alpha": graph.log_alpha.asnumpy().copy(),
            "steps": self.steps,
            "rng": self.rng.bit_generator.state,
        }

    def restore(self, state: dict[str, Any]) -> None:
        graph = self.graph
        for name, parameters in (
            ("critics", graph.critic_weights),
            ("targets", graph.target_weights),
            ("moments1", graph.moments1),
            ("moments2", graph.moments2),
        ):
            for i, parameter in enumerate(parameters):
                set_parameter(parameter, state[name][str(i)])
        set_parameter(graph.log_alpha, state["log_alpha"])
        self.steps = int(state["steps"])
        self.rng.bit_generator.state = state["rng"]


def _arrays(parameters: ParameterTuple) -> dict[str, np.ndarray]:
    return {str(i): p.asnumpy().copy() for i, p in enumerate(parameters)}


def sac_metrics(
    records: np.ndarray, weights: np.ndarray, alpha: float
) -> tuple[dict[str, float], np.ndarray]:
    """Means over the steps of what each saw, and the mean |Q - y| of both critics [k, B].

    Args:
        records: as `SACUpdate` leaves them, [k, 6, B].
        weights: importance weights [k, B].
        alpha: the temperature.
    """
    q, y, log_prob, q_new = records[:, :2], records[:, 2:3], records[:, 3], records[:, 4:]
    error = q - y
    metrics = {
        "critic_loss": float(0.5 * (error**2 * weights[:, None]).sum(axis=1).mean()),
        "actor_loss": float((alpha * log_prob - q_new.min(axis=1)).mean()),
        "q_mean": float(q.mean()),
        "entropy": float(-log_prob.mean()),
    }
    return metrics, np.abs(error).mean(axis=1)
