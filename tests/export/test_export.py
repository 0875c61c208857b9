"""Exporting policies and runs: every kind, the parity gate, the command line."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from bundle_helpers import KINDS, make_policy, outputs, random_inputs, shared_bundle, write
from run_helpers import tiny

from msrl_accel import train
from msrl_accel.errors import BundleError, ConfigError, ExportError
from msrl_accel.export import cli
from msrl_accel.export import write as write_module
from msrl_accel.export.bundle import MANIFEST, Bundle
from msrl_accel.export.cli import export_run
from msrl_accel.export.write import GateError
from msrl_accel.runtime import lite, lite_converter
from msrl_accel.runtime.load import open_runtime

DISCRETE = ("discrete", "multi_discrete", "multi_binary", "image")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    assert train.main(tiny(path, "--quiet")) == 0
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_every_form_acts_as_the_training_graph_at_every_batch(graph_mode, kind):
    bundle = Bundle.open(shared_bundle(kind))
    assert bundle.passed
    graph, mindir, onnx = (open_runtime(bundle, name) for name in ("graph", "mindir", "onnx"))
    for batch in (3, 256):  # the gate has compared others
        inputs = random_inputs(bundle.spec, batch, seed=batch)
        expected = outputs(graph.act(*inputs))
        for a, b in zip(expected, outputs(mindir.act(*inputs))):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        for name, a, b in zip(bundle.output_names, expected, outputs(onnx.act(*inputs))):
            assert a.dtype == b.dtype and a.shape == b.shape
            atol = 1e-4 if name == "log_prob" else 1e-5
            np.testing.assert_allclose(a, b, atol=atol, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("kind", DISCRETE)
def test_both_lite_forms_are_written(graph_mode, kind):
    bundle = Bundle.open(shared_bundle(kind))
    results = bundle.manifest["parity"]["results"]
    assert bundle.file("lite") is not None
    if lite.available()[0]:
        assert results["lite"]["passed"] and results["ms"]["passed"]
        assert bundle.file("ms").name == "policy.ms"
    else:
        assert "not installed" in results["lite"]["reason"]
        assert "not installed" in bundle.manifest["notes"]["ms"]


def test_the_ms_form_can_be_left_out(graph_mode, tmp_path, monkeypatch):
    def refuse(source, target):
        raise lite.LiteError("MindSpore Lite cannot convert it: no such operator")

    monkeypatch.setattr(lite_converter, "convert_to_ms", refuse)
    write(make_policy("discrete"), tmp_path / "bundle", formats=("lite",))
    bundle = Bundle.open(tmp_path / "bundle")
    assert bundle.file("ms") is None and bundle.file("lite") is not None
    assert "no such operator" in bundle.manifest["notes"]["ms"]
    with pytest.raises(BundleError, match=r"no ms file .*no such operator"):
        open_runtime(bundle, "ms")


def test_a_value_loses_no_more_than_its_last_digits():
    """What a layer of one unit adds up to 50, on ONNX Runtime, against float64."""
    from onnx import TensorProto, helper, numpy_helper
    from onnxruntime import InferenceSession

    from msrl_accel.export.onnx_graph import bypass_identities, sum_values

    rng = np.random.default_rng(0)
    weight = rng.uniform(0.7, 0.9, (1, 64)).astype(np.float32)
    x = rng.uniform(0.9, 1.0, (1000, 64)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["x", "weight", "bias"], ["layer"], transB=1),
            helper.make_node("Reshape", ["layer", "flat"], ["value"]),
        ],
        "layer",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 64])],
        [helper.make_tensor_value_info("value", TensorProto.FLOAT, ["batch"])],
        [
            numpy_helper.from_array(weight, "weight"),
            numpy_helper.from_array(np.float32([0.3]), "bias"),
            numpy_helper.from_array(np.int64([-1]), "flat"),
        ],
    )
    sum_values(graph)
    bypass_identities(graph)
    opset = [helper.make_opsetid("", 11)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=4)
    session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (value,) = session.run(None, {"x": x})
    exact = x.astype(np.float64) @ weight[0].astype(np.float64) + np.float64(np.float32(0.3))
    assert exact.min() > 45 and exact.max() < 55
    np.testing.assert_allclose(value, exact, rtol=0, atol=1e-5)


def test_a_policy_can_be_exported_again_after_it_has_changed(graph_mode, tmp_path):
    from msrl_accel.export.onnx import export_onnx
    from msrl_accel.runtime.onnx import OnnxRuntime

    policy = make_policy("discrete")
    export_onnx(policy, tmp_path / "first.onnx")
    arrays = policy.arrays()
    policy.load_arrays({name: 2 * array for name, array in arrays.items()})
    export_onnx(policy, tmp_path / "second.onnx")
    inputs = random_inputs(policy.spec, 8)
    values = [
        OnnxRuntime(tmp_path / name, policy.spec).act(*inputs).value
        for name in ("first.onnx", "second.onnx")
    ]
    from msrl_accel.runtime.graph import GraphRuntime

    np.testing.assert_allclose(values[1], GraphRuntime(policy).act(*inputs).value, atol=1e-5)
    assert (values[0] != values[1]).all()


def test_saturated_units_agree(graph_mode, tmp_path):
    """Hidden units near saturation, where MindSpore's own tanh is off by 1e-4."""
    write(make_policy("discrete", scale=3), tmp_path / "bundle", formats=("mindir", "onnx"))
    graph, onnx = (open_runtime(tmp_path / "bundle", name) for name in ("graph", "onnx"))
    inputs = random_inputs(graph.spec, 256)
    for a, b in zip(outputs(graph.act(*inputs)), outputs(onnx.act(*inputs))):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-6)


