"""Proximal policy optimisation, clipped (Schulman et al. 2017, arXiv:1707.06347, eq. 7 and 9)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from msrl_accel.algorithms.base import OnPolicyAlgorithm
from msrl_accel.config import Field, Section, TrainConfig
from msrl_accel.learner import FlatAdam, GradientWatch, adam_step_sizes, schedule
from msrl_accel.minibatches import Minibatches, make_minibatches, n_minibatches, standardize
from msrl_accel.networks import Weights, set_parameter
from msrl_accel.policy import Policy
from msrl_accel.spaces import PolicySpec
from msrl_accel.trajectories import Trajectories, gae


class PPOConfig(Section):
    """Hyperparameters; defaults are those of Schulman et al. and Huang et al. 2022."""

    n_steps: int = Field(2048, ge=1)
    """Steps each environment takes between updates."""
    batch_size: int = Field(64, ge=1)
    """Rows of a minibatch."""
    n_epochs: int = Field(10, ge=1)
    """Passes over the collected rows in one update."""
    learning_rate: float = Field(3e-4, gt=0)
    """Adam step size at the start."""
    learning_rate_schedule: str = Field("constant", choices=("constant", "linear"))
    """'linear' falls to 0 over the run."""
    adam_epsilon: float = Field(1e-5, gt=0)
    """Adam's denominator term."""
    gamma: float = Field(0.99, gt=0, le=1)
    """Discount."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """Decay of the advantage estimate's trace."""
    clip_range: float = Field(0.2, gt=0)
    """Half-width of the trust interval of the ratio pi / pi_old."""
    clip_range_schedule: str = Field("constant", choices=("constant", "linear"))
    """'linear' falls to 0 over the run."""
    value_clip_range: float | None = Field(None, gt=0)
    """Largest change of a value in one update; null leaves values unclipped."""
    ent_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    vf_coef: float = Field(0.5, ge=0)
    """Weight of the mean squared value error."""
    max_grad_norm: float = Field(0.5, gt=0)
    """Gradients of a larger norm are scaled down to it."""
    gradient_alarm: float = Field(1000.0, gt=1)
    """Gradients over this many times max_grad_norm are reported as exploding."""
    normalize_advantage: bool = Field(True)
    """Standardise advantages within each minibatch."""
    target_kl: float | None = Field(None, gt=0)
    """Stop an update once a minibatch's KL estimate exceeds 1.5 times this; null never does."""


class LossInputs(NamedTuple):
    """One minibatch, every field [B]."""

    old_log_prob: Tensor
    old_value: Tensor
    advantage: Tensor
    limit: Tensor
    """`surrogate_limit` of the advantages."""
    value_target: Tensor
    weight: Tensor
    """1 / rows on real rows, 0 on padding."""


def surrogate_limit(advantage: np.ndarray, clip_range: float) -> np.ndarray:
    """(1 + c) A where A > 0, (1 - c) A elsewhere: the limit in min(r A, limit).

    That equals min(r A, clip(r, 1 - c, 1 + c) A) of eq. 7 with fewer operators (Achiam 2018,
    "Simplified PPO-Clip Objective").
    """
    limit: np.ndarray = advantage * np.where(advantage > 0, 1 + clip_range, 1 - clip_range)
    return limit.astype(advantage.dtype)


def ppo_loss(log_prob, entropy, value, inputs, value_clip, ent_coef, vf_coef):  # type: ignore[no-untyped-def]
    """Scalar loss: mean of  -min(r A, clip(r, 1 - c, 1 + c) A) + vf (V - R)^2 - ent H.

    r = exp(log_prob - old_log_prob). With a value clip, the squared error is the larger of the
    plain one and that of V_old + clip(V - V_old).
    """
    old_log_prob, old_value, advantage, limit, value_target, weight = inputs
    ratio = ops.exp(log_prob - old_log_prob)
    policy_loss = -ops.minimum(ratio * advantage, limit)
    value_loss = ops.square(value - value_target)
    if value_clip is not None:
        change = ops.minimum(ops.maximum(value - old_value, -value_clip), value_clip)
        value_loss = ops.maximum(value_loss, ops.square(old_value + change - value_target))
    return ((policy_loss + vf_coef * value_loss - ent_coef * entropy) * weight).sum()


