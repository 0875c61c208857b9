"""Policies on MindSpore from their MindIR file."""

from __future__ import annotations

import numpy as np
import pytest
from bundle_helpers import make_policy, outputs, random_inputs, shared_bundle

from msrl_accel.errors import BundleError, PolicyError
from msrl_accel.export.bundle import Bundle
from msrl_accel.runtime.load import open_runtime


@pytest.fixture(scope="module")
def runtime(graph_mode):
    return open_runtime(shared_bundle(), "mindir")


def test_it_gives_what_the_bundle_recorded_bit_for_bit(runtime):
    bundle = Bundle.open(shared_bundle())
    arrays = bundle.reference()
    result = runtime.act((arrays["observation/observation"],), arrays["noise"])
    for name, got in zip(bundle.output_names, outputs(result)):
        np.testing.assert_array_equal(got, arrays[f"sampled/{name}"])


def test_inputs_are_checked(runtime):
    noise = runtime.spec.zero_noise((1,))
    for wrong in (np.zeros((1, 4), np.float32), np.array([[np.nan, 0, 0]], np.float32)):
        with pytest.raises(PolicyError, match="'observation'"):
            runtime.act((wrong,), noise)


def test_new_weights_are_the_graphs_bit_for_bit(graph_mode):
    from msrl_accel.runtime.graph import GraphRuntime

    runtime, policy = open_runtime(shared_bundle(), "mindir"), make_policy("discrete", scale=1.5)
    inputs = random_inputs(runtime.spec, 3)
    runtime.act(*inputs)
    arrays = policy.arrays()
    for wrong in ({}, {**arrays, "critic.bias": np.zeros(2)}):
        with pytest.raises(PolicyError, match="weight"):
            runtime.load_weights(9, wrong)
    runtime.load_weights(9, arrays)
    assert runtime.version == 9
    for a, b in zip(outputs(GraphRuntime(policy).act(*inputs)), outputs(runtime.act(*inputs))):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("keep", [0, 100, 3000])
def test_a_truncated_model_is_one_error(runtime, tmp_path, keep):
    from msrl_accel.runtime.mindir import MindirRuntime

    file = tmp_path / "policy.mindir"
    file.write_bytes((shared_bundle() / "policy.mindir").read_bytes()[:keep])
    with pytest.raises(PolicyError, match="MindSpore refuses the model"):
        MindirRuntime(file, runtime.spec)


def test_the_training_graph_is_rebuilt_from_the_bundle(runtime):
    graph = open_runtime(shared_bundle("normalized_box"), "graph")
    mindir = open_runtime(shared_bundle("normalized_box"), "mindir")
    inputs = random_inputs(graph.spec, 3)
    for a, b in zip(outputs(graph.act(*inputs)), outputs(mindir.act(*inputs))):
        np.testing.assert_array_equal(a, b)


def test_weights_of_another_training_are_noticed(runtime, tmp_path):
    bundle = Bundle.open(shared_bundle())
    bundle.manifest["weights"]["sha256"] = "0" * 64
    with pytest.raises(BundleError, match="other weights"):
        open_runtime(bundle, "graph")
