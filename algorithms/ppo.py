"""Proximal policy optimisation, clipped (Schulman et al. 2017, arXiv:1707.06347, eq. 7 and 9)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from msrl_accel.algorithms.base import OnPolicyAlgorithm
from msrl_accel.algorithms.on_policy import (
    MinibatchGraph,
    MinibatchUpdate,
    PolicyEvaluator,
    behaviour_metrics,
    explained_variance,
)
from msrl_accel.config import Field, Section, TrainConfig
from msrl_accel.graph_cache import GraphCache
from msrl_accel.learner import schedule
from msrl_accel.minibatches import Minibatches, make_minibatches, n_minibatches, standardize
from msrl_accel.spaces import PolicySpec
from msrl_accel.trajectories import Trajectories, gae, vtrace


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
    objective: str = Field("clipped", choices=("clipped", "decoupled", "vtrace"))
    """How steps of older policies are corrected for: not at all; by importance weights around the
    policy at the start of the update; by V-trace."""
    importance_cap: float = Field(5.0, ge=1)
    """Largest importance weight of the decoupled objective."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of a penalty on the KL from the policy that the ratio is taken to."""


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


def ppo_loss(log_prob, entropy, value, inputs, value_clip, ent_coef, vf_coef, kl_coef):  # type: ignore[no-untyped-def]
    """Scalar loss: mean of  -min(r A, clip(r, 1 - c, 1 + c) A) + vf (V - R)^2 - ent H + kl K.

    r = exp(log_prob - old_log_prob). With a value clip, the squared error is the larger of the
    plain one and that of V_old + clip(V - V_old). K = r - 1 - log r estimates KL(pi_old, pi) on
    actions of pi_old (Schulman 2020), with an unbiased gradient.
    """
    old_log_prob, old_value, advantage, limit, value_target, weight = inputs
    ratio = ops.exp(log_prob - old_log_prob)
    policy_loss = -ops.minimum(ratio * advantage, limit)
    value_loss = ops.square(value - value_target)
    if value_clip is not None:
        change = ops.minimum(ops.maximum(value - old_value, -value_clip), value_clip)
        value_loss = ops.maximum(value_loss, ops.square(old_value + change - value_target))
    loss = policy_loss + vf_coef * value_loss - ent_coef * entropy
    if kl_coef:
        loss = loss + kl_coef * (ratio - 1.0 - (log_prob - old_log_prob))
    return (loss * weight).sum()


class PPOLoss(nn.Cell):
    """`ppo_loss` with its gradient in closed form: a third of the operators of the derived one.

    The loss is the root of what is differentiated: its own incoming gradient is 1.
    """

    n_inputs = len(LossInputs._fields)

    def __init__(self, config: PPOConfig) -> None:
        super().__init__()
        self.value_clip = config.value_clip_range
        self.ent_coef = config.ent_coef
        self.vf_coef = config.vf_coef
        self.kl_coef = config.kl_coef

    def construct(self, log_prob, entropy, value, inputs):  # type: ignore[no-untyped-def]
        return ppo_loss(
            log_prob,
            entropy,
            value,
            inputs,
            self.value_clip,
            self.ent_coef,
            self.vf_coef,
            self.kl_coef,
        )

    def bprop(self, log_prob, entropy, value, inputs, out, dout):  # type: ignore[no-untyped-def]
        old_log_prob, old_value, advantage, limit, value_target, weight = inputs
        ratio = ops.exp(log_prob - old_log_prob)
        surrogate = ratio * advantage
        zero = ops.zeros_like(weight)
        # The gradient flows only where the plain term is the smaller.
        d_log_prob = ops.select(surrogate <= limit, -surrogate, zero)
        if self.kl_coef:
            d_log_prob = d_log_prob + self.kl_coef * (ratio - 1.0)
        d_log_prob = d_log_prob * weight
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


def importance_weights(
    proximal_log_prob: np.ndarray, behaviour_log_prob: np.ndarray, cap: float
) -> np.ndarray:
    """min(pi_prox / mu, cap): what a step of policy mu counts in the update of pi_prox.

    With it the decoupled objective (Hilton et al. 2022, arXiv:2110.00641, eq. 3; Fu et al. 2025,
    arXiv:2505.24298) is  (pi_prox / mu) min(r A, clip(r, 1 - c, 1 + c) A)  with r = pi / pi_prox.
    A weight w >= 0 may go into the minimum, so that is `ppo_loss` with A w for A and pi_prox for
    pi_old.
    """
    log_ratio = np.minimum(proximal_log_prob - behaviour_log_prob, np.log(cap))
    weights: np.ndarray = np.exp(log_ratio).astype(np.float32)
    return weights


