from __future__ import annotations

import errno
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrl_accel.errors import PipelineError
from msrl_accel.shared_memory import (
    ALIGNMENT,
    PREFIX,
    ArraySpec,
    BlockHandle,
    SharedBlock,
    check_arrays,
    layout_nbytes,
    views,
)

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
DTYPES = st.sampled_from(["bool", "uint8", "int32", "float32", "float64"])


def mapped(pid="self"):
    """Blocks that a process maps."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in lines if PREFIX in line.partition("/")[2]]


@pytest.fixture(params=["memfd", "file"])
def kind(request, monkeypatch):
    if request.param == "file":
        monkeypatch.delattr(os, "memfd_create")
    return request.param


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(SHAPES, DTYPES), max_size=5))
def test_views_of_any_layout_are_apart_aligned_and_seen_by_both_sides(entries):
    layout = [
        ArraySpec(f"a{i}", shape, np.dtype(dtype).str) for i, (shape, dtype) in enumerate(entries)
    ]
    block = SharedBlock.create("test", layout_nbytes(layout))
    other = SharedBlock.attach(block.handle)
    ours, theirs = views(block.memory, layout), views(other.memory, layout)
    for i, spec in enumerate(layout):
        assert ours[spec.name].shape == spec.shape
        assert ours[spec.name].dtype == spec.dtype
        assert ours[spec.name].ctypes.data % ALIGNMENT == 0
        ours[spec.name][...] = i % 2 if spec.dtype == "|b1" else i + 1
    for i, spec in enumerate(layout):
        expected = i % 2 if spec.dtype == "|b1" else i + 1
        assert (theirs[spec.name] == expected).all()
    del ours, theirs
    other.close()
    block.close()
    assert not mapped()


def test_blocks_have_no_name_and_go_when_closed(kind):
    before = set(os.listdir("/dev/shm"))
    descriptors = len(os.listdir("/proc/self/fd"))
    block = SharedBlock.create("weights", 1000)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith(PREFIX)]
    assert PREFIX + "weights" in mapped()[0]
    handle = pickle.loads(pickle.dumps(block.handle))
    other = SharedBlock.attach(handle)
    block.memory[:] = 7
    assert (other.memory == 7).all()
    assert (block.owner, other.owner) == (True, False)
    block.close()
    assert len(mapped()) == 1
    assert (other.memory == 7).all()  # whoever has it keeps it
    with pytest.raises(PipelineError, match="is gone"):
        SharedBlock.attach(handle)
    other.close()
    other.close()
    assert not mapped()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_view_outlives_its_block(kind):
    block = SharedBlock.create("test", 64)
    view = block.memory[:8]
    block.close()
    view[:] = 3
    assert view.sum() == 24
    del view
    assert not mapped()


def test_a_descriptor_number_used_again_is_noticed(tmp_path):
    block = SharedBlock.create("test", 64)
    other_file = tmp_path / "other"
    other_file.write_bytes(bytes(4096))
    with open(other_file, "r+b") as file:
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        with pytest.raises(PipelineError, match="is gone"):
            SharedBlock.attach(BlockHandle(path, 64, block.handle.token))
        with pytest.raises(PipelineError, match="is gone"):
            SharedBlock.attach(BlockHandle(path, 100_000, block.handle.token))
    block.close()


def test_too_little_memory_is_said(kind, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PipelineError, match=r"50\.0 MB of shared memory for weights .*--shm-size"):
        SharedBlock.create("weights", 50 * 2**20)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_killed_owner_leaves_nothing_and_its_readers_go_on():
    script = """
        import sys
        from msrl_accel.shared_memory import SharedBlock
        block = SharedBlock.create("victim", 4096)
        block.memory[:] = 5
        h = block.handle
        print(h.path, h.nbytes, h.token, flush=True)
        sys.stdin.read()
    """
    before = set(os.listdir("/dev/shm"))
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as owner:
        path, nbytes, token = owner.stdout.readline().split()
        reader = SharedBlock.attach(BlockHandle(path, int(nbytes), int(token)))
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert owner.stderr.read() == ""
    assert (reader.memory == 5).all()
    with pytest.raises(PipelineError, match="is gone"):
        SharedBlock.attach(reader.handle)
    reader.close()
    assert not mapped()
    assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith(PREFIX)]


LAYOUT = (ArraySpec("w", (2, 3), "<f4"), ArraySpec("b", (3,), "<f4"))
GOOD = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float32)}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"w": GOOD["w"]}, "'b' of the shared layout is missing"),
        ({**GOOD, "c": GOOD["b"]}, "'c' is not in the shared layout"),
        ({**GOOD, "w": np.zeros((3, 2), np.float32)}, r"'w' has shape \(3, 2\)"),
        ({**GOOD, "b": np.zeros(3)}, r"'b' has shape \(3,\) and dtype <f8"),
    ],
)
def test_arrays_of_another_layout_are_refused(arrays, message):
    check_arrays(LAYOUT, GOOD)
    with pytest.raises(PipelineError, match=message):
        check_arrays(LAYOUT, arrays)
