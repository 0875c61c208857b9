from __future__ import annotations

import contextlib
import errno
import gc
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from msrl_accel.checkpoint import CheckpointStore, flatten_state, unflatten_state
from msrl_accel.errors import CheckpointError

INTEGERS = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
DTYPES = ["float16", "float32", "float64", "bool", "complex64", *INTEGERS]


def arrays_of(step: int) -> dict[str, np.ndarray]:
    return {"policy/weight": np.full((3, 4), step, np.float32), "count": np.array(step, np.uint64)}


def save(store: CheckpointStore, step: int, score: float | None = None) -> Path:
    return store.save(step, arrays_of(step), {"note": f"step {step}"}, score)


def assert_is(checkpoint, step: int) -> None:
    assert checkpoint.step == step
    assert checkpoint.meta == {"note": f"step {step}"}
    for name, expected in arrays_of(step).items():
        assert checkpoint.arrays[name].dtype == expected.dtype
        np.testing.assert_array_equal(checkpoint.arrays[name], expected)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_array_and_json_come_back_exactly(tmp_path_factory, data):
    shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
    array = data.draw(st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, shapes)))
    json_values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.text(min_size=1).filter(lambda k: k[0] != "$"), inner, max_size=3)
        ),
        max_leaves=8,
    )
    value = data.draw(json_values)
    store = CheckpointStore(tmp_path_factory.mktemp("store"))
    store.save(1, {"a": array}, {"value": value})
    loaded = store.load(1)
    assert loaded.arrays["a"].dtype == array.dtype
    assert loaded.arrays["a"].shape == array.shape
    assert loaded.arrays["a"].tobytes() == array.tobytes()
    assert repr(loaded.meta) == repr({"value": value})  # repr: NaN equals NaN, 0.0 is not -0.0


@pytest.mark.parametrize("transform", [np.asfortranarray, lambda a: a[::2, ::-1], np.transpose])
def test_memory_order_does_not_matter(tmp_path, transform):
    array = transform(np.arange(24.0).reshape(4, 6))
    store = CheckpointStore(tmp_path)
    store.save(1, {"a": array, "big_endian": array.astype(">f8")}, {})
    np.testing.assert_array_equal(store.load(1).arrays["a"], array)
    np.testing.assert_array_equal(store.load(1).arrays["big_endian"], array)


def test_saving_copies_no_large_array(tmp_path):
    arrays = {name: np.ones(2_000_000) for name in "ab"}
    tracemalloc.start()
    try:
        CheckpointStore(tmp_path).save(1, arrays, {})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < arrays["a"].nbytes / 4


