"""Memory-mapped files: equal to memory, refused when they cannot be used, resumed exactly."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from replay_helpers import IMAGE_SPEC, VECTOR_SPEC, Kept, Stream, check_samples, numbers_of

from msrl_accel.checkpoint import CheckpointStore, flatten_state, unflatten_state
from msrl_accel.errors import CheckpointError, ConfigError
from msrl_accel.replay import PrioritySettings, ReplayBuffer, ShardedReplay

cases = st.fixed_dictionaries(
    {
        "spec": st.sampled_from([VECTOR_SPEC, IMAGE_SPEC]),
        "n_envs": st.integers(1, 3),
        "rows": st.integers(1, 8),
        "n_step": st.integers(1, 3),
        "share_next": st.booleans(),
        "prioritized": st.booleans(),
        "next_step_reset": st.booleans(),
        "before": st.integers(1, 20),
        "after": st.integers(0, 20),
        "seed": st.integers(0, 2**32 - 1),
    }
)
quick = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def build(case, folder=None, n_shards=None):
    options = {
        "gamma": 0.9,
        "n_step": case["n_step"],
        "share_next": case["share_next"],
        "prioritized": PrioritySettings() if case["prioritized"] else None,
        "folder": folder,
    }
    size = (case["spec"], case["rows"] * case["n_envs"], case["n_envs"])
    if n_shards:
        return ShardedReplay.create(n_shards, *size, **options)
    return ReplayBuffer(*size, **options)


def stream_of(case):
    return Stream(case["spec"], case["n_envs"], case["seed"], case["next_step_reset"])


def train(replay, stream, rng, steps):
    """What training does with a replay; everything it sampled."""
    drawn = []
    for _ in range(steps):
        replay.add(*stream.step())
        if len(replay):
            batch = replay.sample(rng, 6, k=2)
            replay.update_priorities(batch.indices, batch.rewards)
            drawn.append(batch)
    return drawn


def assert_same(one, two):
    assert len(one) == len(two)
    for a, b in zip(one, two):
        for x, y in zip(
            [*a.observations, *a.next_observations, *a[1:3], *a[4:]],
            [*b.observations, *b.next_observations, *b[1:3], *b[4:]],
        ):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)


def saved_and_loaded(state, folder):
    """The state as a checkpoint gives it back."""
    store = CheckpointStore(folder)
    arrays, tree = flatten_state({"replay": state})
    store.save(1, arrays, {"state": tree})
    checkpoint = store.load()
    return unflatten_state(checkpoint.arrays, checkpoint.meta["state"])["replay"]


@given(cases, st.booleans())
@quick
def test_files_give_what_memory_gives(tmp_path, case, sharded):
    shutil.rmtree(tmp_path / "replay", ignore_errors=True)
    n_shards = case["n_envs"] if sharded else None
    drawn = []
    for folder in (None, tmp_path / "replay"):
        replay, rng = build(case, folder, n_shards), np.random.default_rng(case["seed"])
        drawn.append(train(replay, stream_of(case), rng, case["before"]))
        replay.close()
    assert_same(*drawn)


@given(cases, st.booleans(), st.booleans())
@quick
def test_a_restored_replay_goes_on_as_one_that_was_never_interrupted(
    tmp_path, case, sharded, in_files
):
    shutil.rmtree(tmp_path / "replay", ignore_errors=True)
    shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
    folder = tmp_path / "replay" if in_files else None
    n_shards = case["n_envs"] if sharded else None
    rng, stream = np.random.default_rng(case["seed"]), stream_of(case)
    uninterrupted = build(case, n_shards=n_shards)
    other_rng, other_stream = np.random.default_rng(case["seed"]), stream_of(case)
    train(uninterrupted, other_stream, other_rng, case["before"])
    saved = build(case, folder, n_shards)
    train(saved, stream, rng, case["before"])
    state = saved_and_loaded(saved.state(), tmp_path / "checkpoints")
    if not in_files:
        train(saved, stream_of(case), np.random.default_rng(0), 3)  # the state is a copy
    saved.close()
    restored = build(case, folder, n_shards)
    restored.restore(state)
    assert len(restored) == len(uninterrupted)
    if len(restored):
        assert_same([restored.sample(rng, 50)], [uninterrupted.sample(other_rng, 50)])
    assert_same(
        train(restored, stream, rng, case["after"]),
        train(uninterrupted, other_stream, other_rng, case["after"]),
    )
    restored.close()


@given(cases)
@quick
def test_what_was_overwritten_after_the_checkpoint_is_left_out(tmp_path, caplog, case):
    folder = tmp_path / "replay"
    shutil.rmtree(folder, ignore_errors=True)
    replay, stream = build(case, folder), stream_of(case)
    rng = np.random.default_rng(case["seed"])
    train(replay, stream, rng, case["before"])
    state = replay.state()
    kept = Kept(stream, case["rows"], case["share_next"], 0.9, case["n_step"])
    saved = len(replay)
    for life in range(2):  # the second one goes less far than the first
        train(replay, stream, rng, case["after"] // (life + 1))
        replay.close()
        replay = build(case, folder)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "msrl_accel"):
            replay.restore(state)
        lost = saved - len(replay)
        assert (f"{lost} of the oldest transitions" in caplog.text) == (lost > 0)
        replay.end_episodes()  # the environments did not go back to the checkpoint
        stream.restart()
    assert lost <= case["after"] * case["n_envs"] * (1 + case["share_next"])
    if not case["after"]:
        assert lost == 0
    if len(replay):
        # What is left is as it was, and of each environment the newest.
        stored = np.flatnonzero(replay.eligible)
        replay.update_priorities(stored, np.ones(len(stored)))
        numbers = set(numbers_of(case["spec"], replay.sample(rng, 1000).observations))
        assert numbers <= set(kept.expected)
        kept.expected = {n: kept.expected[n] for n in numbers}
        check_samples(replay, kept, rng)
    replay.close()


CASE = {
    "spec": VECTOR_SPEC,
    "n_envs": 2,
    "rows": 8,
    "n_step": 1,
    "share_next": False,
    "prioritized": True,
    "next_step_reset": False,
    "before": 5,
    "after": 5,
    "seed": 0,
}


def test_a_state_in_memory_can_be_taken_into_files(tmp_path):
    replay, stream = build(CASE), stream_of(CASE)
    train(replay, stream, np.random.default_rng(0), 20)
    in_files = build(CASE, tmp_path)
    train(in_files, stream_of(CASE), np.random.default_rng(0), 3)
    overwritten = in_files.state()
    in_files.restore(replay.state())
    in_files.close()
    reopened = build(CASE, tmp_path)
    with pytest.raises(CheckpointError, match="not those of this checkpoint"):
        reopened.restore(overwritten)
    reopened.restore(in_files.state())
    rng = np.random.default_rng
    assert_same([reopened.sample(rng(1), 50)], [replay.sample(rng(1), 50)])
    reopened.close()


def test_a_state_in_files_needs_its_folder(tmp_path):
    replay = build(CASE, tmp_path)
    train(replay, stream_of(CASE), np.random.default_rng(0), 5)
    with pytest.raises(CheckpointError, match="in files: give the folder"):
        build(CASE).restore(replay.state())
    replay.close()


@pytest.mark.parametrize(
    "change, field",
    [
        ({"rows": 9}, "rows"),
        ({"n_envs": 1, "rows": 8}, "n_envs"),
        ({"share_next": True, "rows": 7}, "share_next"),
        ({"spec": IMAGE_SPEC}, "arrays"),
    ],
)
def test_a_folder_or_state_of_another_shape_is_refused(tmp_path, change, field):
    replay = build(CASE, tmp_path)
    train(replay, stream_of(CASE), np.random.default_rng(0), 5)
    state = replay.state()
    replay.close()
    contents = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match=f"another shape .{field}: .* delete this one"):
        build({**CASE, **change}, tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == contents
    with pytest.raises(CheckpointError, match=f"the saved replay has {field}"):
        build({**CASE, **change}).restore(state)
    with pytest.raises(CheckpointError, match="0 shards, this one 2"):
        build(CASE, n_shards=2).restore(state)
    build(CASE, tmp_path).close()  # the one it is for can still use it


def test_a_uniform_state_is_refused_by_a_prioritised_replay():
    state = build({**CASE, "prioritized": False}).state()
    with pytest.raises(CheckpointError, match=r"priority_alpha = None, this one 0\.6"):
        build(CASE).restore(state)


def test_a_folder_in_use_is_refused(tmp_path):
    replay = build(CASE, tmp_path)
    with pytest.raises(ConfigError, match="another replay is using it"):
        build(CASE, tmp_path)
    replay.close()
    replay.close()
    build(CASE, tmp_path).close()


def test_a_folder_that_another_run_has_used_since_is_refused(tmp_path):
    first = build(CASE, tmp_path)
    train(first, stream_of(CASE), np.random.default_rng(0), 5)
    state = first.state()
    first.close()
    second = build(CASE, tmp_path)
    assert len(second) == 0
    second.close()  # without writing: the first run can still resume
    second = build(CASE, tmp_path)
    second.restore(state)
    assert len(second) == len(first)
    second.close()
    second = build(CASE, tmp_path)
    train(second, stream_of(CASE), np.random.default_rng(0), 1)
    second.close()
    third = build(CASE, tmp_path)
    with pytest.raises(CheckpointError, match="not those of this checkpoint"):
        third.restore(state)
    third.close()


def test_a_new_run_in_a_used_folder_resumes_exactly(tmp_path, caplog):
    first = build(CASE, tmp_path)
    train(first, stream_of(CASE), np.random.default_rng(0), 100)
    first.close()
    second = build(CASE, tmp_path)
    train(second, stream_of(CASE), np.random.default_rng(0), 20)
    state = second.state()
    second.close()
    resumed = build(CASE, tmp_path)
    resumed.restore(state)
    assert len(resumed) == len(second) == 16
    assert not caplog.records
    resumed.close()


def test_a_full_disk_is_a_clear_error_and_leaves_nothing(tmp_path, monkeypatch):
    allocated = []

    def fill(descriptor, offset, length):
        if len(allocated) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocated.append(length)

    monkeypatch.setattr(os, "posix_fallocate", fill)
    with pytest.raises(ConfigError, match=r"cannot allocate 5.* bytes .*No space left on device"):
        build(CASE, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["replay.lock"]
    monkeypatch.undo()
    build(CASE, tmp_path).close()


def test_the_files_are_allocated_when_they_are_created(tmp_path):
    build(CASE, tmp_path).close()
    for file in tmp_path.glob("*.bin"):
        assert file.stat().st_blocks * 512 >= file.stat().st_size > 0


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot keep a replay there: Not a directory"):
        build(CASE, tmp_path / "file" / "replay")


def test_damaged_files_are_named(tmp_path):
    build(CASE, tmp_path).close()
    with open(tmp_path / "reward.bin", "ab") as file:
        file.truncate(3)
    with pytest.raises(CheckpointError, match=r"reward\.bin has 3 bytes instead of 64"):
        build(CASE, tmp_path)
    description = json.loads((tmp_path / "replay.json").read_text())
    del description["layout"]
    (tmp_path / "replay.json").write_text(json.dumps(description))
    with pytest.raises(CheckpointError, match=r"replay\.json is damaged"):
        build(CASE, tmp_path)
