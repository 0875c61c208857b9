"""What on-policy algorithms share: the compiled loop over minibatches, and a look at the policy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from msrl_accel.graph_cache import GraphCache
from msrl_accel.learner import EvaluateActions, FlatAdam, GradientWatch, adam_step_sizes
from msrl_accel.minibatches import Minibatches
from msrl_accel.networks import Weights, set_parameter
from msrl_accel.policy import Policy
from msrl_accel.runtime.base import pad_rows
from msrl_accel.trajectories import Trajectories

CHUNK = 4096
"""Rows that `PolicyEvaluator` gives to the graph at a time."""


class MinibatchGraph(nn.Cell):
    """All epochs and minibatches of one update, in one graph.

    construct(raw_actions, rows [I, B], scalars [I, K, B], step_sizes [I], epsilons [I], count,
    *observations) returns the number of minibatches run; what each saw is in `records`
    [I, 3, B] (log-probability, entropy, value) and `norms` [I] (of gradients). The observations are
    arguments of their own because a tuple of tensors would compile anew at every call.

    Args:
        policy: trained.
        loss: Cell (log_prob, entropy, value [B], inputs: K tensors [B]) -> scalar, with attributes
            `n_inputs` (K) and `ent_coef`. The last input is the weight of each row; with a
            `kl_limit`, the first is the log-probability the KL is measured from.
        batch_size: B.
        capacity: I.
        max_grad_norm: gradients of a larger norm are scaled down to it.
        kl_limit: no minibatch is run after one whose KL estimate exceeds it.
    """

    def __init__(
        self,
        policy: Policy,
        loss: nn.Cell,
        batch_size: int,
        capacity: int,
        max_grad_norm: float,
        kl_limit: float | None = None,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.policy = policy
        self.loss = loss
        self.optimizer = FlatAdam(policy.weights, max_grad_norm)
        self.grad = ops.value_and_grad(self.forward, 0, None, has_aux=True)
        self.records = Parameter(
            Tensor(np.zeros((capacity, 3, batch_size), np.float32)), "records", requires_grad=False
        )
        self.norms = Parameter(Tensor(np.zeros(capacity, np.float32)), "norms", requires_grad=False)
        self.batch = batch_size
        self.kl_limit = kl_limit
        self.write = ops.ScatterUpdate()
        self.take = ops.Gather()
        self.split_scalars = ops.Split(0, loss.n_inputs)

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
                kl = self.optimizer.synchronize(kl)
                count = ops.select(kl > self.kl_limit, i, count)
        self.optimizer.scatter()
        return i


class MinibatchUpdate:
    """A `MinibatchGraph` with its side on the host: Adam's step sizes, the watch, the state.

    Args:
        graph: compiled at its first run.
        adam_epsilon: Adam's denominator term.
        gradient_alarm: gradients over this many times the clipping norm count as exploding.
        cache: the compiled graph is read from there or put there.
    """

    def __init__(
        self,
        graph: MinibatchGraph,
        adam_epsilon: float,
        gradient_alarm: float,
        cache: GraphCache | None = None,
    ) -> None:
        self.graph = graph
        self.cache = cache
        self.adam_epsilon = adam_epsilon
        self.adam_steps = 0
        self.watch = GradientWatch(graph.optimizer.max_grad_norm, gradient_alarm)

    def run(
        self,
        trajectories: Trajectories,
        batches: Minibatches,
        inputs: Sequence[np.ndarray],
        learning_rate: float,
    ) -> tuple[np.ndarray, dict[str, float]]:
        """Gradient steps on all minibatches.

        Args:
            inputs: of the loss, [I, B] float32 each.

        Returns:
            Records [n, 3, B] of the n minibatches run, and metrics of their gradients.
        """
        t = trajectories
        step_sizes, epsilons = adam_step_sizes(
            learning_rate, self.adam_epsilon, self.adam_steps, len(batches.rows)
        )
        with nullcontext() if self.cache is None else self.cache.compiling():
            done = self.graph(
                Tensor.from_numpy(flat_rows(t.raw_actions)),
                Tensor.from_numpy(batches.rows),
                Tensor.from_numpy(np.stack(inputs, axis=1)),
                Tensor.from_numpy(step_sizes),
                Tensor.from_numpy(epsilons),
                Tensor(batches.count, mstype.int32),
                *(Tensor.from_numpy(flat_rows(x)) for x in t.observations),
            )
        n = int(done.asnumpy())
        self.adam_steps += n
        metrics = {
            "updates": float(self.adam_steps),
            "early_stop": float(n < batches.count),
            **self.watch.update(self.graph.norms.asnumpy()[:n]),
        }
        return self.graph.records.asnumpy()[:n], metrics

    def look(
        self, trajectories: Trajectories, batches: Minibatches, inputs: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities and values [T, N] as the graph sees them, without a step.

        Rows in none of the minibatches that are run keep those of the trajectories.
        """
        state = self.state()
        records, _ = self.run(trajectories, batches, inputs, 0.0)
        self.restore(state)
        used = batches.weights[: len(records)] > 0
        rows = batches.rows[: len(records)][used]
        found = trajectories.log_probs.copy(), trajectories.values.copy()
        for array, record in zip(found, (records[:, 0], records[:, 2])):
            array.reshape(-1)[rows] = record[used]
        return found

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


class PolicyEvaluator:
    """What the present policy says of steps that another version of it took.

    Args:
        policy: evaluated with the weights it has at each call.
    """

    def __init__(self, policy: Policy) -> None:
        self.graph = EvaluateActions(policy)

    def __call__(self, trajectories: Trajectories) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities of the actions and values of the observations, [T, N] each."""
        t = trajectories
        inputs = [flat_rows(x) for x in (*t.observations, t.raw_actions)]
        rows = len(inputs[0])
        size = min(rows, CHUNK)  # one size, compiled once
        log_probs, values = np.empty(rows, np.float32), np.empty(rows, np.float32)
        for start in range(0, rows, size):
            chunk = [Tensor.from_numpy(pad_rows(x[start : start + size], size)) for x in inputs]
            for target, output in zip((log_probs, values), self.graph(*chunk)):
                part = target[start : start + size]
                part[:] = output.asnumpy()[: len(part)]
        return log_probs.reshape(t.valid.shape), values.reshape(t.valid.shape)


def flat_rows(array: np.ndarray) -> np.ndarray:
    """[T, N, ...] -> [T * N, ...]."""
    return array.reshape((-1, *array.shape[2:]))


def explained_variance(t: Trajectories, advantages: np.ndarray) -> float:
    """1 - Var(target - V) / Var(target) over the valid rows; NaN where the targets are constant.

    Args:
        advantages: target - V, [T * N].
    """
    valid = t.valid.reshape(-1)
    residual = advantages[valid]
    variance = float(np.var(residual + t.values.reshape(-1)[valid]))
    return 1.0 - float(np.var(residual)) / variance if variance > 0 else float("nan")


def behaviour_metrics(log_ratios: np.ndarray, valid: np.ndarray) -> dict[str, float]:
    """How far the policy that acted, mu, is from the one the update starts from; [T, N].

    behaviour_kl = mean((x - 1) - log x) with x = pi_prox / mu; importance_max is the largest x.
    """
    log_ratio = log_ratios[valid].astype(np.float64)
    ratio = np.exp(np.minimum(log_ratio, 50.0))
    return {
        "behaviour_kl": float((ratio - 1 - log_ratio).mean()),
        "importance_max": float(ratio.max()),
    }
