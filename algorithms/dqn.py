"""Deep Q-learning (Mnih et al. 2015), double (van Hasselt et al. 2016, arXiv:1509.06461), dueling
(Wang et al. 2016, arXiv:1511.06581), prioritised (Schaul et al. 2016, arXiv:1511.05952).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from msrl_accel.algorithms.base import OffPolicyAlgorithm, OffPolicyConfig
from msrl_accel.config import Field, TrainConfig
from msrl_accel.errors import SpaceError
from msrl_accel.learner import FlatAdam, GradientWatch, adam_step_sizes
from msrl_accel.networks import Weights, set_parameter
from msrl_accel.policy import Policy
from msrl_accel.runtime.base import ActResult
from msrl_accel.spaces import PolicySpec

if TYPE_CHECKING:
    from msrl_accel.replay import ReplayBatch


class DQNConfig(OffPolicyConfig):
    """Hyperparameters; defaults as in Mnih et al. where they carry over to small networks."""

    run_defaults = {  # noqa: RUF012
        "policy": {"hidden_sizes": [256, 256], "activation": "relu", "torso_sharing": "shared"}
    }

    buffer_size: int = Field(100_000, ge=1)
    """Transitions the replay holds; the oldest are overwritten."""
    batch_size: int = Field(64, ge=1)
    """Transitions of one gradient step."""
    learning_rate: float = Field(3e-4, gt=0)
    """Adam step size."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """Adam's denominator term."""
    max_grad_norm: float = Field(10.0, gt=0)
    """Gradients of a larger norm are scaled down to it."""
    gradient_alarm: float = Field(1000.0, gt=1)
    """Gradients over this many times max_grad_norm are reported as exploding."""
    target_update_interval: int = Field(500, ge=1)
    """Gradient steps between copies of the weights to the target network."""
    double: bool = Field(True)
    """Whether the online network chooses the action that the target network values."""
    dueling: bool = Field(True)
    """Whether Q = V + A - mean A, from two heads."""
    exploration_fraction: float = Field(0.2, ge=0, le=1)
    """Share of the run over which the chance of a random action falls."""
    exploration_initial: float = Field(1.0, ge=0, le=1)
    """Chance of a random action at the start."""
    exploration_final: float = Field(0.05, ge=0, le=1)
    """Chance of a random action from then on."""


def q_values(logits, value, dueling):  # type: ignore[no-untyped-def]
    """Q [B, A] of the two heads [B, A] and [B]: V + A - mean A (Wang et al., eq. 9), or logits."""
    if not dueling:
        return logits
    return logits + (value.reshape((-1, 1)) - logits.mean(axis=1, keep_dims=True))


def dqn_target(rewards, discounts, q_next, q_next_target, double):  # type: ignore[no-untyped-def]
    """r + discount * Q'(s', argmax_a Q(s', a)), all [B]; without `double`, argmax of Q' itself."""
    chooser = q_next if double else q_next_target
    return rewards + discounts * of_action(q_next_target, chooser.argmax(axis=1))


def of_action(q, actions):  # type: ignore[no-untyped-def]
    """Q [B] of the actions [B] among q [B, A]."""
    choice = actions.reshape((-1, 1)) == ops.arange(q.shape[1]).reshape((1, -1))
    return (q * ops.cast(choice, mstype.float32)).sum(axis=1)


def huber(error):  # type: ignore[no-untyped-def]
    """e^2 / 2 within [-1, 1], |e| - 1/2 outside: its gradient is the clipped error."""
    size = ops.abs(error)
    inner = ops.minimum(size, 1.0)
    return inner * (size - 0.5 * inner)


