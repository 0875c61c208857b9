"""DQN against the same computation in NumPy, written from the papers."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces
from policy_helpers import numerical_gradient

from msrl_accel.config import resolve_config
from msrl_accel.errors import SpaceError
from msrl_accel.replay import ReplayBatch
from msrl_accel.runtime.base import ActResult
from msrl_accel.spaces import PolicySpec

N_ACTIONS = 3
BATCH = 5
STEPS = 4
SPEC = PolicySpec.from_spaces(
    spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(N_ACTIONS, start=2)
)


def make_dqn(**values):
    from msrl_accel.algorithms.dqn import DQN

    overrides = {
        "policy.hidden_sizes": [8],
        "dqn.batch_size": BATCH,
        "dqn.train_freq": STEPS,
        "dqn.gradient_steps": STEPS,
        "dqn.target_update_interval": 3,
        "dqn.learning_rate": 0.01,
        **{f"dqn.{k}": v for k, v in values.items()},
    }
    return DQN(resolve_config("dqn", "CartPole-v1", tuned=False, overrides=overrides), SPEC)


def random_batch(rng):
    shape = (STEPS, BATCH)

    def observations():
        return (rng.normal(size=(*shape, 4)).astype(np.float32),)

    return ReplayBatch(
        observations=observations(),
        actions=rng.integers(0, N_ACTIONS, shape).astype(np.int32),
        rewards=rng.normal(0, 2, shape).astype(np.float32),
        next_observations=observations(),
        discounts=np.where(rng.random(shape) < 0.3, 0.0, 0.9).astype(np.float32),
        weights=rng.uniform(0.2, 1.0, shape).astype(np.float32),
        indices=np.zeros(shape, np.int64),
    )


class NumpyDQN:
    """A hidden layer of ReLU, two heads, Huber loss, Adam; gradients by central differences."""

    def __init__(self, dqn):
        self.config = dqn.config
        weights = dqn.policy.weights
        self.shapes = [w.shape for w in weights]
        self.flat = np.concatenate([w.asnumpy().reshape(-1) for w in weights]).astype(np.float64)
        self.target = self.flat.copy()
        self.m, self.v, self.t = np.zeros_like(self.flat), np.zeros_like(self.flat), 0

    def q(self, flat, x):
        parts, start = [], 0
        for shape in self.shapes:
            n = int(np.prod(shape))
            parts.append(flat[start : start + n].reshape(shape))
            start += n
        w, b, actor_w, actor_b, critic_w, critic_b = parts
        hidden = np.maximum(x @ w.T + b, 0)
        advantage, value = hidden @ actor_w.T + actor_b, hidden @ critic_w.T + critic_b
        if not self.config.dueling:
            return advantage
        return value + advantage - advantage.mean(axis=1, keepdims=True)

    def loss(self, flat, x, actions, targets, importance):
        error = self.q(flat, x)[np.arange(BATCH), actions] - targets
        huber = np.where(np.abs(error) <= 1, error**2 / 2, np.abs(error) - 0.5)
        return (huber * importance).mean(), error

    def step(self, batch, i):
        x, following = batch.observations[0][i], batch.next_observations[0][i]
        q_target = self.q(self.target, following)
        chooser = self.q(self.flat, following) if self.config.double else q_target
        best = q_target[np.arange(BATCH), chooser.argmax(axis=1)]
        targets = batch.rewards[i] + batch.discounts[i] * best
        arguments = (x, batch.actions[i], targets, batch.weights[i])
        _, error = self.loss(self.flat, *arguments)
        gradient = numerical_gradient(lambda flat: self.loss(flat, *arguments)[0], self.flat)
        gradient *= min(1.0, self.config.max_grad_norm / np.linalg.norm(gradient))
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * gradient
        self.v = 0.999 * self.v + 0.001 * gradient**2
        m, v = self.m / (1 - 0.9**self.t), self.v / (1 - 0.999**self.t)
        self.flat -= self.config.learning_rate * m / (np.sqrt(v) + self.config.adam_epsilon)
        if self.t % self.config.target_update_interval == 0:
            self.target = self.flat.copy()
        return error


@pytest.mark.parametrize("double, dueling", [(True, True), (False, False)])
def test_updates_equal_those_in_numpy(graph_mode, double, dueling):
    dqn = make_dqn(double=double, dueling=dueling, max_grad_norm=0.5)
    reference = NumpyDQN(dqn)
    rng = np.random.default_rng(0)
    for _ in range(2):  # the target network is copied within and between calls
        batch = random_batch(rng)
        metrics, errors = dqn.update(batch, 0.5)
        expected = np.array([reference.step(batch, i) for i in range(STEPS)])
        np.testing.assert_allclose(errors, np.abs(expected), atol=2e-4)
    weights = np.concatenate([w.asnumpy().reshape(-1) for w in dqn.policy.weights])
    np.testing.assert_allclose(weights, reference.flat, atol=2e-4)
    np.testing.assert_allclose(dqn.graph.target.asnumpy(), reference.target, atol=2e-4)
    assert metrics["q_mean"] != 0


def test_a_restored_algorithm_goes_on_as_the_saved_one(graph_mode):
    rng = np.random.default_rng(1)
    ours, other = make_dqn(), make_dqn()
    ours.update(random_batch(rng), 0.0)
    other.policy.load_arrays(ours.policy.arrays())
    other.restore(ours.state())
    batch = random_batch(rng)
    for a, b in zip(ours.update(batch, 0.0), other.update(batch, 0.0)):
        assert str(a) == str(b)
    for name, value in ours.policy.arrays().items():
        np.testing.assert_array_equal(value, other.policy.arrays()[name])


def test_exploration_is_greedy_but_for_the_share_asked_for(graph_mode):
    dqn = make_dqn(exploration_initial=1.0, exploration_final=0.1, exploration_fraction=0.5)
    assert [dqn.exploration(p) for p in (0.0, 0.25, 0.5, 1.0)] == pytest.approx(
        [1.0, 0.55, 0.1, 0.1]
    )
    n = 20_000
    logits = np.tile(np.float32([0.0, 5.0, 1.0]), (n, 1))
    acted = ActResult(*[np.zeros(n)] * 4, (logits,))
    raw, actions = dqn.explore(acted, np.random.default_rng(0), 1.0)
    assert (raw == 1).mean() == pytest.approx(0.9 + 0.1 / N_ACTIONS, abs=0.01)
    np.testing.assert_array_equal(actions, raw + 2)  # the space starts at 2


def test_actions_other_than_discrete_are_refused(graph_mode):
    from msrl_accel.algorithms.dqn import DQN

    spec = PolicySpec.from_spaces(SPEC_BOX, spaces.Box(-1, 1, (1,), np.float32))
    config = resolve_config("dqn", "Pendulum-v1", tuned=False)
    with pytest.raises(SpaceError, match="dqn needs a Discrete action space"):
        DQN(config, spec)


SPEC_BOX = spaces.Box(-1, 1, (4,), np.float32)
