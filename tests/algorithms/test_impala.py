from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces
from mindspore import Tensor, nn, ops
from numpy_ppo import N, NumpyPPO, T, random_trajectories, values_that_follow
from policy_helpers import VECTOR, numerical_gradient, spec_of, vtrace_by_definition

from msrl_accel.algorithms.impala import Impala, ImpalaConfig, ImpalaLoss, LossInputs
from msrl_accel.config import resolve_config
from msrl_accel.train import train

pytestmark = pytest.mark.usefixtures("graph_mode")

DISCRETE = spaces.Discrete(3)
BOX = spaces.Box(-1, 1, (2,), np.float32)


def numpy_loss(log_prob, entropy, value, inputs, config):
    """Section 4.2 of the paper, one row at a time."""
    total = 0.0
    for b in range(len(log_prob)):
        row = -inputs.advantage[b] * log_prob[b]
        row += config.vf_coef * (value[b] - inputs.value_target[b]) ** 2
        total += inputs.weight[b] * (row - config.ent_coef * entropy[b])
    return total


class LossGraph(nn.Cell):
    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def construct(self, log_prob, entropy, value, *inputs):
        return self.loss(log_prob, entropy, value, inputs)


def test_the_loss_and_its_gradient_equal_the_definition():
    rng = np.random.default_rng(0)
    terms = [rng.normal(size=6) for _ in range(3)]
    weight = np.array([0.2] * 5 + [0.0])
    inputs = LossInputs(rng.normal(size=6), rng.normal(size=6), weight)
    config = ImpalaConfig(ent_coef=0.3, vf_coef=0.7)
    arguments = [Tensor(np.asarray(a, np.float32)) for a in (*terms, *inputs)]
    graph = ops.value_and_grad(LossGraph(ImpalaLoss(config)), (0, 1, 2))
    result, gradients = graph(*arguments)
    assert float(result.asnumpy()) == pytest.approx(numpy_loss(*terms, inputs, config), rel=1e-5)
    for i, gradient in enumerate(gradients):

        def of_one_term(x, i=i):
            changed = [x if i == j else term for j, term in enumerate(terms)]
            return numpy_loss(*changed, inputs, config)

        expected = numerical_gradient(of_one_term, terms[i])
        np.testing.assert_allclose(gradient.asnumpy(), expected, rtol=1e-4, atol=1e-6)


def make_impala(action_space, **values):
    config = resolve_config(
        "impala",
        "Test-v0",
        tuned=False,
        n_envs=N,
        seed=4,
        **{
            "policy.hidden_sizes": (5,),
            "impala.n_steps": T,
            "impala.learning_rate": 0.01,
            "impala.max_grad_norm": 2.0,
            **values,
        },
    )
    return Impala(config, spec_of(action_space, VECTOR))


@pytest.fixture(scope="module")
def algorithms():
    """Compiled updates by action space, each with its initial state."""
    bars = {"impala.trace_lambda": 0.9, "impala.rho_bar": 1.5}
    made = {
        "discrete": make_impala(
            DISCRETE, **{"impala.ent_coef": 0.05, "impala.learning_rate_schedule": "linear"}
        ),
        "box": make_impala(BOX, **{"impala.batch_size": 8, **bars}),
    }
    initial = {name: (impala.policy.arrays(), impala.state()) for name, impala in made.items()}

    def fresh(name):
        arrays, state = initial[name]
        made[name].policy.load_arrays(arrays)
        made[name].restore(state)
        return made[name]

    return fresh


