from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from publish_helpers import fail_when_torn, patterned, read_until, write_versions

from msrl_accel.errors import PipelineError
from msrl_accel.publish import ModelRegistry, WeightStore
from msrl_accel.shared_memory import ArraySpec

SPAWN = multiprocessing.get_context("spawn")
ARRAYS = {"w": np.zeros((3, 2), np.float32), "steps": np.zeros((), np.int64)}


def arrays_of(version):
    return {"w": np.full((3, 2), version, np.float32), "steps": np.array(version, np.int64)}


@pytest.fixture
def stores():
    writer = WeightStore.create(ARRAYS)
    reader = WeightStore.attach(pickle.loads(pickle.dumps(writer.handle)))
    yield writer, reader
    reader.close()
    writer.close()


def test_a_reader_gets_the_newest_version_once(stores):
    writer, reader = stores
    assert reader.latest_version() == -1
    assert reader.read() is None
    for version in (0, 1, 5):
        writer.publish(version, arrays_of(version))
        assert reader.latest_version() == version
        got, arrays = reader.read(newer_than=version - 1)
        assert got == version
        for name, expected in arrays_of(version).items():
            np.testing.assert_array_equal(arrays[name], expected)
            assert arrays[name].dtype == expected.dtype
        assert reader.read(newer_than=version) is None
        assert reader.read()[0] == version


def test_what_was_read_is_a_copy(stores):
    writer, reader = stores
    writer.publish(1, arrays_of(1))
    _, first = reader.read()
    for version in range(2, 6):
        writer.publish(version, arrays_of(version))
    assert (first["w"] == 1).all()
    first["w"][:] = -1
    assert (reader.read()[1]["w"] == 5).all()


def test_a_reader_may_wait_until_it_is_too_far_behind(stores):
    writer, reader = stores
    for version in range(4):
        writer.publish(version, arrays_of(version))
        got = reader.read(newer_than=0, min_lag=3)
        assert (got is None) == (version < 3)
    assert got[0] == 3


def test_wrong_publications_are_refused_and_leave_the_last_one(stores):
    writer, reader = stores
    writer.publish(3, arrays_of(3))
    for version in (3, 2, -1):
        with pytest.raises(PipelineError, match="not newer than the published 3"):
            writer.publish(version, arrays_of(version))
    with pytest.raises(PipelineError, match="'steps' of the shared layout is missing"):
        writer.publish(4, {"w": ARRAYS["w"]})
    with pytest.raises(PipelineError, match="only by the process that made"):
        reader.publish(4, arrays_of(4))
    assert reader.read()[0] == 3


def test_a_closed_store_says_so():
    store = WeightStore.create(ARRAYS)
    handle = store.handle
    store.close()
    store.close()
    for use in (store.read, store.latest_version, lambda: store.publish(0, arrays_of(0))):
        with pytest.raises(PipelineError, match="closed"):
            use()
    with pytest.raises(PipelineError, match="is gone"):
        WeightStore.attach(handle)


# What a reader meets when the writer is stopped or killed halfway, or seen in another order.


def test_a_half_written_version_is_not_seen(stores):
    writer, reader = stores
    for version in (1, 2):
        writer.publish(version, arrays_of(version))
    # As far as a writer of version 3 gets before its last line.
    writer._records[1][0] = 3
    writer._arrays[1]["w"][:2] = 3
    assert reader.read()[0] == 2
    writer.publish(3, arrays_of(3))
    assert reader.read()[0] == 3


def test_a_writer_that_comes_round_while_a_version_is_copied_is_noticed(stores):
    writer, reader = stores
    writer.publish(1, arrays_of(1))

    class Overwritten:
        """The buffer of version 1, which the writer changes right after it is copied."""

        def __init__(self, buffer):
            self.buffer = buffer

        def copy(self):
            reader._buffers[1] = self.buffer
            copied = self.buffer.copy()
            for version in (2, 3):
                writer.publish(version, arrays_of(version))
            return copied

    reader._buffers[1] = Overwritten(reader._buffers[1])
    version, arrays = reader.read()
    assert version == 3
    assert (arrays["w"] == 3).all()
    assert reader.retries == 1


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_mixture_that_the_sequence_does_not_show_fails_its_checksum(data):
    """On ARM stores may be seen late: any words of the buffer may still be those of before."""
    writer = WeightStore.create(ARRAYS)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    for version in range(4):
        writer.publish(
            version, {"w": rng.normal(size=(3, 2)).astype("f4"), "steps": ARRAYS["steps"]}
        )
        if version == 1:
            before = writer._buffers[0].copy()
    words, old = writer._buffers[0].view(np.uint64), before.view(np.uint64)
    late = data.draw(st.sets(st.integers(0, 2), min_size=1))
    for i in late:
        words[i] = old[i]
    clock, looks = time.monotonic, []

    def visible_after_two_attempts():
        looks.append(1)
        if len(looks) == 3:
            writer.publish(9, arrays_of(9))
        return clock()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("msrl_accel.publish.time.monotonic", visible_after_two_attempts)
        assert writer.read()[0] == 9
    assert writer.retries == 2
    writer.close()