class PPO(OnPolicyAlgorithm):
    """PPO with generalised advantage estimation."""

    Config = PPOConfig

    def __init__(self, config: TrainConfig, spec: PolicySpec) -> None:
        assert isinstance(config.algorithm, PPOConfig)
        c = config.algorithm
        self.n_steps = c.n_steps
        n_rows = self.n_steps * config.n_envs
        # A minibatch larger than the whole batch would only add padding.
        self.config = c = c.replace(batch_size=min(c.batch_size, n_rows))
        self.policy = self.build_policy(config, spec)
        graph = MinibatchGraph(
            self.policy,
            PPOLoss(c),
            c.batch_size,
            n_minibatches(n_rows, c.batch_size, c.n_epochs),
            c.max_grad_norm,
            None if c.target_kl is None else 1.5 * c.target_kl,
        )
        self.minibatches = MinibatchUpdate(
            graph, c.adam_epsilon, c.gradient_alarm, GraphCache(config, spec)
        )
        self.evaluate = PolicyEvaluator(self.policy)

    def update(
        self,
        trajectories: Trajectories,
        progress: float,
        rng: np.random.Generator,
        *,
        sample_weights: np.ndarray | None = None,
        learning_rate_scale: float = 1.0,
    ) -> dict[str, float]:
        c = self.config
        learning_rate = schedule(c.learning_rate_schedule, c.learning_rate, progress)
        learning_rate *= learning_rate_scale
        clip_range = schedule(c.clip_range_schedule, c.clip_range, progress)
        t, advantages, importance, metrics = self._estimate(trajectories)
        row_weights = None if sample_weights is None else sample_weights.reshape(-1)
        batches = make_minibatches(rng, t.valid.reshape(-1), c.batch_size, c.n_epochs, row_weights)
        inputs = self._loss_inputs(t, advantages, importance, batches, clip_range)
        records, updated = self.minibatches.run(t, batches, inputs, learning_rate)
        seen = LossInputs(*(x[: len(records)] for x in inputs))
        return {
            "learning_rate": learning_rate,
            "clip_range": clip_range,
            **ppo_metrics(records, seen, clip_range),
            **metrics,
            "explained_variance": explained_variance(t, advantages),
            **updated,
        }

    def look(self, trajectories: Trajectories) -> tuple[np.ndarray, np.ndarray]:
        c, t = self.config, trajectories
        if c.objective != "clipped":
            return self.evaluate(t)
        # One pass of the update's own graph, which is compiled in any case.
        rng = np.random.default_rng(0)
        batches = make_minibatches(rng, t.valid.reshape(-1), c.batch_size, c.n_epochs)
        first = replace(batches, count=batches.count // c.n_epochs)
        nothing = np.zeros(t.valid.size, np.float32)
        return self.minibatches.look(
            t, first, self._loss_inputs(t, nothing, None, first, c.clip_range)
        )

    def _estimate(
        self, t: Trajectories
    ) -> tuple[Trajectories, np.ndarray, np.ndarray | None, dict[str, float]]:
        """Trajectories with the log-probabilities and values the update starts from; advantages
        [T * N]; importance weights [T * N], or None where there are none; metrics of these.
        """
        c = self.config
        if c.objective == "clipped":
            return t, self._gae(t).reshape(-1), None, {}
        behaviour = t.log_probs
        log_probs, values = self.evaluate(t)
        t = replace(t.with_values(values), log_probs=log_probs)
        metrics = behaviour_metrics(log_probs - behaviour, t.valid)
        if c.objective == "vtrace":
            corrections, _ = vtrace(
                t.rewards,
                t.values,
                t.next_values,
                log_probs - behaviour,
                t.terminated,
                t.truncated,
                t.valid,
                c.gamma,
                trace_lambda=c.gae_lambda,
            )
            return t, corrections.reshape(-1), None, metrics
        importance = importance_weights(log_probs, behaviour, c.importance_cap)
        return t, self._gae(t).reshape(-1), importance.reshape(-1), metrics

    def _gae(self, t: Trajectories) -> np.ndarray:
        c = self.config
        return gae(
            t.rewards,
            t.values,
            t.next_values,
            t.terminated,
            t.truncated,
            c.gamma,
            c.gae_lambda,
        )

    def _loss_inputs(
        self,
        t: Trajectories,
        advantages: np.ndarray,
        importance: np.ndarray | None,
        batches: Minibatches,
        clip_range: float,
    ) -> LossInputs:
        """What the loss needs of each minibatch's rows, [I, B] each."""
        values = t.values.reshape(-1)
        advantage = advantages[batches.rows]
        if self.config.normalize_advantage:
            advantage = standardize(advantages, batches)
        if importance is not None:
            advantage = advantage * importance[batches.rows]
        return LossInputs(
            old_log_prob=t.log_probs.reshape(-1)[batches.rows],
            old_value=values[batches.rows],
            advantage=advantage,
            limit=surrogate_limit(advantage, clip_range),
            value_target=(values + advantages)[batches.rows],
            weight=batches.weights,
        )

    def state(self) -> dict[str, Any]:
        return self.minibatches.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.minibatches.restore(state)


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