class PPOLoss(nn.Cell):
    """`ppo_loss` with its gradient in closed form: a third of the operators of the derived one.

    The loss is the root of what is differentiated: its own incoming gradient is 1.
    """

    def __init__(self, config: PPOConfig) -> None:
        super().__init__()
        self.value_clip = config.value_clip_range
        self.ent_coef = config.ent_coef
        self.vf_coef = config.vf_coef

    def construct(self, log_prob, entropy, value, inputs):  # type: ignore[no-untyped-def]
        return ppo_loss(
            log_prob, entropy, value, inputs, self.value_clip, self.ent_coef, self.vf_coef
        )

    def bprop(self, log_prob, entropy, value, inputs, out, dout):  # type: ignore[no-untyped-def]
        old_log_prob, old_value, advantage, limit, value_target, weight = inputs
        surrogate = ops.exp(log_prob - old_log_prob) * advantage
        zero = ops.zeros_like(weight)
        # The gradient flows only where the plain term is the smaller.
        d_log_prob = ops.select(surrogate <= limit, -surrogate, zero) * weight
        error = value - value_target
        if self.value_clip is not None:
            difference = value - old_value
            change = ops.minimum(ops.maximum(difference, -self.value_clip), self.value_clip)
            clipped_error = old_value + change - value_target
            # No gradient where the clip is the larger loss. Within the clip both are the same but
            # for rounding, which must not decide.
            plain = ops.square(error) >= ops.square(clipped_error)
            plain = ops.logical_or(plain, change == difference)
            error = error * ops.cast(plain, mstype.float32)
        d_value = (2.0 * self.vf_coef) * error * weight
        d_entropy = -self.ent_coef * weight
        return d_log_prob, d_entropy, d_value, (zero, zero, zero, zero, zero, zero)


class PPOUpdate(nn.Cell):
    """All epochs and minibatches of one iteration, in one graph.

    construct(raw_actions, rows [I, B], scalars [I, 6, B], step_sizes [I], epsilons [I], count,
    *observations) returns the number of minibatches run; what each saw is in `records`
    [I, 3, B] (log-probability, entropy, value) and `norms` [I] (of gradients). The observations are
    arguments of their own because a tuple of tensors would compile anew at every call.
    """

    def __init__(self, policy: Policy, config: PPOConfig, capacity: int) -> None:
        super().__init__(auto_prefix=False)
        self.policy = policy
        self.loss = PPOLoss(config)
        self.optimizer = FlatAdam(policy.weights, config.max_grad_norm)
        self.grad = ops.value_and_grad(self.forward, 0, None, has_aux=True)
        batch = config.batch_size
        self.records = Parameter(
            Tensor(np.zeros((capacity, 3, batch), np.float32)), "records", requires_grad=False
        )
        self.norms = Parameter(Tensor(np.zeros(capacity, np.float32)), "norms", requires_grad=False)
        self.batch = batch
        self.kl_limit = None if config.target_kl is None else 1.5 * config.target_kl
        self.write = ops.ScatterUpdate()
        self.take = ops.Gather()
        self.split_scalars = ops.Split(0, len(LossInputs._fields))

    def forward(self, weights, observations, raw_action, inputs):  # type: ignore[no-untyped-def]
        log_prob, entropy, value = self.policy.evaluate(weights, observations, raw_action)
        if not self.loss.ent_coef:
            entropy = ops.stop_gradient(entropy)  # reported only: no operators for its gradient
        loss = self.loss(log_prob, entropy, value, inputs)
        return loss, ops.stack((log_prob, entropy, value), 0)

    def minibatch(self, observations, raw_actions, rows, scalars):  # type: ignore[no-untyped-def]
        """Gradients of one minibatch, its loss inputs and [3, B] record."""
        inputs: Weights = ()
        for row in self.split_scalars(scalars):
            inputs = (*inputs, row.reshape((self.batch,)))
        picked: Weights = ()
        for observation in observations:
            picked = (*picked, self.take(observation, rows, 0))
        raw_action = self.take(raw_actions, rows, 0)
        (_, record), gradients = self.grad(self.optimizer.split(), picked, raw_action, inputs)
        return gradients, inputs, record

    def construct(  # type: ignore[no-untyped-def]
        self, raw_actions, rows, scalars, step_sizes, epsilons, count, *observations
    ):
        self.optimizer.gather()
        i = Tensor(0, mstype.int32)
        kl = Tensor(0.0, mstype.float32)
        while i < count:
            gradients, inputs, record = self.minibatch(
                observations,
                raw_actions,
                self.take(rows, i, 0),
                self.take(scalars, i, 0),
            )
            norm = self.optimizer(gradients, self.take(step_sizes, i, 0), self.take(epsilons, i, 0))
            self.write(self.records, i, record)
            self.write(self.norms, i, norm)
            i = i + 1
            if self.kl_limit is not None:
                log_ratio = record[0] - inputs[0]
                kl = ((ops.exp(log_ratio) - 1.0 - log_ratio) * inputs[-1]).sum()
                count = ops.select(kl > self.kl_limit, i, count)
        self.optimizer.scatter()
        return i


