from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from gymnasium import spaces
from mindspore import Tensor, nn
from policy_helpers import ACTION_SPACES, VECTOR, options, spec_of

from msrl_accel.acting import ActingPolicy
from msrl_accel.errors import PolicyError
from msrl_accel.policy import Policy
from msrl_accel.runtime.graph import GraphRuntime

pytestmark = pytest.mark.usefixtures("graph_mode")

MIXED = spaces.Dict(
    {
        "position": spaces.Box(-np.inf, np.inf, (2, 2), np.float64),
        "camera": spaces.Box(0, 255, (8, 8, 3), np.uint8),
        "battery": spaces.Box(0, 1, (), np.float32),
        "tile": spaces.Box(0, 255, (2, 2), np.uint8),
    }
)


class Evaluate(nn.Cell):
    """What the loss sees, as a graph of its own."""

    def __init__(self, policy):
        super().__init__(auto_prefix=False)
        self.policy = policy

    def construct(self, raw, *observations):
        return self.policy.evaluate(self.policy.weights, observations, raw)


@pytest.fixture(scope="module")
def runtimes():
    return {
        name: GraphRuntime(Policy(spec_of(space), options(log_std_init=-0.5), seed=1))
        for name, space in ACTION_SPACES.items()
    }


@pytest.fixture(scope="module")
def mixed():
    spec = spec_of(ACTION_SPACES["discrete"], MIXED)
    return GraphRuntime(Policy(spec, options(normalize_observations=True), seed=2))


def observations_of(space, rows, seed=0):
    space.seed(seed)
    spec = spec_of(ACTION_SPACES["discrete"], space)
    samples = [spec.as_tuple(space.sample()) for _ in range(rows)]
    return tuple(np.stack(entry) for entry in zip(*samples))


def numpy_forward(arrays, x):
    """Policy head and value of a separate-torso tanh policy in float64."""
    w = {name: value.astype(np.float64) for name, value in arrays.items()}
    hidden = [np.tanh(x @ w["torso.0.weight"][k].T + w["torso.0.bias"][k]) for k in range(2)]
    head = hidden[0] @ w["actor.weight"].T + w["actor.bias"]
    return head, (hidden[1] @ w["critic.weight"].T + w["critic.bias"])[:, 0]


