"""Loading bundles: which engine, on which machines, and how the policy acts."""

from __future__ import annotations

import shutil
import subprocess
import sys

import numpy as np
import pytest
from bundle_helpers import edit_manifest, shared_bundle

from msrl_accel.errors import BundleError, PolicyError
from msrl_accel.export.bundle import Bundle
from msrl_accel.runtime import load
from msrl_accel.runtime.load import BACKENDS, available_backends, load_policy, open_runtime

DEPLOYED = """
import sys
for name in ("mindspore", "gymnasium", "yaml", "tqdm", "onnx", "scipy"):
    sys.modules[name] = None  # as where it is not installed
import numpy as np
from msrl_accel.export.bundle import Bundle
from msrl_accel.runtime.load import available_backends, load_policy
folder = sys.argv[1]
arrays, policy = Bundle.open(folder).reference(), load_policy(folder)
names = [o.name for o in policy.spec.observations]
observation = {n: arrays["observation/" + n] for n in names}
action = policy.act(observation if policy.spec.dict_observation else observation[names[0]])
assert np.allclose(action, arrays["deterministic/action"], atol=1e-5)
assert policy.act(policy.spec.dict_observation and {n: x[0] for n, x in observation.items()}
                  or observation[names[0]][0]).shape == action.shape[1:]
print(type(policy.runtime).__name__, available_backends(folder)["mindir"][1])
"""


@pytest.mark.parametrize("kind", ["discrete", "dict"])
def test_it_acts_where_only_numpy_and_onnxruntime_are(graph_mode, tmp_path, kind):
    folder = tmp_path / "copied bundle"
    shutil.copytree(shared_bundle(kind), folder)
    done = subprocess.run(
        [sys.executable, "-c", DEPLOYED, str(folder)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "OnnxRuntime MindSpore is not installed: pip install mindspore"


@pytest.mark.parametrize("backend", ["graph", "mindir"])
def test_mindspore_is_set_up_where_a_process_only_loads_a_policy(graph_mode, backend):
    script = (
        "import sys; import numpy as np; from msrl_accel.runtime.load import load_policy\n"
        "print(load_policy(sys.argv[1], sys.argv[2]).act(np.zeros(3, np.float32)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(shared_bundle()), backend],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    expected = load_policy(shared_bundle(), "onnx").act(np.zeros(3, np.float32))
    assert done.stdout.strip() == str(expected)


def test_actions_have_the_environments_shape_and_dtype(graph_mode):
    policy = load_policy(shared_bundle("multi_discrete"), "onnx")
    one = policy.act(np.zeros(3, np.float32))
    many = policy.act(np.zeros((5, 3), np.float32))
    assert one.shape == (2, 2) and many.shape == (5, 2, 2)
    assert one.dtype == np.dtype(policy.spec.action.dtype)
    np.testing.assert_array_equal(many[3], one)


def test_samples_depend_on_the_seed_alone(graph_mode):
    observation = np.zeros((50, 3), np.float32)
    draw = lambda seed: load_policy(shared_bundle(), "onnx", seed=seed).act(  # noqa: E731
        observation, deterministic=False
    )
    np.testing.assert_array_equal(draw(1), draw(1))
    assert (draw(1) != draw(2)).any()
    assert set(draw(1)) <= {2, 3, 4, 5}


def test_one_call_leaves_no_trace_in_the_next(graph_mode):
    policy = load_policy(shared_bundle("normalized_box"), "onnx")
    first = policy.act(np.zeros(3))
    policy.act(np.ones(3), deterministic=False)
    np.testing.assert_array_equal(policy.act(np.zeros(3)), first)


def test_auto_takes_the_first_engine_that_is_here(graph_mode, monkeypatch):
    assert type(open_runtime(shared_bundle())).__name__ == "OnnxRuntime"
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setitem(load._ENGINES, "lite", lambda: (False, "Lite is not installed"))
    assert type(open_runtime(shared_bundle())).__name__ == "MindirRuntime"
    monkeypatch.setitem(load._ENGINES, "mindir", lambda: (False, "MindSpore is not installed"))
    with pytest.raises(PolicyError, match=r"msrl_accel\[onnx\].*Lite is not.*MindSpore is not"):
        open_runtime(shared_bundle())


def test_a_missing_engine_is_one_clear_error(graph_mode, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(PolicyError, match=r"'onnx' cannot run .*pip install 'msrl_accel\[onnx\]'"):
        load_policy(shared_bundle(), "onnx")
    usable, reason = available_backends()["onnx"]
    assert not usable and "pip install" in reason


def test_a_form_that_was_not_exported_is_one_clear_error(graph_mode, tmp_path):
    folder = tmp_path / "bundle"
    shutil.copytree(shared_bundle(), folder)
    edit_manifest(folder, lambda m: m["models"].pop("onnx"))
    with pytest.raises(BundleError, match="no onnx file"):
        load_policy(folder, "onnx")
    runtime = open_runtime(folder)
    assert type(runtime).__name__ != "OnnxRuntime"
    runtime.close()


def test_an_unknown_backend_lists_those_there_are(graph_mode):
    with pytest.raises(PolicyError, match="auto or one of graph, mindir, lite, ms, onnx, om"):
        load_policy(shared_bundle(), "tensorrt")


def test_every_backend_is_reported(graph_mode):
    states = available_backends(shared_bundle())
    assert set(states) == set(BACKENDS)
    assert states["onnx"][0] and states["onnx"][1].startswith("onnxruntime ")
    assert states["mindir"][0] and states["graph"][0]
    assert not states["om"][0]
    assert all(reason for _, reason in states.values())


def test_an_opened_bundle_serves_as_well_as_its_folder(graph_mode):
    bundle = Bundle.open(shared_bundle())
    assert open_runtime(bundle, "onnx").version == bundle.version


def test_names_of_a_dict_observation_are_checked(graph_mode):
    policy = load_policy(shared_bundle("dict"), "onnx")
    with pytest.raises(PolicyError, match=r"keys \['pixels'\].*\['action', 'noise'\]"):
        policy.act({"pixels": np.zeros((12, 12, 3), np.uint8)})
    with pytest.raises(PolicyError, match="takes a dict"):
        policy.act(np.zeros(3))


def test_rows_can_be_made_independent_of_their_batch(graph_mode):
    runtime = open_runtime(shared_bundle(), "onnx", batch_invariant=True)
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    noise = runtime.spec.zero_noise((40,))
    together = runtime.act((x,), noise).parameters[0]
    alone = [runtime.act((x[i : i + 1],), noise[:1]).parameters[0][0] for i in range(40)]
    np.testing.assert_array_equal(together, np.stack(alone))
