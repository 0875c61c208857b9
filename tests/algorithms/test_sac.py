"""SAC against the same computation in NumPy, and what a user would notice."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces
from mindspore import Tensor, nn, ops
from numpy_sac import NumpySAC
from policy_helpers import count_compilations, decided_arrays, numerical_gradient

from msrl_accel.algorithms.sac import SAC, ActorLoss, SquaredErrors, sac_metrics
from msrl_accel.config import resolve_config
from msrl_accel.errors import ConfigError, SpaceError, TrainingError
from msrl_accel.replay import ReplayBatch
from msrl_accel.runtime.graph import GraphRuntime
from msrl_accel.spaces import PolicySpec

pytestmark = pytest.mark.usefixtures("graph_mode")

BATCH = 6
OBSERVATION = spaces.Box(-np.inf, np.inf, (3,), np.float64)
ACTION = spaces.Box(np.array([-1.0, 0.0]), np.array([3.0, 0.5]), dtype=np.float64)
SPEC = PolicySpec.from_spaces(OBSERVATION, ACTION)


def make_sac(steps=1, action_space=ACTION, observation_space=OBSERVATION, **values):
    config = resolve_config(
        "sac",
        "Test-v0",
        tuned=False,
        seed=4,
        **{
            "policy.hidden_sizes": (5, 4),
            "sac.batch_size": BATCH,
            "sac.gradient_steps": steps,
            "sac.train_freq": steps,
            "sac.learning_rate": 0.01,
            "sac.adam_epsilon": 1e-3,  # so that no sign of a vanishing gradient matters
            "sac.tau": 0.1,
            **values,
        },
    )
    sac = SAC(config, PolicySpec.from_spaces(observation_space, action_space))
    # Heads and biases as after training: decided actions, on both sides of the bounds of log_std.
    arrays = decided_arrays(sac.policy, np.random.default_rng(1), 0.5)
    arrays["actor.bias"][-1] = 2.0
    sac.policy.load_arrays(arrays)
    return sac


def random_batch(sac, steps=1, seed=0):
    rng = np.random.default_rng(seed)
    shape = (steps, BATCH)

    def observations():
        return tuple(
            rng.integers(0, 256, (*shape, *o.shape)).astype(np.uint8)
            if o.dtype == "uint8"
            else rng.normal(size=(*shape, *o.shape)).astype(np.float32)
            for o in sac.policy.spec.observations
        )

    return ReplayBatch(
        observations=observations(),
        actions=rng.uniform(-1, 1, (*shape, sac.policy.spec.action.size)).astype(np.float32),
        rewards=rng.normal(0, 2, shape).astype(np.float32),
        next_observations=observations(),
        discounts=np.where(rng.random(shape) < 0.3, 0.0, 0.9).astype(np.float32),
        weights=rng.uniform(0.2, 1.0, shape).astype(np.float32),
        indices=np.zeros(shape, np.int64),
    )


def noise_of(sac, batch):
    """The noise of the next update."""
    rng = np.random.default_rng()
    rng.bit_generator.state = sac.rng.bit_generator.state
    return rng.standard_normal((2, *batch.actions.shape), np.float32)


CASES = {
    "one step": {},
    "loop": {"steps": 3},
    "three layers of tanh": {
        "policy.hidden_sizes": (4, 5, 3),
        "policy.activation": "tanh",
        "sac.temperature": 0.2,
    },
    "one layer, normalised": {
        "policy.hidden_sizes": (6,),
        "policy.normalize_observations": True,
        "sac.target_entropy": 0.5,
        "sac.initial_temperature": 0.3,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_updates_equal_sac_in_numpy(case):
    values = dict(CASES[case])
    steps = values.pop("steps", 1)
    sac = make_sac(steps, **values)
    if values.get("policy.normalize_observations"):
        mean, variance = np.array([0.5, -1.0, 0.1]), np.array([4.0, 0.1, 9.0])
        sac.policy.set_normalizer("observation", mean, variance)
    reference = NumpySAC(sac)
    for k in range(3):
        batch = random_batch(sac, steps, seed=k)
        noise = noise_of(sac, batch)
        metrics, errors = sac.update(batch, 0.0)
        seen = reference.update(batch, noise)
        arrays = sac.policy.arrays()
        for name, value in zip(reference.names, reference.actor.split(reference.actor.flat)):
            np.testing.assert_allclose(arrays[name], value, atol=2e-5, err_msg=name)
        for weights, flat in (
            (sac.graph.critic_weights, reference.critic.flat),
            (sac.graph.target_weights, reference.target),
        ):
            plain = reference.plain_critics(weights)
            for got, value in zip(plain, reference.critic.split(flat)):
                np.testing.assert_allclose(got, value, atol=2e-5)
        np.testing.assert_allclose(sac.graph.log_alpha.asnumpy(), reference.log_alpha, atol=1e-6)
        for i, (q, y, log_prob, _) in enumerate(seen):
            np.testing.assert_allclose(errors[i], np.abs(q - y).mean(axis=0), atol=1e-4)
            records = sac.graph.records.asnumpy()[i]
            np.testing.assert_allclose(records[3], log_prob, rtol=1e-4, atol=1e-4)
        expected = np.mean(
            [
                0.5 * np.mean(batch.weights[i] * ((q - y) ** 2).sum(axis=0))
                for i, (q, y, _, _) in enumerate(seen)
            ]
        )
        assert metrics["critic_loss"] == pytest.approx(expected, rel=1e-4)
        entropy = -np.mean([log_prob for _, _, log_prob, _ in seen])
        assert metrics["entropy"] == pytest.approx(entropy, rel=1e-4)
    assert sac.steps == metrics["updates"] == 3 * steps


def test_a_restored_update_continues_as_the_uninterrupted_one():
    one = make_sac()
    one.update(random_batch(one, seed=0), 0.0)
    state, arrays = one.state(), one.policy.arrays()
    one.update(random_batch(one, seed=1), 0.0)
    other = make_sac()
    other.update(random_batch(other, seed=5), 0.0)
    other.policy.load_arrays(arrays)
    other.restore(state)
    other.update(random_batch(other, seed=1), 0.0)
    for name, value in one.policy.arrays().items():
        np.testing.assert_array_equal(other.policy.arrays()[name], value, err_msg=name)
    left, right = one.state(), other.state()
    for name in ("critics", "targets", "moments1", "moments2"):
        for key, value in left[name].items():
            np.testing.assert_array_equal(right[name][key], value)
    assert left["log_alpha"] == right["log_alpha"]
    assert (left["steps"], left["rng"]) == (right["steps"], right["rng"])


def test_updates_compile_once():
    sac = make_sac(2)
    with count_compilations() as compiled:
        for k in range(3):
            sac.update(random_batch(sac, 2, seed=k), 0.0)
        assert compiled.count == 1


class LossGraph(nn.Cell):
    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def construct(self, *inputs):
        return self.loss(*inputs)


def gradients_of(loss, arrays, positions):
    tensors = [Tensor(np.asarray(a, np.float32)) for a in arrays]
    value, gradients = ops.value_and_grad(LossGraph(loss), positions)(*tensors)
    return float(value.asnumpy()), [g.asnumpy() for g in gradients]


def test_the_critic_loss_and_its_gradient_equal_the_definition():
    rng = np.random.default_rng(0)
    q, y = rng.normal(size=(2, 1, 5)), rng.normal(size=(1, 1, 5))
    weight = rng.uniform(0.1, 1, (1, 1, 5)) / 5

    def loss(q):
        return sum(0.5 * np.sum(weight[0] * (q[i] - y[0]) ** 2) for i in range(2))

    value, (gradient, _) = gradients_of(SquaredErrors(), (q, y, weight), (0, 1))
    assert value == pytest.approx(loss(q), rel=1e-5)
    np.testing.assert_allclose(gradient, numerical_gradient(loss, q), rtol=1e-4, atol=1e-6)


def test_the_actor_loss_and_its_gradient_equal_the_definition():
    rng = np.random.default_rng(1)
    q, log_prob, alpha = rng.normal(size=(2, 1, 5)), rng.normal(size=5), np.array([0.3])

    def loss(q, log_prob):
        return np.mean(alpha * log_prob - np.minimum(q[0], q[1])[0])

    value, (d_q, d_log_prob) = gradients_of(ActorLoss(5), (q, log_prob, alpha), (0, 1))
    assert value == pytest.approx(loss(q, log_prob), rel=1e-5)
    expected = numerical_gradient(lambda x: loss(x, log_prob), q)
    np.testing.assert_allclose(d_q, expected, rtol=1e-4, atol=1e-6)
    expected = numerical_gradient(lambda x: loss(q, x), log_prob)
    np.testing.assert_allclose(d_log_prob, expected, rtol=1e-4, atol=1e-6)


def test_of_equal_critics_one_gets_the_gradient():
    q = np.zeros((2, 1, 4))
    _, (d_q, _) = gradients_of(ActorLoss(4), (q, np.zeros(4), np.ones(1)), (0, 1))
    np.testing.assert_allclose(d_q.sum(axis=0), -0.25)


@pytest.fixture(scope="module")
def plain():
    """A compiled update and its first state, which tests return it to."""
    sac = make_sac()
    return sac, sac.policy.arrays(), sac.state()


@pytest.fixture
def sac(plain):
    sac, arrays, state = plain
    sac.policy.load_arrays(arrays)
    sac.restore(state)
    return sac


def test_targets_follow_the_critics_slowly(sac):
    before = sac.state()
    sac.update(random_batch(sac), 0.0)
    after = sac.state()
    for key, target in after["targets"].items():
        moved = 0.9 * before["targets"][key] + 0.1 * after["critics"][key]  # tau = 0.1
        np.testing.assert_allclose(target, moved, atol=1e-6)
    change = np.abs(after["critics"]["0"] - before["critics"]["0"]).max()
    assert np.abs(after["targets"]["0"] - before["targets"]["0"]).max() == pytest.approx(
        0.1 * change, rel=1e-3
    )


@pytest.mark.parametrize(("log_std", "rises"), [(-6.0, True), (-0.3, False)])
def test_too_little_entropy_raises_the_temperature_and_too_much_lowers_it(sac, log_std, rises):
    # Means of 0 and one standard deviation everywhere: entropy far below, or above, -2.
    arrays = sac.policy.arrays()
    arrays["actor.weight"] = np.zeros_like(arrays["actor.weight"])
    arrays["actor.bias"] = np.array([0, 0, log_std, log_std], np.float32)
    sac.policy.load_arrays(arrays)
    before = float(sac.graph.log_alpha.asnumpy()[0])
    metrics, _ = sac.update(random_batch(sac), 0.0)
    assert (metrics["entropy"] < -2) == rises
    assert (float(sac.graph.log_alpha.asnumpy()[0]) > before) == rises


def test_a_fixed_temperature_stays():
    sac = make_sac(**{"sac.temperature": 0.2})
    for k in range(2):
        metrics, _ = sac.update(random_batch(sac, seed=k), 0.0)
        assert metrics["temperature"] == pytest.approx(0.2)


def test_the_learning_rate_falls_where_it_is_asked_to():
    sac = make_sac(**{"sac.learning_rate_schedule": "linear"})
    metrics, _ = sac.update(random_batch(sac), 0.75)
    assert metrics["learning_rate"] == pytest.approx(0.0025)


def test_rows_of_no_weight_do_not_move_the_critics(sac):
    batch = random_batch(sac)
    batch.weights[:, 3:] = 0.0
    state, arrays = sac.state(), sac.policy.arrays()
    results = []
    for rubbish in (0.0, 100.0):
        sac.policy.load_arrays(arrays)
        sac.restore(state)
        batch.rewards[:, 3:] = rubbish
        sac.update(batch, 0.0)
        results.append(sac.state()["critics"])
    for key, value in results[0].items():
        np.testing.assert_array_equal(results[1][key], value)


def test_training_that_diverges_says_so(sac):
    batch = random_batch(sac)
    batch.rewards[0, 0] = np.inf
    with pytest.raises(TrainingError, match=r"learning_rate = 0\.01"):
        sac.update(batch, 0.0)


class Action(nn.Cell):
    def __init__(self, policy):
        super().__init__(auto_prefix=False)
        self.distribution = policy.distribution

    def construct(self, raw):
        return self.distribution.action(raw)


def test_warm_up_actions_are_those_the_policy_would_take(sac):
    # Stored in [-1, 1], acted in environment units: both must be the same action.
    raw, actions = SPEC.random_actions(np.random.default_rng(0), 500)
    assert raw.min() < -0.9
    assert raw.max() > 0.9
    np.testing.assert_allclose(actions, [1.0, 0.25] + raw * [2.0, 0.25], atol=1e-6)
    in_graph = Action(sac.policy)(Tensor(raw)).asnumpy()
    np.testing.assert_allclose(in_graph, actions, atol=1e-6)


BOUNDS = {
    "asymmetric and per dimension": ACTION,
    "from 0 to 1": spaces.Box(0.0, 1.0, (3,), np.float32),
    "matrix of float64": spaces.Box(-0.1, 0.7, (2, 2), np.float64),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_actions_are_within_the_bounds_however_extreme(name):
    space = BOUNDS[name]
    policy = make_sac(action_space=space).policy
    runtime = GraphRuntime(policy)
    spec, rng = policy.spec, np.random.default_rng(0)
    observations = (rng.normal(0, 100, (64, 3)).astype(np.float32),)
    for noise in (spec.zero_noise((64,)), 10 * spec.draw_noise(rng, (64,))):
        result = runtime.act(observations, noise)
        assert np.abs(result.raw_action).max() <= 1
        assert all(space.contains(a) for a in spec.to_environment(result.action))
        assert np.isfinite(result.log_prob).all()


def test_the_policy_has_no_value():
    policy = make_sac().policy
    assert policy.output_names == ("action", "log_prob", "raw_action", "mean", "log_std")
    result = GraphRuntime(policy).act((np.zeros((2, 3)),), policy.spec.zero_noise((2,)))
    assert result.value is None
    assert [len(x) for x in result.outputs()] == [2] * 5


def test_the_exported_value_is_the_smaller_q_of_the_action_taken(sac):
    sac.update(random_batch(sac), 0.0)
    config = resolve_config("sac", "T-v0", tuned=False, **{"policy.hidden_sizes": (5, 4)})
    valued = SAC.with_critic(config, sac.policy, sac.state())
    assert valued.output_names[2] == "value"
    spec, rng = valued.spec, np.random.default_rng(0)
    observations, noise = rng.normal(size=(7, 3)), spec.draw_noise(rng, (7,))
    plain, with_value = (GraphRuntime(p).act((observations,), noise) for p in (sac.policy, valued))
    np.testing.assert_array_equal(with_value.action, plain.action)
    reference = NumpySAC(sac)
    q = reference.q(reference.critic.flat, observations, plain.raw_action)
    np.testing.assert_allclose(with_value.value, q.min(axis=0), atol=1e-5)


def test_spaces_that_sac_cannot_act_in_are_refused():
    with pytest.raises(SpaceError, match="discrete"):
        make_sac(action_space=spaces.Discrete(3))
    for low, high in ((-np.inf, 1.0), (0.0, np.inf), (-np.inf, np.inf)):
        with pytest.raises(SpaceError, match="RescaleAction"):
            make_sac(action_space=spaces.Box(low, high, (2,), np.float32))


def test_critics_without_a_hidden_layer_are_refused():
    with pytest.raises(ConfigError, match="hidden_sizes"):
        make_sac(**{"policy.hidden_sizes": ()})


def test_images_train_encoders_of_their_own():
    image = spaces.Dict(
        {"camera": spaces.Box(0, 255, (8, 8, 1), np.uint8), "speed": spaces.Box(-1, 1, (2,))}
    )
    sac = make_sac(observation_space=image)
    before, arrays = sac.state()["critics"], sac.policy.arrays()
    _, errors = sac.update(random_batch(sac), 0.0)
    assert np.isfinite(errors).all()
    after = sac.state()["critics"]
    for i in range(sac.graph.n_encoder):
        assert np.abs(after[str(i)] - before[str(i)]).max() > 0
    for name, value in sac.policy.arrays().items():
        assert np.abs(value - arrays[name]).max() > 0, name


def test_metrics_and_priorities_of_a_known_record():
    records = np.zeros((1, 6, 2), np.float32)
    records[0, :3] = [[1.0, 2.0], [3.0, 0.0], [2.0, 1.0]]  # Q, Q, y
    records[0, 3:] = [[-1.0, -3.0], [5.0, 1.0], [4.0, 2.0]]  # log pi, Q, Q of new actions
    metrics, errors = sac_metrics(records, np.array([[1.0, 0.5]], np.float32), 0.1)
    np.testing.assert_allclose(errors, [[1.0, 1.0]])
    assert metrics["critic_loss"] == pytest.approx(0.5 * np.mean([1 + 1, 0.5 * (1 + 1)]))
    assert metrics["actor_loss"] == pytest.approx(np.mean([-0.1 - 4, -0.3 - 1]))
    assert metrics["entropy"] == 2.0
    assert metrics["q_mean"] == 1.5