class PPO(OnPolicyAlgorithm):
    """PPO with generalised advantage estimation."""

    Config = PPOConfig

    def __init__(self, config: TrainConfig, spec: PolicySpec) -> None:
        assert isinstance(config.algorithm, PPOConfig)
        self.config: PPOConfig = config.algorithm
        self.n_steps = self.config.n_steps
        self.policy = self.build_policy(config, spec)
        n_rows = self.n_steps * config.n_envs
        # A minibatch larger than the whole batch would only add padding.
        self.config = self.config.replace(batch_size=min(self.config.batch_size, n_rows))
        capacity = n_minibatches(n_rows, self.config.batch_size, self.config.n_epochs)
        self.graph = PPOUpdate(self.policy, self.config, capacity)
        self.watch = GradientWatch(self.config.max_grad_norm, self.config.gradient_alarm)
        self.adam_steps = 0

    def update(
        self, trajectories: Trajectories, progress: float, rng: np.random.Generator
    ) -> dict[str, float]:
        c, t = self.config, trajectories
        learning_rate = schedule(c.learning_rate_schedule, c.learning_rate, progress)
        clip_range = schedule(c.clip_range_schedule, c.clip_range, progress)
        advantages = gae(
            t.rewards,
            t.values,
            t.next_values,
            t.terminated,
            t.truncated,
            c.gamma,
            c.gae_lambda,
        ).reshape(-1)
        batches = make_minibatches(rng, t.valid.reshape(-1), c.batch_size, c.n_epochs)
        inputs = self._loss_inputs(t, advantages, batches, clip_range)
        step_sizes, epsilons = adam_step_sizes(
            learning_rate, c.adam_epsilon, self.adam_steps, len(batches.rows)
        )
        done = self.graph(
            Tensor.from_numpy(_rows(t.raw_actions)),
            Tensor.from_numpy(batches.rows),
            Tensor.from_numpy(np.stack(inputs, axis=1)),
            Tensor.from_numpy(step_sizes),
            Tensor.from_numpy(epsilons),
            Tensor(batches.count, mstype.int32),
            *(Tensor.from_numpy(_rows(x)) for x in t.observations),
        )
        n = int(done.asnumpy())
        self.adam_steps += n
        records = self.graph.records.asnumpy()[:n]
        norms = self.graph.norms.asnumpy()[:n]
        return {
            "learning_rate": learning_rate,
            "clip_range": clip_range,
            **ppo_metrics(records, LossInputs(*(x[:n] for x in inputs)), clip_range),
            "explained_variance": explained_variance(t, advantages),
            "updates": float(self.adam_steps),
            "early_stop": float(n < batches.count),
            **self.watch.update(norms),
        }

    def _loss_inputs(
        self, t: Trajectories, advantages: np.ndarray, batches: Minibatches, clip_range: float
    ) -> LossInputs:
        """What the loss needs of each minibatch's rows, [I, B] each."""
        values = t.values.reshape(-1)
        advantage = advantages[batches.rows]
        if self.config.normalize_advantage:
            advantage = standardize(advantages, batches)
        return LossInputs(
            old_log_prob=t.log_probs.reshape(-1)[batches.rows],
            old_value=values[batches.rows],
            advantage=advantage,
            limit=surrogate_limit(advantage, clip_range),
            value_target=(values + advantages)[batches.rows],
            weight=batches.weights,
        )

    def state(self) -> dict[str, Any]:
        optimizer = self.graph.optimizer
        return {
            "moment1": optimizer.moment1.asnumpy().copy(),
            "moment2": optimizer.moment2.asnumpy().copy(),
            "adam_steps": self.adam_steps,
            "watch": self.watch.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        set_parameter(self.graph.optimizer.moment1, state["moment1"])
        set_parameter(self.graph.optimizer.moment2, state["moment2"])
        self.adam_steps = int(state["adam_steps"])
        self.watch.restore(state["watch"])


def _rows(array: np.ndarray) -> np.ndarray:
    """[T, N, ...] -> [T * N, ...]."""
    return array.reshape((-1, *array.shape[2:]))


def ppo_metrics(records: np.ndarray, inputs: LossInputs, clip_range: float) -> dict[str, float]:
    """Means over the minibatches run of what each saw before its step.

    Args:
        records: log-probability, entropy, value; [I, 3, B].
        inputs: as the loss had them, [I, B] each.

    approx_kl = mean((r - 1) - log r) (Schulman 2020). ratio_error is max |r - 1| over the first
    minibatch, before any step: 0 when the rollout and the training graph agree.
    """
    log_prob, entropy, value = records[:, 0], records[:, 1], records[:, 2]
    log_ratio = log_prob - inputs.old_log_prob
    ratio = np.exp(log_ratio)
    surrogate = np.minimum(ratio * inputs.advantage, inputs.limit)

    def mean(x: np.ndarray) -> float:
        return float((x * inputs.weight).sum(axis=1).mean())

    return {
        "policy_loss": mean(-surrogate),
        "value_loss": mean((value - inputs.value_target) ** 2),
        "entropy": mean(entropy),
        "approx_kl": mean(ratio - 1 - log_ratio),
        "clip_fraction": mean(np.abs(ratio - 1) > clip_range),
        "ratio_error": float(np.abs(ratio[0] - 1)[inputs.weight[0] > 0].max()),
    }


def explained_variance(t: Trajectories, advantages: np.ndarray) -> float:
    """1 - Var(target - V) / Var(target) over the valid rows; NaN where the targets are constant."""
    valid = t.valid.reshape(-1)
    residual = advantages[valid]
    variance = float(np.var(residual + t.values.reshape(-1)[valid]))
    return 1.0 - float(np.var(residual)) / variance if variance > 0 else float("nan")
