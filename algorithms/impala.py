"""IMPALA: an actor-critic that learns from older policies by V-trace (Espeholt et al. 2018,
arXiv:1802.01561)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from mindspore import Tensor, nn, ops

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
from msrl_accel.minibatches import make_minibatches, n_minibatches
from msrl_accel.spaces import PolicySpec
from msrl_accel.trajectories import Trajectories, vtrace


class ImpalaConfig(Section):
    """Hyperparameters; the paper's, but for Adam, and means over steps where it has sums."""

    n_steps: int = Field(20, ge=1)
    """Steps each environment takes between updates."""
    batch_size: int | None = Field(None, ge=1)
    """Steps of one gradient step; null takes all that were collected, as the paper does."""
    learning_rate: float = Field(6e-4, gt=0)
    """Adam step size at the start."""
    learning_rate_schedule: str = Field("constant", choices=("constant", "linear"))
    """'linear' falls to 0 over the run."""
    adam_epsilon: float = Field(1e-5, gt=0)
    """Adam's denominator term."""
    gamma: float = Field(0.99, gt=0, le=1)
    """Discount."""
    trace_lambda: float = Field(1.0, ge=0, le=1)
    """Decay of the trace (remark 2 of the paper)."""
    rho_bar: float = Field(1.0, gt=0)
    """Bound of the ratio pi / mu in each step's correction."""
    c_bar: float = Field(1.0, gt=0)
    """Bound of the ratio pi / mu along the trace."""
    ent_coef: float = Field(0.01, ge=0)
    """Weight of the entropy bonus."""
    vf_coef: float = Field(0.5, ge=0)
    """Weight of the mean squared value error."""
    max_grad_norm: float = Field(40.0, gt=0)
    """Gradients of a larger norm are scaled down to it."""
    gradient_alarm: float = Field(1000.0, gt=1)
    """Gradients over this many times max_grad_norm are reported as exploding."""


class LossInputs(NamedTuple):
    """One minibatch, every field [B]."""

    advantage: Tensor
    """rho_t (r_t + gamma v_{t+1} - V(s_t))."""
    value_target: Tensor
    """v_t."""
    weight: Tensor
    """Of the mean: sum 1 over real rows, 0 on padding."""


def impala_loss(log_prob, entropy, value, inputs, ent_coef, vf_coef):  # type: ignore[no-untyped-def]
    """Scalar loss: mean of  -A log pi + vf (V - v)^2 - ent H  (section 4.2 of the paper)."""
    advantage, value_target, weight = inputs
    policy_loss = -advantage * log_prob
    value_loss = ops.square(value - value_target)
    return ((policy_loss + vf_coef * value_loss - ent_coef * entropy) * weight).sum()


class ImpalaLoss(nn.Cell):
    """`impala_loss` with its coefficients."""

    n_inputs = len(LossInputs._fields)

    def __init__(self, config: ImpalaConfig) -> None:
        super().__init__()
        self.ent_coef = config.ent_coef
        self.vf_coef = config.vf_coef

    def construct(self, log_prob, entropy, value, inputs):  # type: ignore[no-untyped-def]
        return impala_loss(log_prob, entropy, value, inputs, self.ent_coef, self.vf_coef)


class Impala(OnPolicyAlgorithm):
    """V-trace actor-critic: one pass over each batch, whatever version of the policy took it."""

    Config = ImpalaConfig

    def __init__(self, config: TrainConfig, spec: PolicySpec) -> None:
        assert isinstance(config.algorithm, ImpalaConfig)
        self.config = c = config.algorithm
        self.n_steps = c.n_steps
        n_rows = self.n_steps * config.n_envs
        self.batch_size = min(c.batch_size or n_rows, n_rows)
        self.policy = self.build_policy(config, spec)
        capacity = n_minibatches(n_rows, self.batch_size, 1)
        graph = MinibatchGraph(
            self.policy, ImpalaLoss(c), self.batch_size, capacity, c.max_grad_norm
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
        log_probs, values = self.evaluate(trajectories)
        t = trajectories.with_values(values)
        log_ratios = log_probs - t.log_probs
        corrections, advantages = vtrace(
            t.rewards,
            t.values,
            t.next_values,
            log_ratios,
            t.terminated,
            t.truncated,
            t.valid,
            c.gamma,
            trace_lambda=c.trace_lambda,
            rho_bar=c.rho_bar,
            c_bar=c.c_bar,
        )
        row_weights = None if sample_weights is None else sample_weights.reshape(-1)
        batches = make_minibatches(rng, t.valid.reshape(-1), self.batch_size, 1, row_weights)
        inputs = LossInputs(
            advantage=advantages.reshape(-1)[batches.rows],
            value_target=(values + corrections).reshape(-1)[batches.rows],
            weight=batches.weights,
        )
        records, updated = self.minibatches.run(t, batches, inputs, learning_rate)
        seen = LossInputs(*(x[: len(records)] for x in inputs))
        return {
            "learning_rate": learning_rate,
            **impala_metrics(records, seen),
            **behaviour_metrics(log_ratios, t.valid),
            "explained_variance": explained_variance(t, corrections.reshape(-1)),
            **updated,
        }

    def state(self) -> dict[str, Any]:
        return self.minibatches.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.minibatches.restore(state)


def impala_metrics(records: np.ndarray, inputs: LossInputs) -> dict[str, float]:
    """Means over the minibatches run of what each saw before its step.

    Args:
        records: log-probability, entropy, value; [I, 3, B].
        inputs: as the loss had them, [I, B] each.
    """
    log_prob, entropy, value = records[:, 0], records[:, 1], records[:, 2]

    def mean(x: np.ndarray) -> float:
        return float((x * inputs.weight).sum(axis=1).mean())

    return {
        "policy_loss": mean(-inputs.advantage * log_prob),
        "value_loss": mean((value - inputs.value_target) ** 2),
        "entropy": mean(entropy),
    }
