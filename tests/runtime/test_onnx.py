"""Policies on ONNX Runtime: what goes in, what comes out, other weights."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from bundle_helpers import make_policy, outputs, random_inputs, shared_bundle
from hypothesis import given, settings
from hypothesis import strategies as st

from msrl_accel.errors import PolicyError
from msrl_accel.export.bundle import Bundle
from msrl_accel.runtime.load import open_runtime
from msrl_accel.runtime.onnx import OnnxRuntime


@pytest.fixture(scope="module")
def runtime(graph_mode):
    return open_runtime(shared_bundle(), "onnx")


@pytest.fixture(scope="module")
def images(graph_mode):
    return open_runtime(shared_bundle("dict"), "onnx")


def test_it_gives_what_the_bundle_recorded(runtime):
    arrays = Bundle.open(shared_bundle()).reference()
    result = runtime.act((arrays["observation/observation"],), arrays["noise"])
    np.testing.assert_array_equal(result.action, arrays["sampled/action"])
    np.testing.assert_allclose(result.parameters[0], arrays["sampled/logits"], atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(batch=st.integers(1, 300))
def test_any_batch_gives_each_row_its_own_result(runtime, batch):
    observations, noise = random_inputs(runtime.spec, batch, seed=batch)
    together = runtime.act(observations, noise)
    row = batch // 2
    alone = runtime.act((observations[0][row : row + 1],), noise[row : row + 1])
    np.testing.assert_allclose(together.parameters[0][row], alone.parameters[0][0], atol=1e-5)


def test_outputs_are_copies(runtime):
    observations, noise = random_inputs(runtime.spec, 4)
    first = outputs(runtime.act(observations, noise))
    kept = [x.copy() for x in first]
    runtime.act((observations[0] + 1,), noise + 1)
    for a, b in zip(first, kept):
        np.testing.assert_array_equal(a, b)
        assert a.flags.writeable


def test_inputs_of_other_layouts_give_the_same(images):
    observations, noise = random_inputs(images.spec, 5)
    expected = outputs(images.act(observations, noise))
    reordered = tuple(np.asfortranarray(x) for x in observations)
    strided = np.repeat(noise, 2, axis=1)[:, ::2]
    for a, b in zip(expected, outputs(images.act(reordered, strided))):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int64, bool])
def test_real_numbers_of_other_types_are_cast(runtime, dtype):
    x = np.array([[1, 0, 1]], dtype)
    noise = runtime.spec.zero_noise((1,))
    expected = runtime.act((x.astype(np.float32),), noise)
    np.testing.assert_array_equal(runtime.act((x,), noise).value, expected.value)


@pytest.mark.parametrize(
    "x, words",
    [
        (np.zeros((1, 4), np.float32), "shape"),
        (np.zeros((3,), np.float32), "shape"),
        (np.zeros((1, 3), np.complex64), "dtype"),
        (np.array([["a", "b", "c"]]), "dtype"),
        (np.array([[0, np.nan, 0]], np.float32), "finite"),
        (np.array([[0, 0, -np.inf]], np.float32), "finite"),
        (np.array([[0, 0, 1e300]]), "finite"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow")
def test_what_does_not_fit_is_refused(runtime, x, words):
    with pytest.raises(PolicyError, match=f"'observation'.*{words}"):
        runtime.act((x,), runtime.spec.zero_noise((1,)))


def test_large_finite_observations_are_not_refused(runtime):
    x = np.full((1, 3), 3e38, np.float32)
    assert np.isfinite(runtime.act((x,), runtime.spec.zero_noise((1,))).value).all()


def test_images_stay_bytes(images):
    observations, noise = random_inputs(images.spec, 1)
    wrong = (observations[0], observations[1].astype(np.float32))
    with pytest.raises(PolicyError, match=r"'noise'.*uint8"):
        images.act(wrong, noise)


def test_noise_and_count_are_checked(runtime):
    observations, noise = random_inputs(runtime.spec, 2)
    with pytest.raises(PolicyError, match="noise has shape"):
        runtime.act(observations, noise[:1])
    with pytest.raises(PolicyError, match="2 observation tensors"):
        runtime.act(observations * 2, noise)


def test_new_weights_act_as_the_graph_that_has_them(graph_mode):
    from msrl_accel.runtime.graph import GraphRuntime

    policy = make_policy("discrete", scale=1.5)
    runtime = open_runtime(shared_bundle(), "onnx")
    inputs = random_inputs(runtime.spec, 8)
    before = runtime.act(*inputs).value
    runtime.load_weights(9, policy.arrays())
    assert runtime.version == 9
    after = runtime.act(*inputs)
    assert not np.allclose(after.value, before, atol=1e-3)
    for a, b in zip(outputs(GraphRuntime(policy).act(*inputs)), outputs(after)):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("kind", ["discrete", "dict", "normalized_box"])
def test_weights_given_with_each_call_act_as_constant_ones(graph_mode, kind):
    file = shared_bundle(kind) / "policy.onnx"
    constant = open_runtime(shared_bundle(kind), "onnx")
    given = OnnxRuntime(file, constant.spec, weights_as_inputs=True)
    inputs = random_inputs(constant.spec, 33)
    arrays = {k: v + np.float32(0.3) for k, v in make_policy(kind).arrays().items()}
    for version in (0, 1):
        if version:
            constant.load_weights(version, arrays)
            given.load_weights(version, arrays)
        assert given.version == version
        for a, b in zip(outputs(constant.act(*inputs)), outputs(given.act(*inputs))):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(given.action(*inputs), given.act(*inputs).action)


@pytest.mark.parametrize("as_inputs", [False, True])
def test_weights_that_do_not_fit_change_nothing(graph_mode, as_inputs):
    spec = open_runtime(shared_bundle(), "onnx").spec
    runtime = OnnxRuntime(shared_bundle() / "policy.onnx", spec, weights_as_inputs=as_inputs)
    inputs = random_inputs(runtime.spec, 8)
    before = runtime.act(*inputs).value
    arrays = make_policy("discrete").arrays()
    for wrong in ({**arrays, "critic.bias": np.zeros(2)}, {}):
        with pytest.raises(PolicyError):
            runtime.load_weights(9, wrong)
    assert runtime.version != 9
    np.testing.assert_array_equal(runtime.act(*inputs).value, before)


def test_a_truncated_model_is_refused_in_the_engines_words(runtime, tmp_path):
    data = (shared_bundle() / "policy.onnx").read_bytes()
    (tmp_path / "policy.onnx").write_bytes(data[: len(data) // 2])
    with pytest.raises(PolicyError, match="onnxruntime refuses the model"):
        OnnxRuntime(tmp_path / "policy.onnx", runtime.spec)


def test_a_model_of_another_policy_is_refused(runtime, graph_mode):
    model = shared_bundle("normalized_box") / "policy.onnx"
    with pytest.raises(PolicyError, match="another policy"):
        OnnxRuntime(model, runtime.spec)


def test_a_missing_engine_says_what_to_install(runtime, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(PolicyError, match=r"pip install 'msrl_accel\[onnx\]'"):
        OnnxRuntime(shared_bundle() / "policy.onnx", runtime.spec)


@pytest.mark.parametrize("kind", ["discrete", "dict", "normalized_box"])
def test_the_action_alone_is_that_of_all_outputs(graph_mode, kind):
    runtime = open_runtime(shared_bundle(kind), "onnx")
    inputs = random_inputs(runtime.spec, 7)
    np.testing.assert_array_equal(runtime.action(*inputs), runtime.act(*inputs).action)
    arrays = {k: v + np.float32(0.3) for k, v in make_policy(kind).arrays().items()}
    runtime.load_weights(1, arrays)
    np.testing.assert_array_equal(runtime.action(*inputs), runtime.act(*inputs).action)
    with pytest.raises(PolicyError, match="shape"):
        runtime.action(inputs[0], inputs[1][:1])


def test_a_closed_runtime_says_so(graph_mode):
    runtime = open_runtime(shared_bundle(), "onnx")
    runtime.close()
    with pytest.raises(PolicyError, match="closed"):
        runtime.act(*random_inputs(runtime.spec, 1))