def test_exporting_leaves_the_policy_as_it_was(graph_mode, tmp_path):
    from msrl_accel.runtime.graph import GraphRuntime

    policy = make_policy("normalized_box")
    inputs = random_inputs(policy.spec, 3)
    arrays, answer = policy.arrays(), outputs(GraphRuntime(policy).act(*inputs))
    write(policy, tmp_path / "bundle", "normalized_box")
    assert all((arrays[k] == v).all() for k, v in policy.arrays().items())
    for a, b in zip(answer, outputs(GraphRuntime(policy).act(*inputs))):
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def faulty_onnx(monkeypatch):
    """An exporter that gets one weight wrong by 1 %."""
    from msrl_accel.export import onnx

    export = onnx.export_onnx

    def export_other(policy, target):
        arrays = policy.arrays()
        changed = {**arrays, "actor.weight": arrays["actor.weight"] * np.float32(1.01)}
        policy.load_arrays(changed)
        export(policy, target)
        policy.load_arrays(arrays)

    monkeypatch.setattr(onnx, "export_onnx", export_other)


def test_a_form_that_differs_fails_the_export_and_leaves_nothing(run_dir, tmp_path, faulty_onnx):
    with pytest.raises(GateError, match="onnx: logits differs"):
        export_run(run_dir, tmp_path / "bundle", formats=["onnx"])
    assert os.listdir(tmp_path) == []


def test_without_the_gate_the_failure_is_recorded(run_dir, tmp_path, faulty_onnx, capsys):
    target = tmp_path / "bundle"
    assert cli.main([str(run_dir), "--out", str(target), "--formats", "onnx", "--no-gate"]) == 1
    assert "DIFFERS" in capsys.readouterr().out
    bundle = Bundle.open(target)
    assert bundle.complete and not bundle.passed
    assert bundle.manifest["parity"]["results"]["onnx"]["problems"]
    with pytest.warns(UserWarning, match="did not pass"):
        open_runtime(bundle, "onnx")


def test_a_full_disk_leaves_nothing(run_dir, tmp_path, monkeypatch):
    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write_module, "write_bytes_synced", full)
    with pytest.raises(ExportError, match=r"No space left.*--out"):
        export_run(run_dir, tmp_path / "bundle", formats=["mindir"])
    assert os.listdir(tmp_path) == []


def test_the_command_exports_and_says_what_to_do_next(run_dir, tmp_path, capsys):
    target = tmp_path / "my bundle"
    assert cli.main([str(run_dir), "--out", str(target)]) == 0
    text = capsys.readouterr().out
    assert f"msrl-check {target}" in text or f"msrl-check '{target}'" in text
    assert "load_policy" in text
    assert "bit-equal" in text
    manifest = json.loads((target / MANIFEST).read_text())
    assert manifest["config"]["env"] == "CartPole-v1"
    assert manifest["weights"]["version"] == Bundle.open(target).version
    assert manifest["precision"] == "origin"
    assert cli.main([str(run_dir), "--out", str(target)]) == 2
    assert "--force" in capsys.readouterr().err
    assert cli.main([str(run_dir), "--out", str(target), "--force", "--formats", "onnx"]) == 0
    assert Bundle.open(target).file("lite") is None


def test_automatic_precision_goes_into_the_manifest_and_the_build_script(run_dir, tmp_path):
    bundle = export_run(run_dir, tmp_path / "bundle", formats=("onnx", "om"), precision="auto")
    chosen = bundle.manifest["precision"]
    assert chosen != "auto"
    if bundle.file("om") is None:  # no CANN here
        script = (bundle.path / "build_om.sh").read_text()
        assert f"--precision_mode_v2={chosen}" in script


def test_the_exported_policy_acts_as_the_run(run_dir, tmp_path):
    from msrl_accel.run import load_run
    from msrl_accel.runtime.load import load_policy

    export_run(run_dir, tmp_path / "bundle", formats=["onnx"], checkpoint="best")
    deployed = load_policy(tmp_path / "bundle", "onnx")
    trained = load_run(run_dir).load_policy("best")
    observations = np.random.default_rng(0).normal(0, 1, (100, 4)).astype(np.float32)
    np.testing.assert_array_equal(deployed.act(observations), trained.act(observations))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--formats", "tflite"], "mindir, onnx, lite, om"),
        (["--checkpoint", "newest"], "last, best or a step"),
        (["--checkpoint", "3"], "no checkpoint 3"),
        (["--precision", "fp7"], "precision"),
        (["--fast"], "--fast"),
    ],
)
def test_bad_options_are_one_line(run_dir, tmp_path, capsys, arguments, words):
    target = tmp_path / "bundle"
    assert cli.main([str(run_dir), "--out", str(target), *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert not target.exists()


def test_no_run_is_one_line(tmp_path, capsys):
    assert cli.main([str(tmp_path)]) == 2
    assert "not a run directory" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        export_run(tmp_path)


def test_without_the_onnx_package_the_error_says_what_to_install(run_dir, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(ExportError, match=r"pip install 'msrl_accel\[onnx\]'"):
        export_run(run_dir, tmp_path / "bundle", formats=["onnx"])