class NumpyImpala(NumpyPPO):
    """One pass over the batch, gradients by finite differences."""

    def __init__(self, impala):
        super().__init__(impala)
        self.batch_size = impala.batch_size

    def update(self, t, rng, sample_weights):
        c = self.c
        x = t.observations[0].reshape(-1, 3).astype(np.float64)
        raw = t.raw_actions.reshape(len(x), *t.raw_actions.shape[2:])
        log_prob, _, value = self.evaluate(self.flat, x, raw)
        value = value.reshape(T, N)
        steps = (t.rewards, value, values_that_follow(t, value))
        log_ratio = log_prob.reshape(T, N) - t.log_probs
        ends = (t.terminated, t.truncated, t.valid)
        settings = (c.gamma, c.trace_lambda, c.rho_bar, c.c_bar)
        corrections, advantages = vtrace_by_definition(*steps, log_ratio, *ends, *settings)
        targets = (value + corrections).ravel()
        row_weights = sample_weights.ravel()
        usable = t.valid.ravel() & (row_weights > 0)
        order = rng.permutation(np.flatnonzero(usable).astype(np.int32))
        losses = []
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            weight = row_weights[rows] / row_weights[rows].sum()
            inputs = LossInputs(advantages.ravel()[rows], targets[rows], weight)
            losses.append(self.step(x[rows], raw[rows], inputs))
        return np.mean(losses)

    def step(self, x, raw, inputs):
        c = self.c

        def loss(flat):
            return numpy_loss(*self.evaluate(flat, x, raw), inputs, c)

        before = loss(self.flat)
        gradient = numerical_gradient(loss, self.flat)
        gradient *= min(1.0, c.max_grad_norm / np.linalg.norm(gradient))
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * gradient
        self.v = 0.999 * self.v + 0.001 * gradient**2
        m_hat, v_hat = self.m / (1 - 0.9**self.t), self.v / (1 - 0.999**self.t)
        self.flat = self.flat - c.learning_rate * m_hat / (np.sqrt(v_hat) + c.adam_epsilon)
        return before


@pytest.mark.parametrize("name", ["discrete", "box"])
def test_updates_equal_impala_in_numpy(algorithms, name):
    impala = algorithms(name)
    reference = NumpyImpala(impala)
    for k, invalid in enumerate((0, 4)):
        t = random_trajectories(impala, 10 + k, invalid)
        weights = np.random.default_rng(k).choice([0.0, 0.5, 1.0], (T, N)).astype(np.float32)
        if k == 0:
            weights[:] = 1.0
        sample_weights = weights if k else None
        metrics = impala.update(t, 0.0, np.random.default_rng(k), sample_weights=sample_weights)
        loss = reference.update(t, np.random.default_rng(k), weights)
        c = impala.config
        mine = metrics["policy_loss"] + c.vf_coef * metrics["value_loss"]
        assert mine - c.ent_coef * metrics["entropy"] == pytest.approx(loss, rel=1e-3)
        for name, value in reference.arrays(reference.flat).items():
            np.testing.assert_allclose(impala.policy.arrays()[name], value, atol=1e-4)
        assert metrics["updates"] == reference.t


def test_a_restored_algorithm_continues_bit_for_bit(algorithms):
    impala = algorithms("discrete")
    impala.update(random_trajectories(impala, 0), 0.0, np.random.default_rng(0))
    arrays, state = impala.policy.arrays(), impala.state()
    later = random_trajectories(impala, 1)
    results = []
    for _ in range(2):
        impala.policy.load_arrays(arrays)
        impala.restore(state)
        impala.update(later, 0.0, np.random.default_rng(1))
        results.append((impala.policy.arrays(), impala.state()))
    assert results[0][1]["adam_steps"] == 2
    for first, second in zip(results[0], results[1]):
        for name, value in first.items():
            np.testing.assert_array_equal(value, second[name])


def test_the_schedule_and_the_scale_of_the_learning_rate(algorithms):
    impala = algorithms("discrete")
    t = random_trajectories(impala, 0)
    metrics = impala.update(t, 0.25, np.random.default_rng(0), learning_rate_scale=0.5)
    assert metrics["learning_rate"] == pytest.approx(0.01 * 0.75 * 0.5)


def test_it_learns_the_identity(tmp_path):
    # The best return is 8; an untrained policy gets 2.
    run = train(
        algo="impala",
        env="msrl_accel.envs.toy:IdentityDiscrete-v0",
        total_steps=8192,
        run_dir=str(tmp_path / "run"),
        n_envs=16,
        quiet=True,
        **{
            "policy.hidden_sizes": (32,),
            "impala.n_steps": 8,
            "impala.gamma": 0.5,
            "impala.learning_rate": 2e-2,
            "logging.tensorboard": False,
        },
    )
    assert run.summary["deterministic"]["return_mean"] >= 7.9
