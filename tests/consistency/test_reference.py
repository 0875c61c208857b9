"""The NumPy network and the policy graph, each against the other."""

from __future__ import annotations

import numpy as np
import pytest
from consistency_helpers import make_policy
from gymnasium import spaces
from policy_helpers import ACTION_SPACES, VECTOR

from msrl_accel.consistency.compare import named
from msrl_accel.consistency.observations import make_observations
from msrl_accel.consistency.reference import Arithmetic, NumpyPolicy, convolution
from msrl_accel.errors import PolicyError

IMAGES = {
    "grayscale": spaces.Box(0, 255, (36, 40), np.uint8),
    "channels_first": spaces.Box(0, 255, (3, 12, 14), np.uint8),
    "dict": spaces.Dict(
        {"image": spaces.Box(0, 255, (8, 9, 2), np.uint8), "vector": spaces.Box(-1, 1, (2, 2))}
    ),
    "bytes": spaces.Box(0, 255, (4, 4, 1), np.uint8),
}


def assert_same(policy, tolerance=1e-5, **values):
    from msrl_accel.runtime.graph import GraphRuntime

    spec, arrays = policy.spec, policy.arrays()
    numpy = NumpyPolicy(spec, arrays, arithmetic=Arithmetic(dtype=np.float64), **values)
    rng = np.random.default_rng(0)
    for noise in (spec.draw_noise(rng, (5,)), spec.zero_noise((5,))):
        observations = make_observations(spec, "random", 5, rng, statistics=arrays)
        expected = named(spec, numpy.act(observations, noise))
        got = named(spec, GraphRuntime(policy).act(observations, noise))
        for name, output in got.items():
            np.testing.assert_allclose(
                output, expected[name], rtol=tolerance, atol=tolerance, err_msg=name
            )


@pytest.mark.parametrize("action", ACTION_SPACES)
def test_every_action_space(graph_mode, action):
    assert_same(make_policy(action, normalize_observations=True), activation="relu")


@pytest.mark.parametrize("space", IMAGES)
def test_images_dicts_and_shared_torsos(graph_mode, space):
    assert_same(make_policy("discrete", IMAGES[space]), activation="relu")


def test_separate_torsos_behind_an_image(graph_mode):
    policy = make_policy("box", IMAGES["dict"], torso_sharing="separate")
    assert_same(policy, activation="relu")


def test_clipping_of_normalised_observations(graph_mode):
    policy = make_policy(normalize_observations=True, observation_clip=0.25)
    assert_same(policy, activation="relu", observation_clip=0.25)


@pytest.mark.parametrize("seed", range(3))
def test_tanh_where_it_saturates(graph_mode, seed):
    policy = make_policy(activation="tanh", seed=seed)
    assert_same(policy)
    policy.load_arrays({k: 3 * v for k, v in policy.arrays().items()})
    assert_same(policy, tolerance=2e-5)


def test_no_hidden_layer(graph_mode):
    assert_same(make_policy(hidden_sizes=()))


def test_convolution_against_its_definition():
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((2, 3, 9, 8)), rng.standard_normal((4, 3, 3, 3))
    got = convolution(x, weight, 2)
    assert got.shape == (2, 4, 4, 3)
    for f, i, j in ((0, 0, 0), (3, 3, 2), (1, 2, 1)):
        patch = x[1, :, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3]
        np.testing.assert_allclose(got[1, f, i, j], (patch * weight[f]).sum())


def test_missing_weights_are_named():
    from policy_helpers import spec_of

    with pytest.raises(PolicyError, match=r"critic\.weight"):
        NumpyPolicy(spec_of(ACTION_SPACES["discrete"], VECTOR), {"actor.weight": np.zeros((4, 3))})


def test_layers_are_in_order_and_know_what_they_depend_on(graph_mode):
    policy = make_policy("discrete", IMAGES["dict"], normalize_observations=True)
    numpy = NumpyPolicy(policy.spec, policy.arrays(), activation="relu")
    observations = make_observations(policy.spec, "random", 3, np.random.default_rng(0))
    layers = {
        layer.name: layer for layer in numpy.layers(observations, policy.spec.zero_noise((3,)))
    }
    assert list(layers)[-4:] == ["torso.0", "torso.1", "actor", "critic"]
    assert "cnn.image.conv0" in layers["torso.0"].upstream
    assert layers["normalizer.vector"].upstream == frozenset()
    assert "actor" not in layers["critic"].upstream


def test_layers_of_separate_torsos(graph_mode):
    policy = make_policy("discrete")
    numpy = NumpyPolicy(policy.spec, policy.arrays(), activation="relu")
    observations = make_observations(policy.spec, "random", 3, np.random.default_rng(0))
    layers = {
        layer.name: layer for layer in numpy.layers(observations, policy.spec.zero_noise((3,)))
    }
    assert layers["critic"].upstream == {"torso.0 (critic)", "torso.1 (critic)"}
    assert layers["torso.0 (actor)"].output.shape == (3, 16)
