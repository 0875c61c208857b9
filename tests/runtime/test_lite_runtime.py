"""Policies on MindSpore Lite: parity with the training graph, bad input, the child process."""

from __future__ import annotations

import importlib.machinery
import json
import os
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest
from lite_helpers import POLICIES, export_policy, needs_lite, trained_arrays

from msrl_accel.errors import PolicyError
from msrl_accel.runtime import lite, lite_setup
from msrl_accel.runtime.lite import LiteError, LiteRuntime
from msrl_accel.runtime.lite_converter import _convert, convert_to_ms
from msrl_accel.runtime.lite_engine import open_engine
from msrl_accel.runtime.model_weights import first_output, replace_weights

BATCHES = (1, 3, 32, 256)


@pytest.fixture(scope="module")
def box_policy(graph_mode, tmp_path_factory):
    return export_policy("box", tmp_path_factory.mktemp("lite"))


@pytest.fixture(scope="module")
def runtime(box_policy):
    opened = LiteRuntime(box_policy.model, box_policy.spec)
    yield opened
    opened.close()


def outputs_of(result):
    return [result.action, result.log_prob, result.value, result.raw_action, *result.parameters]


def assert_same_outputs(result, expected, spec):
    assert len(outputs_of(result)) == len(expected)
    for i, (output, reference) in enumerate(zip(outputs_of(result), expected)):
        assert output.dtype == reference.dtype
        assert output.shape == reference.shape
        if output.dtype.kind == "i":
            np.testing.assert_array_equal(output, reference)
            continue
        # A log-probability sums the rounding of every component's log-softmax.
        terms = max(1, len(spec.action.sizes)) if i == 1 else 1
        np.testing.assert_allclose(output, reference, rtol=0, atol=1e-5 * terms)


def first_rows(expected, n):
    return [x[:n] if len(x) == 256 else x for x in expected]


@needs_lite
@pytest.mark.parametrize("kind", POLICIES)
def test_every_kind_of_policy_acts_as_its_training_graph(kind, graph_mode, tmp_path):
    exported = export_policy(kind, tmp_path)
    runtime = LiteRuntime(exported.model, exported.spec)
    actions = {}
    for n in BATCHES:
        result = runtime.act(*exported.rows(n))
        actions[n] = result.action
        assert_same_outputs(result, first_rows(exported.expected, n), exported.spec)
    engine = runtime._engine
    engine.load(first_output(exported.model.read_bytes()))
    for n in BATCHES:
        observations, noise = exported.rows(n)
        (action,) = engine.run([*observations, noise])
        np.testing.assert_array_equal(action, actions[n])
    runtime.close()


