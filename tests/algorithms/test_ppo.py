from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from gymnasium import spaces
from mindspore import Tensor, nn, ops
from numpy_ppo import N, NumpyPPO, T, numpy_loss, random_trajectories
from policy_helpers import (
    VECTOR,
    count_compilations,
    numerical_gradient,
    spec_of,
)

from msrl_accel.algorithms.on_policy import PolicyEvaluator, explained_variance
from msrl_accel.algorithms.ppo import (
    PPO,
    LossInputs,
    PPOConfig,
    PPOLoss,
    importance_weights,
    ppo_loss,
    surrogate_limit,
)
from msrl_accel.config import resolve_config
from msrl_accel.envs import make_vector
from msrl_accel.observation_statistics import ObservationStatistics
from msrl_accel.rollout import Collector
from msrl_accel.runtime.graph import GraphRuntime
from msrl_accel.spaces import PolicySpec

pytestmark = pytest.mark.usefixtures("graph_mode")

BRANCHES = [
    {"value_clip_range": None, "ent_coef": 0.0},
    {"value_clip_range": 0.3, "ent_coef": 0.0},
    {"value_clip_range": None, "ent_coef": 0.1},
    {"value_clip_range": 0.3, "ent_coef": 0.1},
    {"value_clip_range": None, "ent_coef": 0.0, "kl_coef": 0.7},
]
CLIP = 0.2


class LossGraph(nn.Cell):
    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def construct(self, log_prob, entropy, value, *inputs):
        return self.loss(log_prob, entropy, value, inputs)


class PlainLoss(nn.Cell):
    """`ppo_loss` differentiated by MindSpore."""

    def __init__(self, config):
        super().__init__()
        self.value_clip = config.value_clip_range
        self.ent_coef, self.vf_coef = config.ent_coef, config.vf_coef
        self.kl_coef = config.kl_coef

    def construct(self, log_prob, entropy, value, inputs):
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


def loss_case():
    """Rows on every side of the clips, with padding that holds rubbish."""
    rng = np.random.default_rng(0)
    log_ratio = np.array([0.0, 0.1, -0.1, 0.5, 0.5, -0.5, -0.5, 0.3, 0.05, 2.0])
    advantage = np.array([1.0, -1.0, 0.7, 1.0, -1.0, 1.0, -1.0, 0.0, 2.0, 50.0])
    old_log_prob, entropy = rng.normal(-1, 0.3, 10), rng.uniform(0.1, 1, 10)
    old_value = rng.normal(size=10)
    value = old_value + np.array([0.0, 0.1, -0.1, 0.8, 0.8, -0.8, -0.8, 0.2, -0.2, 30.0])
    target = old_value + np.array([1.0, -1.0, 0.05, 1.5, -1.5, 1.5, -1.5, 0.1, 0.5, -40.0])
    weight = np.array([1 / 9] * 9 + [0.0])
    limit = surrogate_limit(advantage, CLIP)
    inputs = LossInputs(old_log_prob, old_value, advantage, limit, target, weight)
    return old_log_prob + log_ratio, entropy, value, inputs


def tensors(*arrays):
    return [Tensor(np.asarray(a, np.float32)) for a in arrays]


@pytest.mark.parametrize("branch", BRANCHES)
def test_the_loss_and_both_its_gradients_equal_the_definition(branch):
    config = PPOConfig(vf_coef=0.5, **branch)
    log_prob, entropy, value, inputs = loss_case()
    terms = [log_prob, entropy, value]

    def loss(*changed):
        return numpy_loss(*changed, inputs, CLIP, config)

    arguments = tensors(*terms, *inputs)
    expected = []
    for i in range(3):

        def of_one_term(x, i=i):
            return loss(*(x if i == j else term for j, term in enumerate(terms)))

        expected.append(numerical_gradient(of_one_term, terms[i]))
    for cell in (PPOLoss(config), PlainLoss(config)):
        result, gradients = ops.value_and_grad(LossGraph(cell), (0, 1, 2))(*arguments)
        assert float(result.asnumpy()) == pytest.approx(loss(*terms), rel=1e-5)
        for gradient, reference in zip(gradients, expected):
            np.testing.assert_allclose(gradient.asnumpy(), reference, rtol=1e-4, atol=1e-6)
            assert gradient.asnumpy()[-1] == 0.0  # padding


