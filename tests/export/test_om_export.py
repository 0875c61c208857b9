"""ATC's command line, its stand-in, its error codes, and OM files in bundles."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from om_helpers import DICT, install, write_onnx
from policy_helpers import ACTION_SPACES, VECTOR, options, spec_of

from msrl_accel.errors import BundleError, ConfigError, ExportError
from msrl_accel.export import om
from msrl_accel.export.atc import PRECISIONS
from msrl_accel.export.atc_errors import REMEDIES, explain
from msrl_accel.export.names import input_names
from msrl_accel.export.om import AtcError, OmOptions, atc_command, build_om, export_om
from msrl_accel.export.onnx_check import check_onnx_for_atc


def test_command_of_a_box_observation():
    spec = spec_of(spaces.Discrete(2), spaces.Box(-1, 1, (4,), np.float32))
    command = atc_command("policy.onnx", "policy", OmOptions("Ascend310P3"), spec)
    assert command == [
        "atc",
        "--framework=5",
        "--model=policy.onnx",
        "--output=policy",
        "--soc_version=Ascend310P3",
        "--input_format=ND",
        "--input_shape=observation:-1,4;noise:-1,2",
        "--dynamic_batch_size=1,8,32,256",
        "--precision_mode_v2=origin",
        "--log=error",
    ]


def test_a_single_batch_size_is_static():
    spec = spec_of(spaces.Discrete(2), spaces.Box(-1, 1, (4,), np.float32))
    command = atc_command("m", "p", OmOptions("Ascend910B4", batches=(16,)), spec)
    assert "--input_shape=observation:16,4;noise:16,2" in command
    assert not any(a.startswith("--dynamic") for a in command)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"batches": ()}, "batches"),
        ({"batches": (1, 1)}, "batches"),
        ({"batches": (0, 8)}, "batches"),
        ({"batches": (1, 4096)}, "batches"),
        ({"batches": tuple(range(1, 102))}, "batches"),
        ({"precision": "int8"}, "precision"),
        ({"precision": "auto"}, "precision"),
        ({"log": "verbose"}, "log"),
        ({"soc_version": "310P3"}, "soc_version"),
        ({"soc_version": "Ascend310P3; rm x"}, "soc_version"),
    ],
)
def test_options_that_atc_does_not_take_are_refused(values, named):
    with pytest.raises(ConfigError, match=named):
        OmOptions(**values)


def test_a_static_batch_of_the_lite_converter_is_an_argument():
    spec = spec_of(spaces.Discrete(2), spaces.Box(-1, 1, (4,), np.float32))
    chosen = OmOptions("Ascend310P3", (16,))
    command = om.converter_lite_command("a.mindir", "b", "c.ini", chosen, spec, target="310p")
    assert "--optimize=ascend_oriented:310p" in command
    assert "--inputShape=inputs0:16,4;inputs1:16,2" in command
    assert "dynamic_dims" not in om.converter_lite_config(chosen, spec)


def test_a_name_that_atc_would_split_is_refused():
    spec = spec_of(spaces.Discrete(2), spaces.Dict({"a;b": spaces.Box(-1, 1, (4,), np.float32)}))
    with pytest.raises(ExportError, match=r"'a;b'.*rename"):
        atc_command("m", "p", OmOptions("Ascend310P3"), spec)


@given(
    batches=st.sets(st.integers(1, 2048), min_size=1, max_size=100),
    shapes=st.dictionaries(
        st.text("abc:.-/_", min_size=1, max_size=6),
        st.lists(st.integers(1, 9), max_size=3),
        min_size=1,
        max_size=6,
    ),
    size=st.integers(1, 7),
)
def test_shapes_read_back_as_atc_reads_them(batches, shapes, size):
    box = {k: spaces.Box(-1, 1, tuple(v), np.float32) for k, v in shapes.items()}
    spec = spec_of(spaces.Discrete(size), spaces.Dict(box))
    command = atc_command("m", "p", OmOptions("Ascend310P3", tuple(batches)), spec)
    given_shapes = dict(a.partition("=")[::2] for a in command)
    read = {}
    for item in given_shapes["--input_shape"].split(";"):
        name, dims = item.rsplit(":", 1)  # ATC splits at the last colon
        read[name] = [int(d) for d in dims.split(",")]
    batch = -1 if len(batches) > 1 else min(batches)
    expected = {name: [batch, *o.shape] for name, o in zip(input_names(spec), spec.observations)}
    assert read == {**expected, "noise": [batch, size]}
    profiles = given_shapes.get("--dynamic_batch_size")
    assert profiles is None if batch > 0 else profiles == ",".join(map(str, sorted(batches)))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("batches", [(4,), (1, 8, 32)])
def test_atc_takes_what_it_is_given(cann, bundle_folder, precision, batches, tmp_path):
    folder, model, spec = bundle_folder
    target = build_om(
        model, folder / "policy.om", OmOptions("Ascend310P3", batches, precision), spec
    )
    assert target.read_bytes().startswith(b"IMOD")
    assert json.loads((tmp_path / "saw.json").read_text())["precision_mode_v2"] == precision
    assert {f.name for f in folder.iterdir()} == {"policy.onnx", "policy.om"}


def test_the_chip_is_taken_from_npu_smi(cann, bundle_folder, tmp_path):
    folder, model, spec = bundle_folder
    build_om(model, folder / "policy.om", OmOptions(), spec)
    assert json.loads((tmp_path / "saw.json").read_text())["soc_version"] == "Ascend310P3"


def test_an_error_code_becomes_a_remedy(cann, bundle_folder, monkeypatch):
    folder, model, spec = bundle_folder
    monkeypatch.setenv("FAKE_ATC_FAIL", "E40021")
    with pytest.raises(AtcError, match=r"E40021.*MatMul_3.*operator package") as caught:
        build_om(model, folder / "policy.om", OmOptions("Ascend310P3"), spec)
    assert caught.value.codes == ("E40021",)
    assert not (folder / "policy.om").exists()


def test_a_model_of_another_policy_is_refused_by_atc(cann, tmp_path):
    spec = spec_of(spaces.Discrete(2), spaces.Box(-1, 1, (4,), np.float32))
    other = spec_of(spaces.Discrete(2), spaces.Box(-1, 1, (5,), np.float32))
    model = write_onnx(tmp_path / "policy.onnx", other)
    with pytest.raises(AtcError, match=r"E10049.*shapes do not match"):
        build_om(model, tmp_path / "policy.om", OmOptions("Ascend310P3"), spec)


def test_atc_that_hangs_is_stopped(tmp_path, monkeypatch, bundle_folder):
    folder, model, spec = bundle_folder
    install(tmp_path / "bin", "atc", "#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(ExportError, match="did not end"):
        build_om(model, folder / "policy.om", OmOptions("Ascend310P3", timeout=0.3), spec)


def test_without_cann_a_script_is_written(no_cann, bundle_folder):
    folder, model, spec = bundle_folder
    result = export_om(model, None, folder, spec, precision="fp16")
    assert (result["file"], result["status"]) == (None, "script")
    assert result["script"] == "build_om.sh"
    assert "CANN is not here" in result["reason"]
    assert result["batches"] == [1, 8, 32, 256]
    assert "--precision_mode_v2=fp16" in result["command"]
    assert os.access(folder / "build_om.sh", os.X_OK)
    json.dumps(result)


def test_with_cann_the_file_is_built(cann, bundle_folder):
    folder, model, spec = bundle_folder
    result = export_om(model, None, folder, spec)
    assert (result["file"], result["status"], result["reason"]) == ("policy.om", "built", None)
    assert result["soc_version"] == "Ascend310P3"
    assert (folder / "policy.om").stat().st_size > 4


def test_with_cann_but_no_device_the_script_waits_for_the_chip(cann, bundle_folder):
    folder, model, spec = bundle_folder
    install(cann, "npu-smi", "#!/bin/sh\nexit 1\n")
    result = export_om(model, None, folder, spec)
    assert result["status"] == "script"
    assert "--soc-version" in result["reason"]


def test_the_inputs_of_a_mindir_file_have_the_names_that_the_converter_is_given(
    graph_mode, tmp_path
):
    from mindspore.train.mind_ir_pb2 import ModelProto

    from msrl_accel.export.mindir import export_mindir
    from msrl_accel.policy import Policy

    spec = spec_of(ACTION_SPACES["discrete"], DICT)
    export_mindir(Policy(spec, options(), seed=0), tmp_path / "policy.mindir")
    model = ModelProto()
    model.ParseFromString((tmp_path / "policy.mindir").read_bytes())
    names = [i.name.rpartition(":")[2] for i in model.graph.input]
    config = om.converter_lite_config(OmOptions(), spec)
    line = next(x for x in config.splitlines() if x.startswith("input_shape="))
    assert [item.split(":")[0] for item in line[12:].split(";")] == names


def test_a_precision_without_a_name_in_lite_is_refused():
    spec = spec_of(spaces.Discrete(2))
    with pytest.raises(ConfigError, match="cube_fp16in_fp32out"):
        om.converter_lite_config(OmOptions(precision="cube_fp16in_fp32out"), spec)


@pytest.mark.parametrize("kind", ["discrete", "multi_discrete", "multi_binary", "box"])
def test_real_policies_pass_the_check_and_atc(kind, graph_mode, tmp_path, cann):
    from msrl_accel.export.onnx import export_onnx
    from msrl_accel.policy import Policy

    spec = spec_of(ACTION_SPACES[kind], VECTOR)
    model = tmp_path / "policy.onnx"
    export_onnx(Policy(spec, options(), seed=0), model)
    assert not [f for f in check_onnx_for_atc(model) if f.level == "error"]
    build_om(model, tmp_path / "policy.om", OmOptions(), spec)


def test_every_documented_code_has_a_remedy_and_unknown_ones_a_hint():
    log = "\n".join([*(f"{code}: x" for code in REMEDIES), "EZ9999: Inner Error!", "E4ABCD no"])
    found = {code: what for code, _, what in explain(log)}
    assert set(found) == {*REMEDIES, "EZ9999"}
    assert all(len(what) > 20 for what in found.values())


def test_a_file_that_was_built_elsewhere_joins_its_bundle(tmp_path, bundle_folder):
    pytest.importorskip("msrl_accel.export.cli")
    folder = make_bundle(bundle_folder)
    built = tmp_path / "policy.om"
    built.write_bytes(b"IMOD1234")
    bundle = om.add_om(folder, built)
    assert bundle.file("om").read_bytes() == b"IMOD1234"
    assert "om" not in bundle.manifest["notes"]
    assert bundle.manifest["parity"]["results"]["om"]["passed"] is None
    built.write_bytes(b"")
    with pytest.raises(BundleError, match="empty"):
        om.add_om(folder, built)


def test_command_line(tmp_path, bundle_folder, cann, capsys):
    folder = make_bundle(bundle_folder)
    assert om.main(["check", str(folder)]) == 0
    assert "AIPP" in capsys.readouterr().out
    assert om.main(["build", str(folder), "--batches", "1,4"]) == 0
    manifest = om.Bundle.open(folder).manifest
    assert manifest["models"]["om"] == "policy.om"
    assert manifest["om"]["batches"] == [1, 4]
    log = tmp_path / "atc.log"
    log.write_text("E10016: [PID: 1] Opname x\n")
    assert om.main(["explain", str(log)]) == 0
    assert "E10016" in capsys.readouterr().out
    assert om.main(["add", str(tmp_path / "no bundle"), str(log)]) == 2
    assert om.main(["build", str(folder), "--batches", "1,x"]) == 2


def make_bundle(bundle_folder):
    """A bundle with an ONNX file and what every bundle has."""
    from msrl_accel.export.manifest import KIND, SCHEMA, describe_graph, file_entry

    folder, model, spec = bundle_folder
    outputs = ("action", "log_prob", "value", "raw_action", "logits")
    manifest = {
        "kind": KIND,
        "schema": SCHEMA,
        **describe_graph(spec, input_names(spec), outputs),
        "normalization": None,
        "weights": {"version": 7, "sha256": "0" * 64},
        "config": {},
        "seed": 0,
        "versions": {},
        "precision": "origin",
        "reference": {},
        "files": {"policy.onnx": file_entry(model)},
        "models": {"onnx": "policy.onnx"},
        "notes": {"om": "CANN is not here"},
        "parity": {"gate": True, "passed": True, "results": {}},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_the_stand_in_is_strict(tmp_path, cann):
    """What the documentation forbids, the stand-in refuses: it would not hide our mistakes."""
    atc = shutil.which("atc")
    spec = spec_of(spaces.Discrete(2))
    good = atc_command(
        write_onnx(tmp_path / "a.onnx", spec), tmp_path / "a", OmOptions("Ascend310P3"), spec
    )
    for change, code in [
        (lambda a: a.replace("noise:-1,2", "noise:-1,3"), "E10049"),
        (lambda a: a.replace("noise:-1", "nose:-1"), "E10016"),
        (
            lambda a: a.replace("--dynamic_batch_size=1,8,32,256", "--dynamic_batch_size=1"),
            "E10035",
        ),
        (lambda a: a.replace("--log=error", "--loglevel=error"), "E10001"),
        (lambda a: a.replace("--precision_mode_v2=origin", "--precision_mode_v2=o"), "E10001"),
    ]:
        done = subprocess.run(
            [atc, *map(change, good[1:])], capture_output=True, text=True, check=False
        )
        assert done.returncode != 0
        assert code in done.stdout


def test_a_policy_that_atc_cannot_take_is_exported_without_om(graph_mode, tmp_path):
    from msrl_accel.export.write import write_bundle
    from msrl_accel.policy import Policy

    space = spaces.Dict({"arm angle": spaces.Box(-1, 1, (2,), np.float32)})
    policy = Policy(spec_of(spaces.Discrete(2), space), options(), seed=0)
    write_bundle(policy, tmp_path, version=1, config={"seed": 0}, formats=("onnx", "om"))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert "'arm angle' has a space" in manifest["notes"]["om"]
    assert set(manifest["models"]) == {"mindir", "onnx"}