@needs_lite
def test_a_process_without_mindspore_acts_in_the_process(box_policy, tmp_path):
    observations, noise = box_policy.rows(3)
    np.savez(tmp_path / "rows.npz", noise=noise, observation=observations[0])
    other = trained_arrays(box_policy.policy, np.random.default_rng(3))
    np.savez(tmp_path / "weights.npz", **other)
    (tmp_path / "spec.json").write_text(json.dumps(box_policy.spec.to_dict()))
    script = """
import json, sys
sys.modules["mindspore"] = None
import numpy as np
from msrl_accel.runtime.lite import LiteRuntime
from msrl_accel.spaces import PolicySpec
model, folder = sys.argv[1:]
spec = PolicySpec.from_dict(json.load(open(f"{folder}/spec.json")))
rows = np.load(f"{folder}/rows.npz")
runtime = LiteRuntime(model, spec)
assert not runtime.isolated
act = runtime.act((rows["observation"],), rows["noise"]).action
for n in (3, 1, 2):
    action = runtime.action((rows["observation"][:n],), rows["noise"][:n])
    np.testing.assert_allclose(action, act[:n], rtol=0, atol=1e-6)
    action += 1  # a copy: of no effect on what comes next
weights = dict(np.load(f"{folder}/weights.npz"))
runtime.load_weights(1, weights)
moved = runtime.action((rows["observation"],), rows["noise"])
np.testing.assert_array_equal(moved, runtime.act((rows["observation"],), rows["noise"]).action)
assert (moved != act).any()
print(json.dumps(act.tolist()))
"""  # not closed: ending the process must not crash either
    command = [sys.executable, "-c", script, str(box_policy.model), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    np.testing.assert_allclose(json.loads(result.stdout), box_policy.expected[0][:3], atol=1e-5)


@needs_lite
@pytest.mark.parametrize("kind", ["box", "channels_first", "image_and_vector"])
def test_the_ms_form_acts_as_the_training_graph(kind, graph_mode, tmp_path):
    exported = export_policy(kind, tmp_path)
    convert_to_ms(exported.model, tmp_path / "policy.ms")
    runtime = LiteRuntime(tmp_path / "policy.ms", exported.spec)
    for n in BATCHES:
        result = runtime.act(*exported.rows(n))
        assert_same_outputs(result, first_rows(exported.expected, n), exported.spec)
        np.testing.assert_array_equal(runtime.action(*exported.rows(n)), result.action)
    with pytest.raises(PolicyError, match="fixed"):
        runtime.load_weights(1, exported.policy.arrays())
    runtime.close()
    truncated = (tmp_path / "policy.ms").read_bytes()[:5000]
    (tmp_path / "policy.ms").write_bytes(truncated)
    with pytest.raises(LiteError, match=r"cannot load the model: \w+"):
        LiteRuntime(tmp_path / "policy.ms", exported.spec)


@needs_lite
def test_what_cannot_be_converted_is_refused_with_the_words_of_the_engine(tmp_path):
    (tmp_path / "source.mindir").write_bytes(b"no model")
    with pytest.raises(LiteError, match=r"cannot convert .*source\.mindir.*(?i:fail|parse|valid)"):
        convert_to_ms(tmp_path / "source.mindir", tmp_path / "policy.ms")
    assert os.listdir(tmp_path) == ["source.mindir"]


@needs_lite
def test_results_are_copies(runtime, box_policy):
    observations, noise = box_policy.rows(3)
    first = runtime.act(observations, noise)
    kept = [x.copy() for x in outputs_of(first)]
    runtime.act(tuple(-x for x in observations), noise)
    for output, before in zip(outputs_of(first), kept):
        np.testing.assert_array_equal(output, before)
        output += 1  # writable, and of no effect on what comes next
    again = runtime.act(observations, noise)
    for output, before in zip(outputs_of(again), kept):
        np.testing.assert_array_equal(output, before)


@needs_lite
@pytest.mark.parametrize(
    "arrange",
    [
        np.asfortranarray,
        lambda x: np.repeat(x, 2, axis=0)[::2],
        lambda x: x[::-1].copy()[::-1],
        lambda x: x.astype(np.float64),
        lambda x: x.astype(">f4"),
    ],
    ids=["fortran", "strided", "reversed", "float64", "big-endian"],
)
def test_any_memory_layout_gives_the_same_action(runtime, box_policy, arrange):
    observations, noise = box_policy.rows(32)
    plain = runtime.act(observations, noise)
    arranged = runtime.act(tuple(arrange(x) for x in observations), arrange(noise))
    np.testing.assert_array_equal(arranged.action, plain.action)


@needs_lite
def test_inputs_that_do_not_fit_are_refused(runtime, box_policy):
    (x,), noise = box_policy.rows(3)
    with pytest.raises(PolicyError, match="shape"):
        runtime.act((x[:, :2],), noise)
    with pytest.raises(PolicyError, match="noise has shape"):
        runtime.act((x,), noise[:2])
    with pytest.raises(PolicyError, match="tensors"):
        runtime.act((x, x), noise)
    with pytest.raises(PolicyError, match="empty"):
        runtime.act((x[:0],), noise[:0])
    np.testing.assert_allclose(
        runtime.act((x,), noise).action, box_policy.expected[0][:3], atol=1e-5
    )


@needs_lite
def test_new_weights_act_as_the_graph_that_has_them(box_policy):
    from mindspore import Tensor

    policy = box_policy.policy
    before = policy.arrays()
    arrays = trained_arrays(policy, np.random.default_rng(9))
    observations, noise = box_policy.rows(32)
    runtime = LiteRuntime(box_policy.model, box_policy.spec)
    try:
        policy.load_arrays(arrays)
        expected = [np.array(o.asnumpy()) for o in policy(Tensor(observations[0]), Tensor(noise))]
    finally:
        policy.load_arrays(before)
    runtime.load_weights(7, arrays)
    assert runtime.version == 7
    assert_same_outputs(runtime.act(observations, noise), expected, box_policy.spec)

    broken = {name: array for name, array in arrays.items() if name != "critic.bias"}
    with pytest.raises(PolicyError, match=r"critic\.bias"):
        runtime.load_weights(8, broken)
    assert runtime.version == 7
    assert_same_outputs(runtime.act(observations, noise), expected, box_policy.spec)
    runtime.close()


def test_weights_of_another_size_are_refused(box_policy):
    arrays = box_policy.policy.arrays()
    arrays["log_std"] = np.zeros(7, np.float32)
    with pytest.raises(PolicyError, match="'log_std' has 7 numbers"):
        replace_weights(box_policy.model.read_bytes(), arrays)


@needs_lite
@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[: len(b) // 2], lambda b: b[::-1]])
def test_a_damaged_model_is_refused_with_the_words_of_the_engine(box_policy, tmp_path, damage):
    path = tmp_path / "damaged.mindir"
    path.write_bytes(damage(box_policy.model.read_bytes()))
    with pytest.raises(LiteError, match=r"cannot load the model: .*(fail|buffer size|parse)"):
        LiteRuntime(path, box_policy.spec)


@needs_lite
def test_a_missing_file_and_a_model_of_another_policy_are_refused(box_policy, tmp_path):
    with pytest.raises(LiteError, match="No such file"):
        LiteRuntime(tmp_path / "none.mindir", box_policy.spec)
    other = export_policy("multi_binary", tmp_path)
    with pytest.raises(PolicyError, match="of another policy"):
        LiteRuntime(other.model, box_policy.spec)


@needs_lite
def test_mindspore_and_lite_do_not_share_a_process(box_policy):
    with pytest.raises(LiteError, match="cannot share"):
        LiteRuntime(box_policy.model, box_policy.spec, isolate=False)


@needs_lite
def test_a_child_that_crashes_is_an_error_and_so_is_every_later_call(box_policy):
    runtime = LiteRuntime(box_policy.model, box_policy.spec)
    os.kill(runtime._engine._process.pid, signal.SIGSEGV)
    for _ in range(2):
        with pytest.raises(LiteError, match=r"ended unexpectedly.*SIGSEGV"):
            runtime.act(*box_policy.rows(3))
    runtime.close()
    with pytest.raises(LiteError, match="closed"):
        runtime.act(*box_policy.rows(3))


@needs_lite
def test_an_interrupted_call_does_not_shift_the_answers(box_policy, monkeypatch):
    from msrl_accel.runtime import lite_worker

    runtime = LiteRuntime(box_policy.model, box_policy.spec)

    def interrupted(descriptor):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(lite_worker, "_receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runtime.act(*box_policy.rows(3))
    with pytest.raises(LiteError, match="ended unexpectedly"):
        runtime.act(*box_policy.rows(1))
    runtime.close()


@needs_lite
def test_the_child_ends_with_its_parent_even_if_a_sibling_holds_the_pipe(box_policy, tmp_path):
    (tmp_path / "spec.json").write_text(json.dumps(box_policy.spec.to_dict()))
    script = """
import json, os, sys, time
from msrl_accel.runtime.lite import LiteRuntime
from msrl_accel.spaces import PolicySpec
spec = PolicySpec.from_dict(json.load(open(sys.argv[2])))
runtime = LiteRuntime(sys.argv[1], spec, isolate=True)
sibling = os.fork()  # has the ends of the pipes too
if sibling == 0:
    time.sleep(60)
    os._exit(0)
print(runtime._engine._process.pid, sibling, flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-c", script, str(box_policy.model), str(tmp_path / "spec.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        child, sibling = map(int, parent.stdout.readline().split())
        assert is_running(child)
        parent.kill()
    try:
        deadline = time.monotonic() + 20
        while is_running(child) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_running(child)
    finally:
        os.kill(sibling, signal.SIGKILL)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def package(monkeypatch):
    """A stand-in for the vendor's Python package: checks its arguments and reuses its memory."""
    module = types.ModuleType("mindspore_lite")
    module.__spec__ = importlib.machinery.ModuleSpec("mindspore_lite", None)
    module.ModelType = types.SimpleNamespace(MINDIR="MINDIR", MINDIR_LITE="MINDIR_LITE")
    module.FmkType = types.SimpleNamespace(MINDIR="MINDIR")
    module.Format = types.SimpleNamespace(NCHW="NCHW")
    module.Context = lambda: types.SimpleNamespace(target=None, cpu=types.SimpleNamespace())

    class Tensor:
        dtype = types.SimpleNamespace(name="FLOAT32")

        def __init__(self, shape):
            self.shape = shape
            self.data = np.zeros(shape, np.float32)

        def set_data_from_numpy(self, array):
            assert list(array.shape) == self.shape
            assert array.flags.c_contiguous
            self.data = array

        def get_data_to_numpy(self):
            return self.data

    class Model:
        resized = 0
        memory = np.zeros((8, 2), np.float32)

        def build_from_file(self, path, kind, context):
            assert (kind, path.rpartition(".")[2]) in (("MINDIR", "mindir"), ("MINDIR_LITE", "ms"))
            assert context.target == ["cpu"]
            assert context.cpu.thread_num == 1
            with open(path, "rb") as file:
                if file.read() != (b"model" if kind == "MINDIR" else b"sizeMSL2"):
                    raise RuntimeError("build_from_file failed! Error is Common error code.")
            self.inputs = [Tensor([2, 2])]

        def get_inputs(self):
            return self.inputs

        def resize(self, inputs, dims):
            assert inputs is self.inputs
            Model.resized += 1
            self.inputs = [Tensor(d) for d in dims]

        def predict(self, inputs):
            x = inputs[0].get_data_to_numpy()
            output = Tensor(inputs[0].shape)
            output.data = self.memory[: len(x)]
            np.multiply(x, 2, out=output.data)
            return [output]

    class Converter:
        save_type = input_format = None

        def convert(self, fmk_type, model_file, output_file, weight_file="", config_file=""):
            assert (fmk_type, self.save_type, self.input_format) == (
                "MINDIR",
                "MINDIR_LITE",
                "NCHW",
            )
            assert os.path.exists(model_file)
            with open(f"{output_file}.ms", "xb") as file:
                file.write(b"sizeMSL2")

    module.Model, module.Converter = Model, Converter
    monkeypatch.setitem(sys.modules, "mindspore_lite", module)
    return module


def test_an_importable_package_is_used_as_its_documentation_says(package):
    found, message = lite.available()
    assert found
    assert "Python package" in message
    engine = open_engine(b"model")
    assert list(engine.inputs) == [((2,), np.dtype("float32"))]
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    (first,) = engine.run([x])
    (second,) = engine.run([x + 1])
    np.testing.assert_array_equal(first, 2 * x)
    np.testing.assert_array_equal(second, 2 * (x + 1))
    assert package.Model.resized == 1
    with pytest.raises(LiteError, match="Common error code"):
        engine.load(b"other")
    np.testing.assert_array_equal(engine.run([x])[0], 2 * x)


def test_an_importable_package_converts_and_loads_ms_files(package, tmp_path):
    (tmp_path / "source.mindir").write_bytes(b"model")
    assert _convert(str(tmp_path / "source.mindir"), str(tmp_path / "policy")) == 0
    engine = open_engine((tmp_path / "policy.ms").read_bytes())
    x = np.ones((2, 2), np.float32)
    np.testing.assert_array_equal(engine.run([x])[0], 2 * x)


@pytest.fixture
def no_lite(monkeypatch, tmp_path):
    """A machine that could run Lite but has none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(lite_setup, "package_version", lambda: None)
    monkeypatch.setattr(lite_setup.sys, "platform", "linux")
    monkeypatch.setattr(lite_setup.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(lite_setup, "_compiler", lambda: "/usr/bin/c++")


def test_a_missing_lite_is_reported_with_the_command_that_adds_it(no_lite, tmp_path, capsys):
    found, message = lite.available()
    assert not found
    assert "python -m msrl_accel.runtime.lite setup" in message
    with pytest.raises(LiteError, match=r"runtime\.lite setup"):
        LiteRuntime(tmp_path / "any.mindir", None)
    with pytest.raises(LiteError, match=r"runtime\.lite setup"):
        convert_to_ms(tmp_path / "any.mindir", tmp_path / "any.ms")
    assert lite.main(["status"]) == 1
    assert "setup" in capsys.readouterr().out


def test_a_machine_that_the_wheel_does_not_serve_is_told_what_does(no_lite, monkeypatch, capsys):
    monkeypatch.setattr(lite_setup, "_compiler", lambda: None)
    assert "install g++" in lite.available()[1]
    monkeypatch.setattr(lite_setup.platform, "machine", lambda: "aarch64")
    assert "vendor" in lite.available()[1]
    assert lite.main(["setup"]) == 1
    assert "x86_64" in capsys.readouterr().err


def test_a_wheel_file_with_another_hash_is_refused(no_lite, tmp_path, capsys):
    wheel = tmp_path / "mindspore_lite-2.0.0-cp37-cp37m-manylinux1_x86_64.whl"
    wheel.write_bytes(b"not the wheel")
    assert lite.main(["setup", "--wheel", str(wheel)]) == 1
    assert "SHA-256" in capsys.readouterr().err
    assert not lite.available()[0]
    assert not any(lite_setup.home().parent.iterdir())


def test_a_download_with_another_hash_is_refused(no_lite, monkeypatch, tmp_path):
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "mindspore_lite-2.0.0-cp37-cp37m-manylinux1_x86_64.whl"
    wheel.write_bytes(b"not the wheel")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(LiteError, match=r"(?s)pip could not download.*(?i:hash)"):
        lite.setup()
    assert not lite.available()[0]


@pytest.mark.parametrize(
    ("installed", "writer", "level"),
    [
        ("2.0.0", "2.10.0", 1),
        ("2.3.1", "2.10.0", 1),
        ("2.10.0", "2.10.0", None),
        ("2.11.0rc1", "2.10.0", None),
        ("2 (version unknown)", "2.10.0", 1),
    ],
)
def test_models_are_rewritten_only_for_an_older_lite(monkeypatch, installed, writer, level):
    monkeypatch.setattr(lite_setup, "package_version", lambda: installed)
    assert lite.mindir_level(writer) == level
