"""OM files on stand-ins for ais_bench and pyACL, which record calls and check their arguments."""

from __future__ import annotations

import ctypes
import json
import sys
import types

import numpy as np
import pytest
from gymnasium import spaces
from policy_helpers import spec_of

from msrl_accel.errors import PolicyError
from msrl_accel.runtime import om
from msrl_accel.runtime.om import OmRuntime

SPEC = spec_of(
    spaces.Box(-1, 1, (2,), np.float32),
    spaces.Dict(
        image=spaces.Box(0, 255, (8, 8, 3), np.uint8), vector=spaces.Box(-1, 1, (3,), np.float32)
    ),
)
LOG_STD = np.array([0.5, -0.5], np.float32)
BATCHES = (1, 4, 16)


def network(image, vector, noise):
    """A function of each row alone, with the outputs of a continuous policy."""
    mean = vector[:, :2] + image.reshape(len(image), -1).mean(axis=1, keepdims=True) / 255
    raw = mean + noise
    outputs = (np.clip(raw, -1, 1), raw.sum(axis=1), mean.sum(axis=1), raw, mean, LOG_STD)
    return [np.ascontiguousarray(x, np.float32) for x in outputs]


def rows(n, seed=0):
    rng = np.random.default_rng(seed)
    observations = (
        rng.integers(0, 256, (n, 8, 8, 3)).astype(np.uint8),
        rng.standard_normal((n, 3)).astype(np.float32),
    )
    return observations, SPEC.draw_noise(rng, (n,))


class FakeAisBench:
    """`ais_bench.infer.interface`."""

    def __init__(self):
        self.calls, self.freed = [], 0

    def session_class(fake):
        class InferSession:
            def __init__(self, device_id, model_path, acl_json_path=None, debug=False, loop=1):
                assert type(device_id) is int and type(model_path) is str
                if device_id > 1:
                    raise RuntimeError("set device failed, device id 9 is invalid")
                fake.device = device_id

            def infer(self, feeds, mode="static", custom_sizes=100000, out_array=True):
                assert mode in ("static", "dymbatch")
                assert all(f.flags.c_contiguous for f in feeds)
                size = len(feeds[0])
                assert size in BATCHES if mode == "dymbatch" else size == 4
                fake.calls.append((mode, size))
                fake.outputs = network(*feeds)
                return fake.outputs

            def free_resource(self):
                fake.freed += 1

        return InferSession