@pytest.mark.parametrize("name", ACTION_SPACES)
def test_head_and_value_equal_matrix_products(runtimes, name):
    runtime = runtimes[name]
    x = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)
    acted = runtime.act((x,), runtime.spec.zero_noise((3,)))
    head, value = numpy_forward(runtime.policy.arrays(), x)
    np.testing.assert_allclose(acted.parameters[0], head, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(acted.value, value, rtol=1e-4, atol=1e-5)
    if name == "box":
        np.testing.assert_array_equal(acted.parameters[1], np.float32(-0.5))
    assert runtime.policy.output_names[:4] == ("action", "log_prob", "value", "raw_action")


@pytest.mark.parametrize("name", ["discrete", "multi_discrete", "multi_binary", "box"])
def test_the_loss_sees_the_log_prob_of_the_rollout(runtimes, name):
    runtime = runtimes[name]
    rng = np.random.default_rng(1)
    x = rng.normal(size=(3, 3)).astype(np.float32)
    acted = runtime.act((x,), runtime.spec.draw_noise(rng, (3,)))
    log_prob, _, value = Evaluate(runtime.policy)(Tensor(acted.raw_action), Tensor(x))
    np.testing.assert_allclose(log_prob.asnumpy(), acted.log_prob, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(value.asnumpy(), acted.value, rtol=1e-5, atol=1e-6)


def test_rows_do_not_depend_on_the_batch(mixed):
    observations = observations_of(MIXED, 32)
    noise = mixed.spec.draw_noise(np.random.default_rng(0), (32,))
    whole = mixed.act(observations, noise)
    for rows in (1, 3):
        part = mixed.act(tuple(x[:rows] for x in observations), noise[:rows])
        np.testing.assert_array_equal(part.action, whole.action[:rows])
        for a, b in [
            (part.log_prob, whole.log_prob),
            (part.value, whole.value),
            (part.parameters[0], whole.parameters[0]),
        ]:
            np.testing.assert_allclose(a, b[:rows], rtol=1e-5, atol=1e-5)


def test_the_deterministic_action_is_the_mode_and_has_the_spaces_dtype(runtimes):
    x = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)
    for name, runtime in runtimes.items():
        policy, space = ActingPolicy(runtime), ACTION_SPACES[name]
        actions = policy.act(x)
        np.testing.assert_array_equal(actions, policy.act(x))
        assert actions.dtype == space.dtype
        assert actions.shape == (3, *space.shape)
        head, _ = numpy_forward(runtime.policy.arrays(), x)
        if name == "discrete":
            np.testing.assert_array_equal(actions, head.argmax(axis=1) + 2)
        if name == "box":
            low, high = space.low, space.high
            expected = np.clip((low + high) / 2 + head * (high - low) / 2, low, high)
            np.testing.assert_allclose(actions, expected, rtol=1e-5, atol=1e-6)


def test_sampled_actions_are_reproducible_and_vary(runtimes):
    x = np.zeros((32, 3), np.float32)
    first, second, other = (
        ActingPolicy(runtimes["box"], seed).act(x, deterministic=False) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, other)
    assert len(np.unique(first)) > 20


@pytest.mark.parametrize("name", ["discrete", "box"])
def test_one_observation_gives_one_action_of_the_space(runtimes, name):
    action = ActingPolicy(runtimes[name]).act(np.zeros(3, np.float32))
    assert ACTION_SPACES[name].contains(action)


def test_normalisation_is_part_of_the_graph():
    # The value of a linear critic without torso is a plain function of its inputs.
    space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    policy = Policy(
        spec_of(ACTION_SPACES["discrete"], space),
        options(hidden_sizes=(), normalize_observations=True, observation_clip=2.0),
        seed=0,
    )
    mean, variance = np.array([100.0, -1.0, 0.0]), np.array([25.0, 0.0, 1e-4])
    policy.set_normalizer("observation", mean, variance)
    x = np.array([[104.0, -1.0, 0.015], [200.0, -1.0, -0.5], [90.0, 0.0, 0.0]])
    normalised = np.clip((x - mean) / np.sqrt(variance + 1e-8), -2.0, 2.0)
    arrays = policy.arrays()
    expected = normalised @ arrays["critic.weight"][0] + arrays["critic.bias"]
    value = GraphRuntime(policy).act((x,), np.zeros((3, 4), np.float32)).value
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)


def test_new_statistics_reach_the_compiled_graph(mixed):
    observations = observations_of(MIXED, 3)
    noise = mixed.spec.zero_noise((3,))
    before = mixed.act(observations, noise).value
    mixed.policy.set_normalizer("position", np.full((2, 2), 0.5), np.full((2, 2), 4.0))
    after = mixed.act(observations, noise).value
    mixed.policy.set_normalizer("position", np.zeros((2, 2)), np.ones((2, 2)))
    assert not np.allclose(before, after)
    np.testing.assert_allclose(mixed.act(observations, noise).value, before, atol=1e-6)


def test_uint8_tensors_are_scaled_to_one_and_not_normalised():
    space = spaces.Box(0, 255, (2, 2, 1), np.uint8)  # too small for convolutions
    policy = Policy(
        spec_of(ACTION_SPACES["discrete"], space),
        options(hidden_sizes=(), normalize_observations=True),
        seed=0,
    )
    x = np.array([[0, 255, 51, 102], [1, 2, 3, 4]], np.uint8).reshape(2, 2, 2, 1)
    arrays = policy.arrays()
    assert not any(name.startswith("normalizer") for name in arrays)
    expected = x.reshape(2, 4) / 255.0 @ arrays["critic.weight"][0] + arrays["critic.bias"]
    value = GraphRuntime(policy).act((x,), np.zeros((2, 4), np.float32)).value
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


def test_every_entry_of_a_dict_observation_is_read(mixed):
    observations = observations_of(MIXED, 3)
    noise = mixed.spec.zero_noise((3,))
    value = mixed.act(observations, noise).value
    assert [o.name for o in mixed.spec.observations] == ["battery", "camera", "position", "tile"]
    for i, x in enumerate(observations):
        changed = x + np.ones_like(x)
        others = (*observations[:i], changed, *observations[i + 1 :])
        assert not np.allclose(mixed.act(others, noise).value, value, atol=1e-6)