class DQNUpdate(nn.Cell):
    """All gradient steps of one update, in one graph.

    construct(actions [k, B], rewards, discounts, weights [k, B], copies [k], step_sizes [k],
    epsilons [k], *observations [k, B, ...], *next_observations) returns k. What each step saw is
    in `records` [k, 3, B] (error, Q of the action, loss) and `norms` [k].
    """

    def __init__(self, policy: Policy, config: DQNConfig, steps: int) -> None:
        super().__init__(auto_prefix=False)
        self.policy = policy
        self.double, self.dueling = config.double, config.dueling
        self.steps = steps
        self.n_observations = len(policy.spec.observations)
        self.optimizer = FlatAdam(policy.weights, config.max_grad_norm)
        self.target = Parameter(
            Tensor(np.concatenate([w.asnumpy().reshape(-1) for w in policy.weights])),
            "target",
            requires_grad=False,
        )
        self.grad = ops.value_and_grad(self.forward, 0, None, has_aux=True)
        shape = (steps, 3, config.batch_size)
        self.records = Parameter(Tensor(np.zeros(shape, np.float32)), "records")
        self.norms = Parameter(Tensor(np.zeros(steps, np.float32)), "norms")
        self.write = ops.ScatterUpdate()
        self.take = ops.Gather()

    def q(self, weights, observations):  # type: ignore[no-untyped-def]
        parameters, value = self.policy.forward(weights, observations, True)
        return q_values(parameters[0], value, self.dueling)

    def forward(self, weights, observations, actions, targets, importance):  # type: ignore[no-untyped-def]
        q = self.q(weights, observations)
        chosen = of_action(q, actions)
        error = chosen - targets
        losses = huber(error)
        return (losses * importance).mean(), ops.stack((error, chosen, losses), 0)

    def pick(self, tensors, i):  # type: ignore[no-untyped-def]
        picked: Weights = ()
        for tensor in tensors:
            picked = (*picked, self.take(tensor, i, 0))
        return picked

    def construct(  # type: ignore[no-untyped-def]
        self, actions, rewards, discounts, importance, copies, step_sizes, epsilons, *observations
    ):
        n = self.n_observations
        self.optimizer.gather()
        i = Tensor(0, mstype.int32)
        while i < self.steps:
            weights = self.optimizer.split()
            following = self.pick(observations[n:], i)
            q_next = self.q(weights, following)
            q_next_target = self.q(self.optimizer.split_of(self.target), following)
            targets = ops.stop_gradient(
                dqn_target(
                    self.take(rewards, i, 0),
                    self.take(discounts, i, 0),
                    q_next,
                    q_next_target,
                    self.double,
                )
            )
            (_, record), gradients = self.grad(
                weights,
                self.pick(observations[:n], i),
                self.take(actions, i, 0),
                targets,
                self.take(importance, i, 0),
            )
            norm = self.optimizer(gradients, self.take(step_sizes, i, 0), self.take(epsilons, i, 0))
            self.write(self.records, i, record)
            self.write(self.norms, i, norm)
            change = ops.depend(self.optimizer.flat, norm) - self.target
            ops.assign_add(self.target, self.take(copies, i, 0) * change)
            i = i + 1
        self.optimizer.scatter()
        return i


class DQN(OffPolicyAlgorithm):
    """Q-learning with the policy graph as Q network: its logits are Q, or the advantages in Q.

    Deterministic actions are the greedy ones; sampled actions after training are drawn in
    proportion to exp(Q).
    """

    Config = DQNConfig

    def __init__(self, config: TrainConfig, spec: PolicySpec) -> None:
        assert isinstance(config.algorithm, DQNConfig)
        self.config: DQNConfig = config.algorithm
        self.spec = spec
        self.policy = self.build_policy(config, spec)
        self.graph = DQNUpdate(self.policy, self.config, self.config.steps_per_call(config.n_envs))
        self.watch = GradientWatch(self.config.max_grad_norm, self.config.gradient_alarm)
        self.steps = 0

    @classmethod
    def build_policy(cls, config: TrainConfig, spec: PolicySpec) -> Policy:
        if spec.action.kind != "discrete":
            raise SpaceError(
                f"dqn needs a Discrete action space, this one is {spec.action.kind}; use ppo or sac"
            )
        return super().build_policy(config, spec)

    def explore(
        self, acted: ActResult, rng: np.random.Generator, progress: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Greedy actions, each replaced by a random one with the present chance."""
        raw = acted.parameters[0].argmax(axis=1).astype(np.int32)
        random, _ = self.spec.random_actions(rng, len(raw))
        raw = np.where(rng.random(len(raw)) < self.exploration(progress), random, raw)
        return raw, raw + self.spec.action.starts[0]

    def exploration(self, progress: float) -> float:
        """Chance of a random action: linear from the initial to the final one."""
        c = self.config
        done = min(1.0, progress / c.exploration_fraction) if c.exploration_fraction else 1.0
        return c.exploration_initial + done * (c.exploration_final - c.exploration_initial)

    def update(self, batch: ReplayBatch, progress: float) -> tuple[dict[str, float], np.ndarray]:
        c = self.config
        n = len(batch.rewards)
        step_sizes, epsilons = adam_step_sizes(c.learning_rate, c.adam_epsilon, self.steps, n)
        after = np.arange(self.steps + 1, self.steps + n + 1)
        copies = (after % c.target_update_interval == 0).astype(np.float32)
        arrays = (batch.actions, batch.rewards, batch.discounts, batch.weights, copies)
        inputs = (*arrays, step_sizes, epsilons, *batch.observations, *batch.next_observations)
        self.graph(*map(Tensor.from_numpy, inputs))
        self.steps += n
        error, q, loss = self.graph.records.asnumpy().transpose(1, 0, 2)
        metrics = {
            "q_mean": float(q.mean()),
            "loss": float((loss * batch.weights).mean()),
            "exploration": self.exploration(progress),
            **self.watch.update(self.graph.norms.asnumpy()),
        }
        return metrics, np.abs(error)

    def state(self) -> dict[str, Any]:
        graph = self.graph
        return {
            "moment1": graph.optimizer.moment1.asnumpy().copy(),
            "moment2": graph.optimizer.moment2.asnumpy().copy(),
            "target": graph.target.asnumpy().copy(),
            "steps": self.steps,
            "watch": self.watch.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        set_parameter(self.graph.optimizer.moment1, state["moment1"])
        set_parameter(self.graph.optimizer.moment2, state["moment2"])
        set_parameter(self.graph.target, state["target"])
        self.steps = int(state["steps"])
        self.watch.restore(state["watch"])