@pytest.fixture
def ais_bench(monkeypatch):
    fake = FakeAisBench()
    for name in ("ais_bench", "ais_bench.infer", "ais_bench.infer.interface"):
        module = types.ModuleType(name)
        module.__spec__ = types.SimpleNamespace(name=name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["ais_bench.infer.interface"].InferSession = fake.session_class()
    return fake


class FakeAcl(types.ModuleType):
    """pyACL on host memory: handles are integers, and every resource must be released."""

    def __init__(self, batches=BATCHES):
        super().__init__("acl")
        self.__spec__ = types.SimpleNamespace(name="acl")
        self.batches, self.calls = batches, []
        self.live, self.memory, self.size = set(), {}, None
        self.fail = {}
        self.rt = types.SimpleNamespace(
            set_device=self._code("set_device"),
            reset_device=self._release("device"),
            create_context=lambda device: (self._take("context"), 0),
            set_context=self._code("set_context"),
            destroy_context=self._release("context"),
            malloc=self._malloc,
            free=self._free,
            memcpy=self._memcpy,
        )
        self.mdl = types.SimpleNamespace(
            load_from_file=lambda path: (self._take("model"), self.fail.get("load_from_file", 0)),
            unload=self._release("model"),
            create_desc=lambda: self._take("desc"),
            destroy_desc=self._release("desc"),
            get_desc=self._code("get_desc"),
            get_num_inputs=lambda desc: 3 + self._dynamic,
            get_num_outputs=lambda desc: 6,
            get_input_size_by_index=lambda desc, i: self._sizes()[i],
            get_output_size_by_index=lambda desc, i: [8, 4, 4, 8, 8, 8][i] * max(self.batches),
            get_input_index_by_name=self._index_by_name,
            get_dynamic_batch=self._get_dynamic_batch,
            get_input_dims=lambda desc, i: (
                {"name": "image", "dims": [self.batches[0], 8, 8, 3]},
                0,
            ),
            get_input_data_type=lambda desc, i: [4, 0, 0, 9][i],
            get_output_data_type=lambda desc, i: 0,
            get_cur_output_dims=lambda desc, i: ({"dims": list(self.outputs[i].shape)}, 0),
            create_dataset=self._create_dataset,
            destroy_dataset=self._release("dataset"),
            add_dataset_buffer=self._add_buffer,
            get_dataset_num_buffers=lambda dataset: len(self.datasets[dataset]),
            get_dataset_buffer=lambda dataset, i: self.datasets[dataset][i],
            set_dynamic_batch_size=self._set_batch,
            execute=self._execute,
        )
        self.datasets, self.buffers, self.inits = {}, {}, 0

    def init(self):
        self.inits += 1
        return 0 if self.inits == 1 else 100002

    def create_data_buffer(self, pointer, size):
        handle = self._take("buffer")
        self.buffers[handle] = (pointer, size)
        return handle

    def destroy_data_buffer(self, handle):
        return self._release("buffer")(handle)

    @property
    def _dynamic(self):
        return int(len(self.batches) > 1)

    def _sizes(self):
        largest = max(self.batches)
        return [192 * largest, 12 * largest, 8 * largest, *([8] if self._dynamic else [])]

    def _take(self, kind):
        handle = len(self.calls) + 1000
        self.calls.append(kind)
        self.live.add((kind, handle))
        return handle

    def _release(self, kind):
        def release(handle):
            if kind != "device":
                self.live.remove((kind, handle))
            return 0

        return release

    def _code(self, name):
        return lambda *_: self.fail.get(name, 0)

    def _malloc(self, size, policy):
        block = ctypes.create_string_buffer(size)
        pointer = ctypes.addressof(block)
        self.memory[pointer] = block
        return pointer, 0

    def _free(self, pointer):
        del self.memory[pointer]
        return 0

    def _memcpy(self, target, space, source, count, kind):
        device = target if kind == 1 else source
        assert kind in (1, 2) and count <= space
        assert count <= len(self.memory[device])
        ctypes.memmove(target, source, count)
        return 0

    def _create_dataset(self):
        handle = self._take("dataset")
        self.datasets[handle] = []
        return handle

    def _add_buffer(self, dataset, buffer):
        self.datasets[dataset].append(buffer)
        return dataset, 0

    def _index_by_name(self, desc, name):
        return (3, 0) if self._dynamic and name == "ascend_mbatch_shape_data" else (0, 100000)

    def _get_dynamic_batch(self, desc):
        # As documented: 128 places, of which batchCount are used.
        return {"batchCount": len(self.batches), "batch": [*self.batches, 0, 0]}, 0

    def _set_batch(self, model, dataset, index, batch):
        assert index == 3 and batch in self.batches
        self.size = batch
        return 0

    def _read(self, dataset, i, shape, dtype):
        pointer, _ = self.buffers[self.datasets[dataset][i]]
        data = ctypes.string_at(pointer, int(np.prod(shape)) * np.dtype(dtype).itemsize)
        return np.frombuffer(data, dtype).reshape(shape)

    def _execute(self, model, inputs, outputs):
        n = self.size if self._dynamic else self.batches[0]
        self.outputs = network(
            self._read(inputs, 0, (n, 8, 8, 3), np.uint8),
            self._read(inputs, 1, (n, 3), np.float32),
            self._read(inputs, 2, (n, 2), np.float32),
        )
        for handle, output in zip(self.datasets[outputs], self.outputs):
            pointer, size = self.buffers[handle]
            assert output.nbytes <= size
            ctypes.memmove(pointer, output.ctypes.data, output.nbytes)
        self.calls.append(("execute", n))
        return self.fail.get("execute", 0)


@pytest.fixture
def acl(monkeypatch):
    fake = FakeAcl()
    monkeypatch.setitem(sys.modules, "acl", fake)
    return fake


@pytest.fixture
def model(tmp_path):
    file = tmp_path / "policy.om"
    file.write_bytes(b"IMOD")
    (tmp_path / "manifest.json").write_text(json.dumps({"om": {"batches": list(BATCHES)}}))
    return file


def check_result(runtime, n):
    observations, noise = rows(n, seed=n)
    result = runtime.act(observations, noise)
    expected = network(*observations, noise)
    found = (result.action, result.log_prob, result.value, result.raw_action, *result.parameters)
    for x, y in zip(found, expected):
        np.testing.assert_allclose(x, y, rtol=1e-6)
        assert x.shape == y.shape
    return found


@pytest.mark.parametrize("engine", ["ais_bench", "acl"])
@pytest.mark.parametrize("n", [1, 2, 4, 5, 16, 17, 40])
def test_batches_are_padded_to_a_profile_or_split(engine, n, model, request):
    request.getfixturevalue(engine)
    runtime = OmRuntime(model, SPEC, 3)
    assert (runtime.engine, runtime.version) == (engine, 3)
    check_result(runtime, n)
    runtime.close()


@pytest.mark.parametrize("engine", ["ais_bench", "acl"])
def test_log_std_is_never_taken_for_rows(engine, model, request):
    # Its two numbers could pass for the rows of a batch of two, or of two pieces.
    request.getfixturevalue(engine)
    runtime = OmRuntime(model, SPEC, batches=None)
    for n in (1, 2, 3, 17, 32):
        observations, noise = rows(n)
        np.testing.assert_array_equal(runtime.act(observations, noise).parameters[1], LOG_STD)


@pytest.mark.parametrize("engine", ["ais_bench", "acl"])
def test_outputs_are_copies(engine, model, request):
    request.getfixturevalue(engine)
    runtime = OmRuntime(model, SPEC)
    first = check_result(runtime, 4)
    kept = [x.copy() for x in first]
    check_result(runtime, 5)
    for x, y in zip(first, kept):
        np.testing.assert_array_equal(x, y)
        assert x.flags.writeable


def test_ais_bench_comes_first_and_is_told_the_mode(ais_bench, acl, model):
    runtime = OmRuntime(model, SPEC, device=1)
    assert runtime.engine == "ais_bench"
    assert ais_bench.device == 1
    check_result(runtime, 3)
    assert ais_bench.calls == [("dymbatch", 4)]
    runtime.close()
    assert ais_bench.freed == 1
    observations, noise = rows(1)
    with pytest.raises(PolicyError, match="closed"):
        runtime.act(observations, noise)
    fixed = OmRuntime(model, SPEC, batches=[4])
    check_result(fixed, 9)
    assert ais_bench.calls[1:] == [("static", 4)] * 3


def test_ais_bench_needs_to_be_told_the_batches(ais_bench, model):
    (model.parent / "manifest.json").write_text("{}")
    with pytest.raises(PolicyError, match=r"batches=\[\.\.\.\]"):
        OmRuntime(model, SPEC)


def test_pyacl_asks_the_model_and_releases_everything(acl, model):
    (model.parent / "manifest.json").unlink()
    runtime = OmRuntime(model, SPEC)
    check_result(runtime, 3)
    assert ("execute", 4) in acl.calls
    runtime.close()
    runtime.close()
    assert not acl.live and not acl.memory
    check_result(OmRuntime(model, SPEC), 3)  # acl.init says that it was called before


def test_pyacl_with_one_fixed_batch(monkeypatch, model):
    fake = FakeAcl(batches=(4,))
    monkeypatch.setitem(sys.modules, "acl", fake)
    check_result(OmRuntime(model, SPEC), 6)
    assert [c for c in fake.calls if c[0] == "execute"] == [("execute", 4)] * 2


@pytest.mark.parametrize("call", ["set_device", "load_from_file", "get_desc"])
def test_a_failing_call_is_named_and_leaves_nothing(call, acl, model):
    acl.fail[call] = 507033
    with pytest.raises(PolicyError, match=rf"{call}.*507033.*msrl-doctor"):
        OmRuntime(model, SPEC)
    assert not acl.memory
    assert {kind for kind, _ in acl.live} <= {"model"}


def test_execution_that_fails_is_named(acl, model):
    runtime = OmRuntime(model, SPEC)
    acl.fail["execute"] = 500002
    observations, noise = rows(1)
    with pytest.raises(PolicyError, match=r"acl\.mdl\.execute failed with aclError 500002"):
        runtime.act(observations, noise)


def test_inputs_are_checked_before_the_device_sees_them(acl, model):
    runtime = OmRuntime(model, SPEC)
    (image, vector), noise = rows(2)
    for observations, message in [
        ((image, vector[:, :2]), "'vector' has shape"),
        ((image.astype(np.float32), vector), "'image' has dtype"),
        ((image, np.full_like(vector, np.nan)), "not finite"),
        ((image,), "got 1 observation"),
    ]:
        with pytest.raises(PolicyError, match=message):
            runtime.act(observations, noise)
    with pytest.raises(PolicyError, match="empty"):
        runtime.act((image[:0], vector[:0]), noise[:0])
    assert not [c for c in acl.calls if c[0] == "execute"]
    check_result(runtime, 2)


def test_a_device_that_is_not_there(ais_bench, model):
    with pytest.raises(PolicyError, match=r"device 9.*invalid"):
        OmRuntime(model, SPEC, device=9)


def test_without_an_engine_the_error_says_what_to_install(model, monkeypatch):
    monkeypatch.setattr(om, "AIS_BENCH", "no_ais_bench_here")
    monkeypatch.setattr(om, "PYACL", "no_acl_here")
    assert om.available()[0] is False
    with pytest.raises(PolicyError, match=r"set_env\.sh"):
        OmRuntime(model, SPEC)


def test_an_engine_whose_libraries_are_missing(model, monkeypatch, tmp_path):
    (tmp_path / "acl.py").write_text("raise ImportError('libascendcl.so: cannot open')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "acl", raising=False)
    with pytest.raises(PolicyError, match=r"libascendcl\.so.*set_env\.sh"):
        OmRuntime(model, SPEC)


def test_weights_are_fixed_and_files_must_exist(acl, model, tmp_path):
    with pytest.raises(PolicyError, match="fixed"):
        OmRuntime(model, SPEC).load_weights(1, {})
    with pytest.raises(PolicyError, match="no such file"):
        OmRuntime(tmp_path / "none.om", SPEC)
