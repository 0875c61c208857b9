"""build_om.sh under bash, against the stand-ins."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from om_helpers import install

from msrl_accel.export import om
from msrl_accel.export.om import OmOptions, atc_command, export_om


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