def test_a_version_that_never_becomes_whole_is_an_error_naming_the_stage(stores, monkeypatch):
    writer, reader = stores
    writer.publish(1, arrays_of(1))
    writer._arrays[1]["w"][0] = 7
    monkeypatch.setattr("msrl_accel.publish._READ_SECONDS", 0.05)
    with pytest.raises(PipelineError, match="publish: no whole version could be read"):
        reader.read()


def test_a_writer_killed_at_any_time_leaves_its_last_whole_version():
    parent, child = SPAWN.Pipe()
    process = SPAWN.Process(target=write_versions, args=(child, 200_000))
    process.start()
    child.close()
    store = WeightStore.attach(parent.recv())
    parent.send("attached")
    while store.latest_version() < 20:
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    version, arrays = store.read()
    assert version == store.latest_version()
    fail_when_torn(version, arrays)
    store.close()
    parent.close()


def stress(words, readers, reads):
    """Readers in processes of their own against one writer that never rests."""
    store = WeightStore.create(patterned(0, words))
    store.publish(0, patterned(0, words))
    results = SPAWN.SimpleQueue()
    processes = [
        SPAWN.Process(target=read_until, args=(store.handle, reads // readers, results))
        for _ in range(readers)
    ]
    for process in processes:
        process.start()
    finished = threading.Event()

    def wait():
        for process in processes:
            process.join()
        finished.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    version, arrays = 0, patterned(0, words)
    while not finished.is_set():
        version += 1
        for array in arrays.values():
            array += 1  # as `patterned` would have it
        store.publish(version, arrays)
    waiter.join()
    assert [process.exitcode for process in processes] == [0] * readers
    totals = np.sum([results.get() for _ in range(readers)], axis=0)
    results.close()
    store.close()
    return totals


def test_readers_under_a_restless_writer_see_whole_versions_only():
    reads, versions, _ = stress(words=20_000, readers=3, reads=3_000)
    assert reads == 3_000
    assert versions > 10


@pytest.mark.slow
@pytest.mark.parametrize("words", [100, 20_000])
def test_a_million_reads_see_whole_versions_only(words):
    reads, versions, retries = stress(words, readers=8, reads=1_000_000)
    print(f"{reads} reads of {versions} versions, {retries} done again")
    assert reads == 1_000_000
    assert retries > 0


# The registry


def registry_of(**intervals):
    registry = ModelRegistry()
    for name, interval in intervals.items():
        registry.register(name, ARRAYS, lambda: arrays_of(1), interval)
    return registry


def test_models_are_published_each_at_its_default_pace():
    registry = registry_of(actor=None, critic=None, reward=None, reference=None)
    published = {step: registry.scan(step) for step in range(0, 2001, 100)}
    assert {step: names for step, names in published.items() if names} == {
        0: ["actor", "critic", "reward", "reference"],
        500: ["actor"],
        1000: ["actor", "critic"],
        1500: ["actor"],
        2000: ["actor", "critic", "reward", "reference"],
    }
    assert {name: model.version for name, model in registry.models.items()} == {
        "actor": 4,
        "critic": 2,
        "reward": 1,
        "reference": 1,
    }
    registry.close()


def test_a_model_that_is_not_ready_holds_up_no_other_and_stays_due():
    registry = ModelRegistry()
    ready = []
    registry.register("actor", ARRAYS, lambda: arrays_of(0), 10)
    registry.register("world", ARRAYS, lambda: arrays_of(5) if ready else None, 10)
    for step in (0, 10):
        assert registry.scan(step) == ["actor"]
    assert registry.due(11) == ["world"]
    ready.append(True)
    assert registry.scan(11) == ["world"]
    assert registry.due(20) == ["actor"]
    assert registry.models["world"].store.read()[1]["steps"] == 5
    registry.close()


def test_the_interval_counts_from_the_last_publication():
    registry = registry_of(actor=10)
    assert registry.scan(3) == ["actor"]
    assert registry.due(12) == []
    before = time.time()
    assert registry.publish("actor", 12)  # out of turn
    assert before <= registry.models["actor"].last_publish_time <= time.time()
    assert registry.due(21) == []
    assert registry.due(22) == ["actor"]
    registry.close()


def test_versions_continue_after_a_restart():
    registry = registry_of(actor=10)
    for step in (0, 10, 20):
        registry.scan(step)
    state = registry.state()
    registry.close()
    again = registry_of(actor=10)
    again.restore(state)
    assert again.scan(21) == ["actor"]  # its store is new
    reader = WeightStore.attach(again.handles()["actor"])
    assert reader.latest_version() == 3
    assert again.due(30) == []
    reader.close()
    again.close()


def test_registrations_that_cannot_work_are_refused():
    registry = registry_of(actor=None)
    with pytest.raises(PipelineError, match="'actor' is already registered"):
        registry.register("actor", ARRAYS, lambda: None)
    with pytest.raises(PipelineError, match="'opponent': refresh_interval = None"):
        registry.register("opponent", ARRAYS, lambda: None)
    with pytest.raises(PipelineError, match="refresh_interval = 0"):
        registry.register("opponent", ARRAYS, lambda: None, 0)
    assert registry.handles()["actor"].layout == tuple(ArraySpec.of(*x) for x in ARRAYS.items())
    registry.close()
