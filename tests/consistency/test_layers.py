"""The first layer that differs is named."""

from __future__ import annotations

import numpy as np
import pytest
from consistency_helpers import make_policy
from gymnasium import spaces

from msrl_accel.consistency.layers import AFTER_HEADS, BASELINE, first_divergence, first_unmatched
from msrl_accel.consistency.observations import make_observations
from msrl_accel.consistency.reference import Layer, NumpyPolicy

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

DICT = spaces.Dict(
    {"image": spaces.Box(0, 255, (8, 8, 1), np.uint8), "vector": spaces.Box(-1, 1, (3,))}
)


@pytest.fixture(scope="module")
def exported(graph_mode, tmp_path_factory):
    """A policy and its ONNX and MindIR files."""
    from msrl_accel.export.mindir import export_mindir
    from msrl_accel.export.onnx import export_onnx

    folder = tmp_path_factory.mktemp("layers")
    policy = make_policy(
        "box", DICT, normalize_observations=True, torso_sharing="separate", activation="relu"
    )
    export_onnx(policy, folder / "policy.onnx")
    export_mindir(policy, folder / "policy.mindir")
    return policy, folder


def locate(exported, changed=None, backend="onnx", **values):
    """Divergence of the file from a network with one weight changed, or another activation."""
    policy, folder = exported
    arrays = policy.arrays()
    if changed is not None:
        arrays[changed].flat[-1] += 0.5
    reference = NumpyPolicy(policy.spec, arrays, **{"activation": "relu", **values})
    rng = np.random.default_rng(0)
    observations = make_observations(policy.spec, "random", 16, rng)
    noise = policy.spec.draw_noise(rng, (16,))
    expected = reference.act(observations, noise)
    file = folder / f"policy.{backend}"
    return first_divergence(file, backend, reference, arrays, observations, noise, expected)


@pytest.mark.parametrize(
    ("weight", "layer"),
    [
        ("cnn.image.conv0.bias", "cnn.image.conv0"),
        ("cnn.image.conv1.weight", "cnn.image.conv1"),
        ("normalizer.vector.mean", "normalizer.vector"),
        ("torso.0.bias", "torso.0 (critic)"),
        ("torso.1.weight", "torso.1 (critic)"),
        ("actor.bias", "actor"),
        ("critic.weight", "critic"),
    ],
)
def test_a_changed_weight_is_found(exported, weight, layer):
    found = locate(exported, weight)
    assert found.layer == layer
    assert [w.split()[0] for w in found.weights] == [weight]
    assert layer in str(found)


def test_another_activation_is_found_though_all_weights_are_equal(exported):
    found = locate(exported, activation="tanh")
    assert (found.layer, found.weights) == ("torso.0 (actor)", [])


def test_equal_networks(exported):
    assert locate(exported).layer == AFTER_HEADS


def test_weights_of_mindir_files(exported):
    found = locate(exported, "torso.1.bias", backend="mindir")
    assert found.layer is None
    assert found.weights == ["torso.1.bias (1 of 32 numbers)"]


def test_a_baseline_that_is_off_itself(exported):
    policy, folder = exported
    reference = NumpyPolicy(policy.spec, policy.arrays(), activation="relu")
    rng = np.random.default_rng(0)
    observations = make_observations(policy.spec, "random", 4, rng)
    noise = policy.spec.zero_noise((4,))
    expected = reference.act(observations, noise)
    expected.value = expected.value + np.float32(1e-3)
    arrays = policy.arrays()
    found = first_divergence(
        folder / "policy.onnx", "onnx", reference, arrays, observations, noise, expected
    )
    assert found.layer == BASELINE
    assert found.max_abs == pytest.approx(1e-3, rel=0.1)


def test_a_fused_layer_is_not_taken_for_a_wrong_one():
    a, b, c = (np.full((2, 3), x, np.float32) for x in (1, 2, 3))
    first, second = Layer("a", a, frozenset()), Layer("b", b, frozenset({"a"}))
    assert first_unmatched([first, second], [b])[0] == AFTER_HEADS
    assert first_unmatched([first, second], [a, c]) == ("b", 1.0)
