"""ATC's command line, its stand-in, the script, the check of the ONNX file, and the error codes."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from policy_helpers import ACTION_SPACES, VECTOR, options, spec_of

from msrl_accel.errors import BundleError, ConfigError, ExportError
from msrl_accel.export import om
from msrl_accel.export.atc import PRECISIONS
from msrl_accel.export.atc_errors import REMEDIES, explain
from msrl_accel.export.names import input_names
from msrl_accel.export.om import AtcError, OmOptions, atc_command, build_om, export_om
from msrl_accel.export.onnx_check import check_onnx_for_atc

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper  # noqa: E402

FAKE = Path(__file__).with_name("fake_atc.py")
DICT = spaces.Dict(
    image=spaces.Box(0, 255, (3, 16, 16), np.uint8),
    **{"arm:angle": spaces.Box(-1, 1, (2, 2), np.float32)},
)
NPU_SMI_310P = """\
+--------------------------------------------------------------------------------------------------------+
| npu-smi 24.1.0                                   Version: 24.1.0                                       |
+-------------------------------+-----------------+------------------------------------------------------+
| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
+===============================+=================+======================================================+
| 0       310P3                 | OK              | NA           45                0     / 0             |
| 0       0                     | 0000:01:00.0    | 0            1437 / 21527                            |
+===============================+=================+======================================================+
"""  # noqa: E501


def write_onnx(path, spec, *, opset=11, nodes=None, types=None):
    """A file with the inputs of a policy and an operator on each."""
    kinds = [*(o.dtype for o in spec.observations), "float32"]
    shapes = [*(o.shape for o in spec.observations), (spec.action.noise_size,)]
    proto = {"uint8": TensorProto.UINT8, "float32": TensorProto.FLOAT}
    inputs = [
        helper.make_tensor_value_info(name, proto[kind], ["batch", *shape])
        for name, kind, shape in zip(input_names(spec), kinds, shapes)
    ]
    outputs = [
        helper.make_tensor_value_info(f"out{i}", i_.type.tensor_type.elem_type, None)
        for i, i_ in enumerate(inputs)
    ]
    chain = [helper.make_node("Identity", [i.name], [f"out{n}"]) for n, i in enumerate(inputs)]
    graph = helper.make_graph([*(nodes or []), *chain], "policy", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    onnx.save(model, str(path))
    return path


def install(folder, name, text):
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(text)
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


@pytest.fixture
def cann(tmp_path, monkeypatch):
    """The stand-ins for atc and npu-smi on PATH; the folder that they are in."""
    folder = tmp_path / "cann bin"
    source = FAKE.read_text().split("\n", 1)[1]
    install(folder, "atc", f"#!{sys.executable}\n{source}")
    install(folder, "npu-smi", f"#!/bin/sh\ncat <<'END'\n{NPU_SMI_310P}END\n")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_ATC_SAW", str(tmp_path / "saw.json"))
    return folder


@pytest.fixture
def no_cann(monkeypatch, tmp_path):
    monkeypatch.setattr(om.ascend, "INSTALL_ROOT", tmp_path / "nothing")
    for name in ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def bundle_folder(tmp_path):
    spec = spec_of(ACTION_SPACES["discrete"], DICT)
    folder = tmp_path / "my bundle"
    folder.mkdir()
    return folder, write_onnx(folder / "policy.onnx", spec), spec


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


def run_script(folder, *arguments, **environment):
    return subprocess.run(
        ["bash", str(folder / "build_om.sh"), *arguments],
        cwd="/",
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_script_gives_atc_the_same_arguments(no_cann, bundle_folder, cann, tmp_path):
    folder, model, spec = bundle_folder
    chosen = OmOptions("Ascend310P3", (2, 4), "fp16")
    om.write_build_script(
        folder / "build_om.sh", model, atc_command("policy.onnx", "policy", chosen, spec)
    )
    done = run_script(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    saw = json.loads((tmp_path / "saw.json").read_text())
    direct = dict(a[2:].split("=", 1) for a in atc_command(model, "x", chosen, spec)[1:])
    assert {k: v for k, v in saw.items() if k != "output"} == {
        k: v for k, v in direct.items() if k != "output"
    }
    assert (folder / "policy.om").read_bytes().startswith(b"IMOD")
    assert "kernel_meta" not in {f.name for f in folder.iterdir()}


def test_the_script_finds_the_chip_or_is_told(no_cann, bundle_folder, cann, tmp_path):
    folder, model, spec = bundle_folder
    command = atc_command("policy.onnx", "policy", OmOptions(), spec)
    om.write_build_script(folder / "build_om.sh", model, command)
    assert run_script(folder).returncode == 0
    assert json.loads((tmp_path / "saw.json").read_text())["soc_version"] == "Ascend310P3"
    assert run_script(folder, SOC_VERSION="Ascend910B4").returncode == 0
    assert json.loads((tmp_path / "saw.json").read_text())["soc_version"] == "Ascend910B4"
    install(cann, "npu-smi", "#!/bin/sh\nexit 1\n")
    done = run_script(folder)
    assert done.returncode == 1
    assert "set SOC_VERSION" in done.stderr


def test_the_script_explains_a_failure_and_keeps_the_log(no_cann, bundle_folder, cann):
    folder, model, spec = bundle_folder
    export_om(model, None, folder, spec, options=OmOptions("Ascend310P3"))
    (folder / "policy.om").unlink()
    done = run_script(folder, FAKE_ATC_FAIL="E10501")
    assert done.returncode == 1
    assert "E10501" in done.stdout
    assert "see build_om.log" in done.stderr
    assert "E10501" in (folder / "build_om.log").read_text()
    assert not (folder / "policy.om").exists()


def test_the_script_refuses_a_changed_model(no_cann, bundle_folder, cann):
    folder, model, spec = bundle_folder
    export_om(model, None, folder, spec)
    model.write_bytes(model.read_bytes() + b" ")
    done = run_script(folder)
    assert done.returncode == 1
    assert "copy it again" in done.stderr


def test_the_script_loads_cann_by_its_set_env(no_cann, bundle_folder, cann, tmp_path, monkeypatch):
    folder, model, spec = bundle_folder
    command = atc_command("policy.onnx", "policy", OmOptions("Ascend310P3"), spec)
    om.write_build_script(folder / "build_om.sh", model, command)
    path = os.environ["PATH"].split(os.pathsep, 1)[1]
    done = run_script(folder, PATH=path)
    assert done.returncode == 1
    assert "install CANN" in done.stderr
    toolkit = tmp_path / "Ascend" / "ascend-toolkit"
    toolkit.mkdir(parents=True)
    # As CANN's own: it reads a variable that is not set.
    text = f'export LD_LIBRARY_PATH="$NEVER_SET_BEFORE"\nexport PATH="{cann}:$PATH"\n'
    (toolkit / "set_env.sh").write_text(text)
    assert run_script(folder, PATH=path, HOME=str(tmp_path)).returncode == 0


FAKE_CONVERTER = """\
import configparser, json, re, sys
known = {"fmk", "modelFile", "outputFile", "saveType", "optimize", "configFile", "inputShape"}
options = dict(a[2:].split("=", 1) for a in sys.argv[1:])
assert set(options) <= known, options
assert options["fmk"] == "MINDIR" and options["saveType"] == "MINDIR"
assert re.fullmatch(r"ascend_oriented(:\\w+)?", options["optimize"])
config = configparser.ConfigParser()
config.read(options["configFile"])
section = dict(config["ascend_context"])
assert section["precision_mode"] in (
    "enforce_fp32", "preferred_fp32", "enforce_fp16", "enforce_origin", "preferred_optimal")
