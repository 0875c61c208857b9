"""Safetensors files against the `safetensors` package, and damaged ones."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from msrl_accel.errors import LMError
from msrl_accel.lm.safetensors_io import (
    bfloat16_to_float32,
    float32_to_bfloat16,
    read_safetensors,
    write_safetensors,
)

ARRAYS = {
    "matrix": np.arange(12, dtype=np.float32).reshape(3, 4) / 7,
    "row": np.array([-0.0, 1e-7, 65504.0], np.float32),
    "scalar": np.array(2.5, np.float32),
    "empty": np.zeros((0, 4), np.float32),
}


def raw_file(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_reads_what_the_package_writes(tmp_path, dtype):
    path = tmp_path / "a.safetensors"
    save_file({name: a.astype(dtype) for name, a in ARRAYS.items()}, path, {"format": "pt"})
    arrays = read_safetensors(path)
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == np.float32
        assert np.array_equal(arrays[name], array.astype(dtype).astype(np.float32))


def test_reads_bfloat16(tmp_path):
    # 1, -2, 0.15625 and infinity, by their bits: the upper half of float32.
    data = struct.pack("<4H", 0x3F80, 0xC000, 0x3E20, 0x7F80)
    header = {"m": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}}
    array = read_safetensors(raw_file(tmp_path / "a.safetensors", header, data))["m"]
    assert array.dtype == np.float32
    assert array.tolist() == [[1.0, -2.0], [0.15625, np.inf]]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_package_reads_what_is_written(tmp_path, dtype):
    path = tmp_path / "a.safetensors"
    write_safetensors(path, ARRAYS, dtype)
    arrays = load_file(path)
    assert {name: a.dtype for name, a in arrays.items()} == dict.fromkeys(ARRAYS, np.dtype(dtype))
    for name, array in ARRAYS.items():
        assert np.array_equal(arrays[name], array.astype(dtype))
    with safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_written_bfloat16_reads_back_rounded(tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    path = tmp_path / "a.safetensors"
    write_safetensors(path, ARRAYS, "bfloat16")
    with safe_open(path, "np") as file:
        assert file.get_slice("matrix").get_dtype() == "BF16"
    for name, array in read_safetensors(path).items():
        assert np.array_equal(array, ARRAYS[name].astype(ml_dtypes.bfloat16).astype(np.float32))


@given(st.lists(st.floats(width=32), min_size=1))
def test_bfloat16_rounds_as_ml_dtypes(numbers):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.array(numbers, np.float32)
    with np.errstate(all="ignore"):
        expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    rounded = bfloat16_to_float32(float32_to_bfloat16(values))
    np.testing.assert_array_equal(rounded, expected)
    assert np.array_equal(np.signbit(rounded), np.signbit(values))


def test_a_number_beyond_float16_is_not_written_as_infinity(tmp_path):
    with pytest.raises(LMError, match=r"w has values.*float16.*bfloat16"):
        write_safetensors(tmp_path / "a", {"w": np.array([1e5], np.float32)}, "float16")


def test_a_file_cut_anywhere_is_refused(tmp_path):
    whole = tmp_path / "a.safetensors"
    save_file({"a": np.ones((2, 3), np.float32), "b": np.ones(2, np.float32)}, whole)
    content = whole.read_bytes()
    cut = tmp_path / "cut.safetensors"
    for size in range(len(content)):
        cut.write_bytes(content[:size])
        with pytest.raises(LMError, match="cut"):
            read_safetensors(cut)


def entry(**changes):
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"{nonsense", "damaged header"),
        (b"[" * 100_000, "damaged header"),
        (b"[1]", "damaged header"),
        (entry(dtype="F8_E4M3"), "'F8_E4M3'.*BF16"),
        (entry(dtype="I64"), "'I64'"),
        (entry(dtype=["F32"]), "describes w wrongly"),
        (entry(shape=[3]), "8 bytes of w"),
        (entry(shape=[-2]), "describes w wrongly"),
        (entry(shape=[2**70]), "8 bytes of w"),
        (entry(shape=2), "describes w wrongly"),
        (entry(data_offsets=[4, 0]), "-4 bytes of w"),
        (entry(data_offsets=[0, 16], shape=[4]), "cut off"),
        (entry(data_offsets=[0]), "describes w wrongly"),
        ({"w": 3}, "describes w wrongly"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path, header, words):
    path = raw_file(tmp_path / "a.safetensors", header, bytes(8))
    with pytest.raises(LMError, match=words):
        read_safetensors(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(LMError, match=r"absent\.safetensors"):
        read_safetensors(tmp_path / "absent.safetensors")


def test_arrays_outlive_their_file(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"w": np.ones(1000, np.float32)}, path)
    array = read_safetensors(path)["w"]
    path.write_bytes(b"")
    assert array.sum() == 1000
    array += 1