def make_ppo(action_space, observation_space=VECTOR, n_steps=T, n_envs=N, **values):
    config = resolve_config(
        "ppo",
        "Test-v0",
        tuned=False,
        n_envs=n_envs,
        seed=4,
        **{
            "policy.hidden_sizes": (5,),
            "ppo.n_steps": n_steps,
            "ppo.batch_size": 8,
            "ppo.n_epochs": 2,
            "ppo.learning_rate": 0.01,
            **values,
        },
    )
    return PPO(config, spec_of(action_space, observation_space))


DISCRETE = spaces.Discrete(3)
BOX = spaces.Box(-1, 1, (2,), np.float32)


@pytest.fixture(scope="module")
def algorithms():
    """Compiled updates by what they are for, each with its initial state."""
    discrete = {"ppo.ent_coef": 0.05, "ppo.value_clip_range": 0.2, "ppo.kl_coef": 0.3}
    made = {
        "discrete": make_ppo(DISCRETE, **discrete),
        "decoupled": make_ppo(
            DISCRETE,
            **{"ppo.objective": "decoupled", "ppo.importance_cap": 1.2, **discrete},
        ),
        "box": make_ppo(BOX, **{"ppo.ent_coef": 0.01}),
        "vtrace": make_ppo(BOX, **{"ppo.objective": "vtrace", "ppo.ent_coef": 0.01}),
        "kl": make_ppo(DISCRETE, **{"ppo.target_kl": 0.05, "ppo.learning_rate": 0.1}),
    }
    initial = {name: (ppo.policy.arrays(), ppo.state()) for name, ppo in made.items()}

    def fresh(name):
        arrays, state = initial[name]
        made[name].policy.load_arrays(arrays)
        made[name].restore(state)
        return made[name]

    return fresh


def check_against_numpy(ppo, invalid, iterations=1, seed=10, sample_weights=None):
    reference = NumpyPPO(ppo)
    for k in range(iterations):
        t = random_trajectories(ppo, seed + k, invalid)
        metrics = ppo.update(t, 0.0, np.random.default_rng(k), sample_weights=sample_weights)
        seen = reference.update(
            t, CLIP, ppo.config.learning_rate, np.random.default_rng(k), sample_weights
        )
        for name, value in reference.arrays(reference.flat).items():
            np.testing.assert_allclose(ppo.policy.arrays()[name], value, atol=1e-4, err_msg=name)
        for name in ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction"):
            expected = np.mean([s[name] for s in seen])
            assert metrics[name] == pytest.approx(expected, rel=1e-3, abs=1e-4), name
        assert metrics["ratio_error"] == pytest.approx(seen[0]["ratio_error"], rel=1e-4)
        norms = [s["grad_norm"] for s in seen]
        assert metrics["grad_norm"] == pytest.approx(np.mean(norms), rel=1e-3)
        assert metrics["grad_norm_max"] == pytest.approx(np.max(norms), rel=1e-3)
        assert ppo.minibatches.adam_steps == metrics["updates"] == reference.t
    return metrics, seen