assert section["input_format"] in ("NCHW", "NHWC", "ND")
for item in section.get("input_shape", "a:[1]").split(";"):
    assert re.fullmatch(r"[^;]+:\\[-?\\d+(,\\d+)*\\]", item), item
open(options["outputFile"] + ".mindir", "w").write(json.dumps(section))
"""


def test_the_script_runs_the_lite_converter(no_cann, bundle_folder, cann):
    folder, model, spec = bundle_folder
    (folder / "policy.mindir").write_bytes(b"mindir")
    export_om(model, folder / "policy.mindir", folder, spec)
    install(cann, "converter_lite", f"#!{sys.executable}\n{FAKE_CONVERTER}")
    done = run_script(folder, "lite")
    assert done.returncode == 0, done.stderr
    section = json.loads((folder / "policy_ascend.mindir").read_text())
    assert section["precision_mode"] == "enforce_origin"
    assert section["input_shape"] == "inputs0:[-1,2,2];inputs1:[-1,3,16,16];inputs2:[-1,4]"
    assert section["dynamic_dims"] == "[1],[8],[32],[256]"


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


def findings(path, **kwargs):
    return {(f.level, f.where): f.message for f in check_onnx_for_atc(path, **kwargs)}


def test_operator_sets_outside_the_range_are_errors(tmp_path):
    spec = spec_of(spaces.Discrete(2))
    assert not check_onnx_for_atc(write_onnx(tmp_path / "a.onnx", spec))
    new = write_onnx(tmp_path / "b.onnx", spec, opset=19)
    assert "9 to 18" in findings(new)["error", "opset"]
    middle = write_onnx(tmp_path / "c.onnx", spec, opset=14)
    assert "9 to 13" in findings(middle, cann="6.0.1")["error", "opset"]
    assert ("warning", "opset") in findings(middle, cann="12.1")


def test_unlisted_operators_types_and_axes_are_named(tmp_path):
    spec = spec_of(spaces.Discrete(2))
    nodes = [
        helper.make_node("SequenceConstruct", ["noise"], ["sequence"]),
        helper.make_node("Cast", ["noise"], ["indices"], to=TensorProto.INT64),
        helper.make_node("Constant", [], ["depth"], value_int=2),
        helper.make_node("Constant", [], ["values"], value_floats=[0.0, 1.0]),
        helper.make_node("OneHot", ["indices", "depth", "values"], ["hot"], axis=-1),
        helper.make_node("ArgMax", ["indices"], ["largest"]),
        helper.make_node("Cast", ["noise"], ["double"], to=TensorProto.DOUBLE),
        helper.make_node("Neg", ["double"], ["negative"]),
    ]
    model = write_onnx(tmp_path / "a.onnx", spec, opset=12, nodes=nodes)
    found = findings(model)
    assert "not among the documented operators" in found["warning", "SequenceConstruct"]
    assert "int64" in found["warning", "ArgMax"]
    assert "float64" in found["warning", "Neg"]
    assert ("warning", "OneHot") not in found
    assert "int32 only" in findings(model, cann="9.0.0")["warning", "OneHot"]


def test_images_are_pointed_out(bundle_folder):
    _, model, _ = bundle_folder
    assert "AIPP" in findings(model)["warning", "input image"]


def test_what_is_no_onnx_or_no_version_is_one_line(tmp_path):
    (tmp_path / "bad.onnx").write_bytes(b"\xffno")
    with pytest.raises(ExportError, match=r"bad\.onnx"):
        check_onnx_for_atc(tmp_path / "bad.onnx")
    with pytest.raises(ExportError, match="latest"):
        check_onnx_for_atc(tmp_path / "bad.onnx", cann="latest")


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
