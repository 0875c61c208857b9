"""`msrl-check` as its user meets it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from run_helpers import environment

from msrl_accel.consistency.cli import main

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

ENV = "msrl_accel.envs.toy:IdentityDiscrete-v0"
QUICK = ("--rows", "40", "--backends", "onnx")


@pytest.fixture(scope="module")
def bundle(graph_mode, tmp_path_factory):
    """A bundle of a policy for the environment in its manifest, without a run."""
    from msrl_accel.config import resolve_config
    from msrl_accel.envs import make_single
    from msrl_accel.export.cli import write_bundle
    from msrl_accel.policy import Policy
    from msrl_accel.spaces import PolicySpec

    env = make_single(ENV)
    spec = PolicySpec.from_spaces(env.observation_space, env.action_space)
    values = {"policy.hidden_sizes": [8], "n_envs": 4}
    config = resolve_config("ppo", ENV, tuned=False, overrides=values)
    policy = Policy(spec, config.policy, 0)
    rng = np.random.default_rng(0)
    policy.load_arrays(
        {k: v + 0.3 * rng.standard_normal(v.shape) for k, v in policy.arrays().items()}
    )
    folder = tmp_path_factory.mktemp("check") / "bundle"
    folder.mkdir()
    write_bundle(policy, folder, version=7, config=config.to_dict(), formats=("mindir", "onnx"))
    return folder


@pytest.fixture
def damaged(bundle, tmp_path):
    """The bundle with one weight of its ONNX file changed, and the manifest to suit."""
    from msrl_accel.export.manifest import file_entry

    folder = tmp_path / "damaged"
    shutil.copytree(bundle, folder)
    model = onnx.load(str(folder / "policy.onnx"))
    (weight,) = (i for i in model.graph.initializer if i.name.endswith("torso.0.bias"))
    values = np.array(onnx.numpy_helper.to_array(weight))
    values.flat[0] += 0.01
    weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
    onnx.save(model, str(folder / "policy.onnx"))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["policy.onnx"] = file_entry(folder / "policy.onnx")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_a_good_bundle(bundle, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "differences.png"
    words = ["--rows", "40", "--episodes", "4", "--drift", "--precision", "fp16,bf16"]
    assert main([str(bundle), *words, "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    assert "consistent (" in out and "bit-equal" in out
    assert "precision_mode_v2: " in out and "drift caught" in out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_json(bundle, capsys):
    assert main([str(bundle), *QUICK, "--json", "--episodes", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    result = report["backends"]["onnx"]
    assert result["flips"]["count"] == 0
    assert set(result["outputs"]) == {"action", "log_prob", "value", "raw_action", "logits"}
    assert [e["mode"] for e in result["episodes"]] == ["deterministic", "sampled"]
    assert all(e["equal_returns"] for e in result["episodes"])


def test_a_damaged_form_is_found_and_located(damaged, capsys):
    assert main([str(damaged), *QUICK]) == 1
    out = capsys.readouterr().out
    assert "NOT CONSISTENT (onnx)" in out
    assert "first layer that differs: torso.0" in out
    assert "torso.0.bias (1 of 16 numbers)" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--backends", "tensorrt"], "tensorrt"),
        (["--backends", "lite"], "lite"),
        (["--precision", "fp4"], "fp4"),
        (["--episodes", "-1"], "below 0"),
        (["--episodes", "many"], "many"),
        (["--run", "nowhere"], "nowhere"),
        (["--plot", "no/such/folder/x.png"], "does not exist"),
        (["--wrong"], "--wrong"),
    ],
)
def test_bad_input(bundle, words, message, capsys):
    assert main([str(bundle), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("msrl-check: ") and message in error
    assert len(error.splitlines()) == 1


def test_no_bundle(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "no bundle" in capsys.readouterr().err


def test_a_changed_file(bundle, tmp_path, capsys):
    folder = tmp_path / "bundle"
    shutil.copytree(bundle, folder)
    with open(folder / "policy.onnx", "r+b") as file:
        file.seek(100)
        file.write(b"\0\1")
    assert main([str(folder)]) == 2
    assert "SHA-256" in capsys.readouterr().err


def test_on_a_device_with_onnxruntime_alone(bundle, damaged):
    """What the training graph gave when it was exported is then the baseline."""
    program = (
        "import sys\n"
        "for name in ('mindspore', 'gymnasium', 'onnx', 'yaml'): sys.modules[name] = None\n"
        "from msrl_accel.consistency.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )

    def check(folder):
        command = [sys.executable, "-c", program, str(folder)]
        return subprocess.run(command, capture_output=True, text=True, env=environment())

    good = check(bundle)
    assert good.returncode == 0, good.stderr
    assert "recorded in the bundle" in good.stdout
    assert "mindir: not checked: MindSpore is not installed" in good.stdout
    bad = check(damaged)
    assert bad.returncode == 1 and "NOT CONSISTENT (onnx)" in bad.stdout