def test_a_state_goes_when_it_is_no_longer_used():
    """Without waiting for the garbage collector: states of large models would pile up."""
    gc.collect()
    gc.disable()
    try:
        array = np.ones(3)
        released = weakref.ref(array)
        arrays, tree = flatten_state({"a": [array]})
        state = unflatten_state(arrays, tree)
        del array, arrays, state
        assert released() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("bit_generator", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_random_generators_continue_exactly(tmp_path, bit_generator):
    generator = np.random.Generator(getattr(np.random, bit_generator)(7))
    generator.integers(10, size=3, dtype=np.int32)
    arrays, meta = flatten_state({"rng": generator.bit_generator.state, "huge": 2**20_000})
    store = CheckpointStore(tmp_path)
    store.save(0, arrays, meta)
    expected = generator.normal(size=10)
    loaded = store.load("last")
    state = unflatten_state(loaded.arrays, loaded.meta)
    other = np.random.Generator(getattr(np.random, bit_generator)(0))
    other.bit_generator.state = state["rng"]
    np.testing.assert_array_equal(other.normal(size=10), expected)
    assert state["huge"] == 2**20_000


def test_nested_state_round_trip(tmp_path):
    tree = {
        "env": {"state": np.ones((2, 3), np.float64), "rng": {"inc": 2**127 + 1}, "none": None},
        "optimizer": {"moments": [np.array(1.5, np.float32), np.zeros((0, 2), np.int64)], "t": 3},
        "a/b": {"~": np.array(True)},
        "a": {"b": {"~": np.array([7], np.uint8)}},
        "best": float("-inf"),
        "numpy": np.float32(0.1),
    }
    store = CheckpointStore(tmp_path)
    store.save(5, *flatten_state(tree))
    loaded = store.load(5)
    state = unflatten_state(loaded.arrays, loaded.meta)
    assert list(state) == list(tree)
    assert state["env"]["rng"] == {"inc": 2**127 + 1}
    assert state["env"]["none"] is None
    assert state["best"] == -math.inf
    assert state["numpy"] == float(np.float32(0.1))
    for path in (["env", "state"], ["optimizer", "moments", 0], ["optimizer", "moments", 1],
                 ["a/b", "~"], ["a", "b", "~"]):  # fmt: skip
        got, expected = state, tree
        for key in path:
            got, expected = got[key], expected[key]
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(got, expected)
    with pytest.raises(CheckpointError, match="env/state"):
        unflatten_state({}, loaded.meta)


def test_prune_keeps_last_best_and_the_one_just_saved(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    for step, score in [(10, 1.0), (20, 9.0), (30, math.nan), (40, 3.0), (50, None)]:
        save(store, step, score)
    assert store.steps() == [20, 40, 50]
    assert_is(store.best(), 20)
    assert_is(store.load("best"), 20)
    assert_is(store.load("last"), 50)
    save(store, 60, 9.0)
    assert store.best().step == 60  # of equal scores the newer
    assert store.steps() == [50, 60]
    save(store, 5)
    assert store.steps() == [5, 50, 60]
    store.discard_after(50)
    assert store.steps() == [5, 50]


def test_same_step_is_replaced(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    store.save(1, {"new": np.zeros(2)}, {"note": "new"})
    assert list(store.load(1).arrays) == ["new"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["000000000001"]


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two")
    store = CheckpointStore(directory)
    save(store, 1, score=1.0)
    save(store, 2, score=2.0)
    return directory


@settings(max_examples=200, deadline=None)
@given(
    file=st.sampled_from(["arrays.safetensors", "state.json"]),
    place=st.floats(0, 1, exclude_max=True),
    bit=st.integers(-1, 7),
)
def test_damage_never_gives_wrong_data(two_checkpoints, file, place, bit):
    """bit -1 truncates, others flip that bit, anywhere in either file of the newest."""
    path = two_checkpoints / "000000000002" / file
    intact = path.read_bytes()
    position = int(place * len(intact))
    damaged = bytearray(intact)
    if bit < 0:
        del damaged[position:]
    else:
        damaged[position] ^= 1 << bit
    path.write_bytes(damaged)
    try:
        store = CheckpointStore(two_checkpoints)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = store.latest()
        if found.step == 2:  # only white space between JSON tokens can differ unnoticed
            assert file == "state.json" and json.loads(damaged) == json.loads(intact)
        else:
            assert len(caught) == 1
            assert str(path) in str(caught[0].message)
            with pytest.raises(CheckpointError, match=file):
                store.load(2)
        assert_is(found, found.step)
    finally:
        path.write_bytes(intact)


@pytest.mark.parametrize("file", ["arrays.safetensors", "state.json"])
def test_missing_file_falls_back(tmp_path, file):
    store = CheckpointStore(tmp_path)
    save(store, 1, score=1.0)
    (save(store, 2, score=2.0) / file).unlink()
    with pytest.warns(UserWarning, match=f"{file} is damaged .No such file"):
        assert_is(store.latest(), 1)


def test_best_falls_back_to_the_next_best(tmp_path):
    store = CheckpointStore(tmp_path)
    for step, score in [(1, 5.0), (2, 9.0), (3, 1.0)]:
        folder = save(store, step, score)
        if step == 2:
            (folder / "arrays.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match="0 bytes instead of"):
        assert_is(store.best(), 1)


def test_swapped_folders_are_noticed(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    folder = save(store, 2)
    folder.rename(tmp_path / "000000000003")
    with pytest.warns(UserWarning, match="belongs to step 2"):
        assert_is(store.latest(), 1)


def test_nothing_or_nothing_intact(tmp_path):
    store = CheckpointStore(tmp_path / "none")
    assert store.latest() is None
    assert store.best() is None
    assert store.steps() == []
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*none: check the run directory"):
        store.load()
    (save(store, 1) / "state.json").write_text("{}")
    with pytest.warns(UserWarning), pytest.raises(CheckpointError, match="no intact checkpoint"):
        store.latest()
    with pytest.raises(CheckpointError, match="has a score: load 'last'"):
        store.load("best")


@pytest.mark.parametrize("which", ["../../etc", "000000000001", "newest", 99])
def test_unknown_checkpoint_lists_the_steps(tmp_path, which):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    with pytest.raises(CheckpointError, match="one of these steps: 1"):
        store.load(which)


def test_newer_schema_is_an_error_not_damage(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr("msrl_accel.checkpoint.SCHEMA_VERSION", 2)
        save(store, 2)
    with pytest.raises(CheckpointError, match=r"schema version 2.*upgrade msrl_accel"):
        store.latest()


@pytest.mark.parametrize(
    ("arrays", "meta", "step", "message"),
    [
        ({"../x": np.zeros(1)}, {}, 1, "array name '../x'"),
        ({"/x": np.zeros(1)}, {}, 1, "array name '/x'"),
        ({"": np.zeros(1)}, {}, 1, "array name ''"),
        ({"__metadata__": np.zeros(1)}, {}, 1, "__metadata__"),
        ({"x": np.array(["text"])}, {}, 1, "dtype <U4"),
        ({"x": np.array([object()])}, {}, 1, "dtype object"),
        ({}, {"x": np.zeros(1)}, 1, "meta.x is of type ndarray.*flatten_state"),
        ({}, {"x": {1: 2}}, 1, "key 1 of meta.x"),
        ({}, {"x": [{"$int": 2}]}, 1, r"key '\$int' of meta.x\[0\]"),
        ({}, {}, -1, "step is -1"),
        ({}, {}, 10**12, "step is 1000000000000"),
    ],
)
def test_unusable_values_are_refused(tmp_path, arrays, meta, step, message):
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        store.save(step, arrays, meta)
    assert store.steps() == []


@pytest.mark.parametrize("step", [2, 1])
def test_full_disk_leaves_older_checkpoints(tmp_path, monkeypatch, step):
    store = CheckpointStore(tmp_path)
    save(store, 1)

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=f"00{step}: No space left.*free disk space"):
            store.save(step, {}, {})
    assert_is(store.latest(), 1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["000000000001"]


@pytest.mark.parametrize("operation", ["rename", "fsync", "mkdir", "rmtree"])
@pytest.mark.parametrize("call", range(1, 6))
@pytest.mark.parametrize("step", [2, 3])
def test_death_between_any_two_operations(tmp_path, monkeypatch, operation, call, step):
    """Stops at each system call in turn, with nothing cleaned up, and opens the store again."""

    class Death(BaseException):
        pass

    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 2)
    holder = {"rename": os, "fsync": os, "mkdir": Path, "rmtree": shutil}[operation]
    real, calls = getattr(holder, operation), 0

    def dying(*arguments, **keywords):
        nonlocal calls
        calls += 1
        if calls >= call:
            raise Death
        return real(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *a, **k: None)
        patch.setattr(holder, operation, dying)
        with contextlib.suppress(Death):
            store.save(step, {"new": np.ones(3)}, {"note": "new"})
    survivor = CheckpointStore(tmp_path, keep_last=1)
    found = survivor.latest()
    if found.meta["note"] == "new":
        np.testing.assert_array_equal(found.arrays["new"], np.ones(3))
    else:
        assert_is(found, 2)
    save(survivor, 4)
    assert [entry.name for entry in tmp_path.iterdir()] == ["000000000004"]


CHILD = """
import sys, itertools, numpy as np
from msrl_accel.checkpoint import CheckpointStore
store = CheckpointStore(sys.argv[1], keep_last=2)
for step in itertools.count():
    step //= 2  # every other save replaces the one before
    store.save(step, {"a": np.full(20_000, step)}, {"step": step})
    print(step, flush=True)
"""


@pytest.mark.parametrize("delay", [0.0, 0.013, 0.031])
def test_kill_in_the_middle_of_saves(tmp_path, delay):
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        for _ in range(8):
            child.stdout.readline()
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        printed = [3, *map(int, child.stdout.read().split())]
    store = CheckpointStore(tmp_path, keep_last=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = store.latest()
    assert found.step in (printed[-1], printed[-1] + 1)
    assert found.meta == {"step": found.step}
    assert np.all(found.arrays["a"] == found.step)
    save(store, 10**6)
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".")]