def test_a_dict_observation_acts_by_name(mixed):
    MIXED.seed(5)
    observation = MIXED.sample()
    reversed_order = dict(reversed(list(observation.items())))
    policy = ActingPolicy(mixed)
    assert policy.act(observation) == policy.act(reversed_order)
    assert ACTION_SPACES["discrete"].contains(policy.act(observation))


@pytest.mark.parametrize(
    ("observation", "match"),
    [
        (np.zeros((2, 4), np.float32), r"'observation' has shape \(2, 4\)"),
        (np.zeros((2, 3, 3), np.float32), "has shape"),
    ],
)
def test_observations_of_another_shape_are_refused(runtimes, observation, match):
    with pytest.raises(PolicyError, match=match):
        ActingPolicy(runtimes["discrete"]).act(observation)


def test_float_images_are_refused(mixed):
    observations = tuple(x.astype(np.float32) for x in observations_of(MIXED, 3))
    with pytest.raises(PolicyError, match=r"'camera'.*uint8"):
        mixed.act(observations, mixed.spec.zero_noise((3,)))
    with pytest.raises(PolicyError, match="noise has shape"):
        mixed.act(observations_of(MIXED, 3), np.zeros((3, 9), np.float32))


def test_loading_weights_copies_the_policy(runtimes):
    source = runtimes["discrete"].policy
    target = Policy(source.spec, options(), seed=99)
    assert not np.array_equal(target.arrays()["actor.weight"], source.arrays()["actor.weight"])
    target.load_arrays(source.arrays())
    for name, value in source.arrays().items():
        np.testing.assert_array_equal(target.arrays()[name], value)


def test_weights_of_another_policy_are_refused_and_change_nothing(runtimes):
    policy = Policy(spec_of(ACTION_SPACES["discrete"]), options(), seed=0)
    before = policy.arrays()
    missing = {name: value + 1 for name, value in before.items() if name != "critic.bias"}
    with pytest.raises(PolicyError, match=r"'critic\.bias' is missing"):
        policy.load_arrays(missing)
    reshaped = {**{n: v + 1 for n, v in before.items()}, "critic.bias": np.zeros(2)}
    with pytest.raises(PolicyError, match=r"'critic\.bias' has shape \(2,\)"):
        policy.load_arrays(reshaped)
    for name, value in before.items():
        np.testing.assert_array_equal(policy.arrays()[name], value)


def test_arrays_are_copies(runtimes):
    policy = Policy(spec_of(ACTION_SPACES["box"]), options(), seed=0)
    arrays = policy.arrays()
    arrays["log_std"][:] = 7.0
    assert not policy.arrays()["log_std"].any()


def test_torsos_are_separate_for_vectors_and_shared_for_images():
    image = spaces.Box(0, 255, (8, 8, 1), np.uint8)
    discrete = ACTION_SPACES["discrete"]
    for space, sharing, members in [
        (VECTOR, "auto", 2),
        (VECTOR, "shared", 1),
        (image, "auto", 1),
        (image, "separate", 2),
    ]:
        policy = Policy(spec_of(discrete, space), options(torso_sharing=sharing), seed=0)
        assert policy.torso.members == members


def test_initial_weights_depend_on_the_seed_alone():
    program = (
        "import json, sys, zlib\n"
        f"sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "from policy_helpers import ACTION_SPACES, options, spec_of\n"
        "from test_policy import MIXED\n"
        "from msrl_accel.policy import Policy\n"
        "spec = spec_of(ACTION_SPACES['box'], MIXED)\n"
        "policies = [Policy(spec, options(), s).arrays() for s in (3, 3, 4)]\n"
        "print(json.dumps([{k: zlib.crc32(v.tobytes()) for k, v in p.items()} for p in policies]))"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()[-1]
        for hash_seed in (1, 2)
    ]
    assert outputs[0] == outputs[1]
    first, second, other = json.loads(outputs[0])
    assert first == second
    assert first["actor.weight"] != other["actor.weight"]