# 21 rows in minibatches of 8: the last of each epoch has 5, 3, 1 or 8 rows.
@pytest.mark.parametrize(
    ("name", "invalid"),
    [
        ("discrete", 0),
        ("discrete", 2),
        ("discrete", 4),
        ("box", 0),
        ("box", 5),
        ("decoupled", 0),
        ("decoupled", 4),
        ("vtrace", 0),
        ("vtrace", 4),
    ],
)
def test_an_update_equals_ppo_in_numpy(algorithms, name, invalid):
    metrics, seen = check_against_numpy(algorithms(name), invalid)
    assert len(seen) == 2 * -(-(T * N - invalid) // 8)
    assert metrics["early_stop"] == 0


def test_a_second_update_continues_the_optimiser(algorithms):
    check_against_numpy(algorithms("discrete"), invalid=1, iterations=2)


@pytest.mark.parametrize("name", ["discrete", "decoupled", "vtrace"])
def test_steps_count_by_their_weights(algorithms, name):
    weights = np.random.default_rng(1).choice([0.0, 0.4, 1.0], (T, N)).astype(np.float32)
    check_against_numpy(algorithms(name), invalid=2, sample_weights=weights)


@pytest.mark.parametrize(("name", "plain"), [("decoupled", "discrete"), ("vtrace", "box")])
def test_on_its_own_steps_a_corrected_objective_is_plain_ppo(algorithms, name, plain):
    corrected, plain = algorithms(name), algorithms(plain)
    t = random_trajectories(plain, 3)
    log_probs, values = corrected.evaluate(t)
    t = dataclasses.replace(t.with_values(values), log_probs=log_probs)
    for ppo in (corrected, plain):
        metrics = ppo.update(t, 0.0, np.random.default_rng(0))
        assert metrics["ratio_error"] < 1e-5
    assert "behaviour_kl" not in metrics
    for weight, expected in plain.policy.arrays().items():
        np.testing.assert_allclose(corrected.policy.arrays()[weight], expected, atol=1e-5)


def test_importance_weights_are_the_ratio_up_to_the_cap():
    proximal = np.array([0.0, -1.0, -1.0, -1.0, 0.0], np.float32)
    behaviour = np.array([0.0, -2.0, -0.5, -9.0, -np.inf], np.float32)
    weights = importance_weights(proximal, behaviour, 5.0)
    np.testing.assert_allclose(weights, [1, np.e, np.exp(-0.5), 5, 5], rtol=1e-6)


def test_the_distance_of_the_acting_policy_is_reported(algorithms):
    ppo = algorithms("decoupled")
    t = random_trajectories(ppo, 2, invalid=3)
    log_probs, _ = ppo.evaluate(t)
    t.log_probs[~t.valid] = 40.0
    log_ratio = (log_probs - t.log_probs)[t.valid].astype(np.float64)
    metrics = ppo.update(t, 0.0, np.random.default_rng(0))
    assert metrics["behaviour_kl"] == pytest.approx(
        np.mean(np.exp(log_ratio) - 1 - log_ratio), rel=1e-3
    )
    assert metrics["importance_max"] == pytest.approx(np.exp(log_ratio.max()), rel=1e-4)


def test_the_evaluator_gives_the_same_for_any_number_of_rows(algorithms, monkeypatch):
    ppo = algorithms("box")
    t = random_trajectories(ppo, 4)
    whole = PolicyEvaluator(ppo.policy)(t)
    monkeypatch.setattr("msrl_accel.algorithms.on_policy.CHUNK", 8)  # 21 rows: 8, 8 and 5
    with count_compilations() as compiled:
        parts = PolicyEvaluator(ppo.policy)(t)
    assert compiled.count == 1
    reference = NumpyPPO(ppo)
    expected = reference.evaluate(
        reference.flat, t.observations[0].reshape(-1, 3), t.raw_actions.reshape(-1, 2)
    )
    for result in (whole, parts):
        np.testing.assert_allclose(result[0].ravel(), expected[0], atol=1e-5)
        np.testing.assert_allclose(result[1].ravel(), expected[2], atol=1e-5)


@pytest.mark.parametrize("name", ["discrete", "box", "kl", "decoupled"])
def test_a_look_sees_what_the_policy_says_and_changes_nothing(algorithms, name):
    ppo = algorithms(name)
    ppo.update(random_trajectories(ppo, 8), 0.0, np.random.default_rng(0))  # moments other than 0
    before = ppo.policy.arrays(), ppo.state()
    t = random_trajectories(ppo, 9, invalid=4)
    log_probs, values = ppo.evaluate(t)
    # As if an engine had collected it, which rounds differently.
    t = dataclasses.replace(t.with_values(values + 1e-6), log_probs=log_probs - 1e-6)
    seen = ppo.look(t)
    for found, expected in zip(seen, (log_probs, values)):
        np.testing.assert_allclose(found[t.valid], expected[t.valid], atol=2e-6)
    assert (seen[0] != t.log_probs)[t.valid].all()
    for name, array in ppo.policy.arrays().items():
        np.testing.assert_array_equal(array, before[0][name])
    for name in ("moment1", "moment2", "adam_steps"):
        np.testing.assert_array_equal(ppo.state()[name], before[1][name])


def test_the_learning_rate_can_be_scaled(algorithms):
    for scale in (1.0, 0.5):
        ppo = algorithms("discrete")
        before = ppo.policy.arrays()
        metrics = ppo.update(
            random_trajectories(ppo, 0), 0.0, np.random.default_rng(0), learning_rate_scale=scale
        )
        assert metrics["learning_rate"] == pytest.approx(0.01 * scale)
        moved = max(
            np.abs(after - before[name]).max() for name, after in ppo.policy.arrays().items()
        )
        assert moved <= 6 * 0.01 * scale * 1.01  # Adam's first steps are of about that size


def test_rounding_takes_no_gradient_from_values_within_the_clip(algorithms):
    # One of these values v, near its old one o, has o + (v - o) != v in float32.
    check_against_numpy(algorithms("discrete"), invalid=0, seed=45)


def test_too_large_a_kl_stops_the_update(algorithms):
    ppo = algorithms("kl")
    metrics, seen = check_against_numpy(ppo, invalid=0)
    assert metrics["early_stop"] == 1
    assert len(seen) == metrics["updates"] == 3
    assert [s["approx_kl"] > 0.075 for s in seen] == [False, False, True]


def test_padding_takes_no_part_and_nothing_is_compiled_anew(algorithms):
    ppo = algorithms("discrete")
    ppo.update(random_trajectories(ppo, 0), 0.0, np.random.default_rng(0))
    with count_compilations() as compiled:
        for invalid in range(20):
            ppo = algorithms("discrete")
            t = random_trajectories(ppo, 1, invalid)
            # What the unusable rows hold must not matter.
            t.observations[0][~t.valid] = 1e6
            t.log_probs[~t.valid] = -50.0
            metrics = ppo.update(t, invalid / 20, np.random.default_rng(0))
            assert metrics["grad_non_finite"] == 0
            assert all(np.isfinite(w).all() for w in ppo.policy.arrays().values())
    assert compiled.count == 0


def test_unusable_rows_have_no_effect(algorithms):
    results = []
    for rubbish in (0.0, 1e3):
        ppo = algorithms("box")
        t = random_trajectories(ppo, 3, invalid=4)
        for array in (t.observations[0], t.raw_actions, t.log_probs):
            array[~t.valid] = rubbish
        ppo.update(t, 0.0, np.random.default_rng(0))
        results.append(ppo.policy.arrays())
    for name, value in results[0].items():
        np.testing.assert_array_equal(results[1][name], value)


def test_the_compilation_counter_notices_a_new_shape_and_a_tuple_argument():
    class Double(nn.Cell):
        def construct(self, x):
            return x[0] * 2

    cell = Double()
    with count_compilations() as compiled:
        cell(Tensor(np.zeros(3, np.float32)))
        cell(Tensor(np.ones(3, np.float32)))
        assert compiled.count == 1
        cell(Tensor(np.zeros(4, np.float32)))
        assert compiled.count == 2
        for _ in range(3):
            cell((Tensor(np.zeros(3, np.float32)),))
        assert compiled.count == 5


def test_collecting_and_updating_compile_once_each_and_agree():
    env = make_vector("CartPole-v1", 4, backend="batched")
    ppo = make_ppo(
        env.action_space,
        env.observation_space,
        n_steps=16,
        n_envs=4,
        **{
            "ppo.learning_rate_schedule": "linear",
            "ppo.clip_range_schedule": "linear",
            "ppo.batch_size": 24,
            "policy.normalize_observations": True,
        },
    )
    statistics = ObservationStatistics(ppo.policy)
    spec = PolicySpec.from_spaces(env.observation_space, env.action_space)
    collector = Collector(env, GraphRuntime(ppo.policy), 16, np.random.default_rng(0))
    collector.reset(0)
    rng = np.random.default_rng(1)
    with count_compilations() as compiled:
        for i in range(8):
            trajectories = collector.collect()
            metrics = ppo.update(trajectories, i / 8, rng)
            # New constants in both graphs, which must go on to agree.
            statistics.update(tuple(map(trajectories.flat, trajectories.observations)))
            assert metrics["ratio_error"] < 1e-5
            assert metrics["approx_kl"] >= 0
            assert 0 <= metrics["clip_fraction"] <= 1
            assert 0 <= metrics["entropy"] <= np.log(2) + 1e-6
            assert metrics["learning_rate"] == pytest.approx(0.01 * (1 - i / 8))
            assert metrics["clip_range"] == pytest.approx(0.2 * (1 - i / 8))
        assert compiled.count == 2  # acting and updating
        for _ in range(3):  # one more for each new batch size
            collector.runtime.act((np.zeros((9, 4)),), spec.zero_noise((9,)))
        assert compiled.count == 3
    assert metrics["updates"] == 8 * 2 * 3
    seen = statistics.statistics["observation"]
    assert seen.count == 8 * 64
    np.testing.assert_allclose(
        ppo.policy.arrays()["normalizer.observation.inverse_std"],
        1 / np.sqrt(seen.var + 1e-8),
        rtol=1e-6,
    )


def test_rewards_that_are_not_finite_never_reach_the_weights(algorithms, caplog):
    ppo = algorithms("box")
    before = ppo.policy.arrays()
    t = random_trajectories(ppo, 0)
    t.rewards[:] = np.nan
    metrics = ppo.update(t, 0.0, np.random.default_rng(0))
    assert metrics["grad_non_finite"] == 6
    assert "not finite" in caplog.text
    for name, value in ppo.policy.arrays().items():
        np.testing.assert_array_equal(value, before[name])


def test_a_restored_algorithm_continues_bit_for_bit(algorithms):
    def run(restart):
        ppo = algorithms("discrete")
        ppo.update(random_trajectories(ppo, 5), 0.0, np.random.default_rng(0))
        if restart:
            arrays, state = ppo.policy.arrays(), ppo.state()
            t = random_trajectories(ppo, 9)
            ppo.update(t, 0.0, np.random.default_rng(7))  # spoil the memory
            ppo.policy.load_arrays(arrays)
            ppo.restore(state)
        ppo.update(random_trajectories(ppo, 6), 0.0, np.random.default_rng(1))
        return ppo

    whole = run(restart=False)
    arrays, state = whole.policy.arrays(), whole.state()
    again = run(restart=True)
    assert again.minibatches.adam_steps == state["adam_steps"] == 12
    for name, value in arrays.items():
        np.testing.assert_array_equal(again.policy.arrays()[name], value)
    for name in ("moment1", "moment2"):
        np.testing.assert_array_equal(again.state()[name], state[name])


def test_a_batch_smaller_than_a_minibatch_works():
    ppo = make_ppo(DISCRETE, n_steps=T, n_envs=N, **{"ppo.batch_size": 4096})
    assert ppo.config.batch_size == T * N


@pytest.mark.parametrize("invalid", [0, 6])
def test_explained_variance_is_of_the_valid_rows(algorithms, invalid):
    t = random_trajectories(algorithms("discrete"), 2, invalid)
    targets = t.values + np.random.default_rng(0).normal(size=(T, N)).astype(np.float32)
    kept_targets, kept_values = targets[t.valid], t.values[t.valid]
    expected = 1 - np.var(kept_targets - kept_values) / np.var(kept_targets)
    assert explained_variance(t, (targets - t.values).ravel()) == pytest.approx(expected, rel=1e-4)
    assert explained_variance(t, np.zeros(T * N)) == pytest.approx(1.0)
    t.values[:] = 2.0
    assert np.isnan(explained_variance(t, np.zeros(T * N)))
