from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing import connection

import pytest
from pipeline_helpers import (
    LAYOUT,
    fill,
    hold,
    produce,
    produce_and_die,
    produce_until_closed,
    start_and_hang,
    wait_for_a_slot,
)

from msrl_accel.errors import PipelineError
from msrl_accel.pipeline.shared_queue import Producer, QueueClosed, SharedQueue
from msrl_accel.pipeline.staleness import StalenessManager
from msrl_accel.shared_memory import ArraySpec

SPAWN = multiprocessing.get_context("spawn")


def start(target, *arguments):
    process = SPAWN.Process(target=target, args=arguments)
    process.start()
    return process


def until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def queue():
    made = SharedQueue(LAYOUT, slots=3)
    yield made
    made.close()
    assert not made._thread.is_alive()


@pytest.fixture
def results():
    made = SPAWN.SimpleQueue()
    yield made
    made.close()


def take(queue, timeout=30.0):
    """The label of the next trajectory, which must be whole."""
    slot = queue.get(timeout)
    label = slot.arrays["label"][0]
    assert (slot.arrays["x"] == label).all()
    queue.release(slot)
    return slot.producer, int(label)


def test_every_trajectory_of_every_process_arrives_whole_once_and_in_its_order(queue):
    processes = [start(produce, queue.producer(f"worker {i}"), 100 * i, 50) for i in range(3)]
    taken = [take(queue) for _ in range(150)]
    for i, process in enumerate(processes):
        process.join()
        assert process.exitcode == 0
        labels = [label for name, label in taken if name == f"worker {i}"]
        assert labels == list(range(100 * i, 100 * i + 50))
    assert queue.try_get(0) is None
    until(lambda: not queue._members)
    assert queue.reclaimed == 0


def local_producer(queue, name="worker 0"):
    """A producer in this process, with a copy of the pipe's end as another process has it."""
    handle = queue.producer(name)
    copy = connection.Connection(os.dup(handle.pipe.fileno()))
    return Producer(dataclasses.replace(handle, pipe=copy))


def test_no_more_than_the_slots_are_out_and_releasing_one_lets_the_next_in_line_go_on(queue):
    first, second = (local_producer(queue, name) for name in ("worker 0", "worker 1"))
    for label in range(3):
        slot = first.acquire(5)
        fill(slot, label)
        first.commit(slot)
    assert first.try_acquire(0.05) is None
    assert second.try_acquire(0.05) is None
    until(lambda: queue.stats()["ready"] == 3)
    assert queue.stats() == {"ready": 3, "filling": 0, "waiting_producers": 2, "reclaimed": 0}
    held = queue.get(5)
    assert first.try_acquire(0.05) is None  # the consumer still reads it
    queue.release(held)
    slot = first.acquire(5)  # its turn came first, and asking twice did not ask for two
    assert slot.number == held.number
    assert queue.stats()["waiting_producers"] == 1
    first.discard(slot)
    second.commit(second.acquire(5))
    for producer in (first, second):
        producer.close()


def test_waits_end_at_their_deadline_and_name_the_stage(queue):
    with pytest.raises(
        PipelineError, match=r"learner: no trajectory came for 0\.05 s; filling one: nobody"
    ):
        queue.get(0.05)
    producers = [local_producer(queue, f"worker {i}") for i in range(2)]
    for _ in range(3):
        producers[0].acquire(5)
    with pytest.raises(PipelineError, match=r"worker 1: no free slot .* for 0\.05 s; the learner"):
        producers[1].acquire(0.05)
    with pytest.raises(PipelineError, match="filling one: worker 0; waiting for a slot: worker 1"):
        queue.get(0.05)
    for producer in producers:
        producer.close()


def test_a_killed_producer_loses_no_slot_and_nothing_it_has_finished(queue):
    for round_ in range(4):  # more deaths than slots
        process = start(produce_and_die, queue.producer("worker 0"), 2)
        assert [take(queue) for _ in range(2)] == [("worker 0", 0), ("worker 0", 1)]
        process.join()
        until(lambda n=round_: queue.reclaimed == n + 1)
    assert queue.stats()["filling"] == 0
    producer = local_producer(queue)
    assert sorted(producer.acquire(5).number for _ in range(3)) == [0, 1, 2]
    producer.close()


def test_a_stopped_producer_holds_up_nobody_and_is_reclaimed_after_its_end(queue):
    ours, theirs = SPAWN.Pipe()
    stopped = start(hold, queue.producer("worker 0"), theirs)
    ours.recv()
    os.kill(stopped.pid, signal.SIGSTOP)
    other = start(produce, queue.producer("worker 1"), 0, 20)
    assert [take(queue)[1] for _ in range(20)] == list(range(20))
    other.join()
    assert queue.stats()["filling"] == 1
    stopped.kill()
    stopped.join()
    until(lambda: queue.stats()["filling"] == 0)
    assert queue.reclaimed == 1
    for end in (ours, theirs):
        end.close()


def test_a_producer_that_ends_before_its_first_message_can_be_replaced(queue):
    process = start(start_and_hang, queue.producer("worker 0"))
    process.kill()
    process.join()
    again = start(produce, queue.producer("worker 0"), 7, 1)
    assert take(queue) == ("worker 0", 7)
    again.join()
    assert again.exitcode == 0


def test_reclaiming_frees_what_a_producer_holds(queue):
    producer = local_producer(queue)
    producer.acquire(5)
    producer.acquire(5)
    assert queue.reclaim("worker 0") == 2
    assert queue.reclaim("worker 0") == 0
    with pytest.raises(QueueClosed, match="worker 0"):
        producer.acquire(5)
    producer.close()
    other = local_producer(queue, "worker 1")
    assert [other.try_acquire(5) is not None for _ in range(3)] == [True] * 3
    other.close()


def test_closing_wakes_producers_that_wait_and_producers_that_write(results):
    queue = SharedQueue(LAYOUT, slots=2)
    writing = start(produce_until_closed, queue.producer("worker 0"), results)
    take(queue)
    until(lambda: queue.stats()["waiting_producers"] == 1)
    waiting = start(wait_for_a_slot, queue.producer("worker 1"), results)
    until(lambda: queue.stats()["waiting_producers"] == 2)
    begin = time.monotonic()
    queue.close()
    for process in (writing, waiting):
        process.join(30)
        assert process.exitcode == 0
    assert time.monotonic() - begin < 30  # not the 60 s they would wait
    for _ in range(2):
        assert "the learner has closed the trajectory queue or ended" in str(results.get())


def test_closing_wakes_a_consumer_that_waits():
    queue = SharedQueue(LAYOUT, slots=1)
    threading.Timer(0.1, queue.close).start()
    with pytest.raises(QueueClosed, match="learner"):
        queue.get(60)
    queue.close()
    for use in (lambda: queue.get(1), lambda: queue.producer("x"), lambda: queue.reclaim("x")):
        with pytest.raises(QueueClosed):
            use()


def own_queue(pipe):
    """A learner's process: makes a queue and waits to be killed."""
    queue = SharedQueue(LAYOUT, slots=1)
    results = SPAWN.SimpleQueue()
    first, second = (queue.producer(f"worker {i}") for i in range(2))
    ready, theirs = SPAWN.Pipe()
    start(hold, first, theirs)
    ready.recv()
    worker = start(report_end, second, os.getpid())
    until(lambda: queue.stats()["waiting_producers"] == 1)
    pipe.send([child.pid for child in multiprocessing.active_children()])
    del results, worker
    time.sleep(600)


def report_end(handle, parent):
    try:
        Producer(handle).acquire(600)
    except QueueClosed:
        os._exit(0)


def test_producers_hear_of_a_killed_learner():
    ours, theirs = SPAWN.Pipe()
    learner = start(own_queue, theirs)
    workers = ours.recv()
    learner.kill()
    learner.join()
    # The one that waits ends by itself; the other, asleep, is ended here.
    until(lambda: sum(alive(pid) for pid in workers) <= 1)
    for pid in workers:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
    for end in (ours, theirs):
        end.close()


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_slots_are_given_out_as_the_admission_allows():
    staleness = StalenessManager(max_staleness=1, batch=2)
    queue = SharedQueue(LAYOUT, slots=10, admission=staleness)
    producer = local_producer(queue)
    for _ in range(4):
        producer.commit(producer.acquire(5))
    assert producer.try_acquire(0.05) is None  # with slots to spare
    for _ in range(2):
        queue.release(queue.get(5))
    assert producer.try_acquire(0.05) is None
    staleness.version = 1
    queue.admit_again()
    producer.discard(producer.acquire(5))  # makes room for another
    for _ in range(2):
        producer.commit(producer.acquire(5))
    assert producer.try_acquire(0.05) is None
    producer.close()
    queue.close()


def test_a_killed_producers_trajectory_is_withdrawn_from_the_admission():
    staleness = StalenessManager(max_staleness=0, batch=1)
    queue = SharedQueue(LAYOUT, slots=2, admission=staleness)
    for version in range(3):
        process = start(produce_and_die, queue.producer("worker 0"), 0)
        process.join()
        until(lambda n=version: queue.reclaimed == n + 1)
        other = local_producer(queue, "worker 1")
        other.commit(other.acquire(5))
        queue.release(queue.get(5))
        other.close()
        staleness.version = version + 1
        queue.admit_again()
    queue.close()


def test_slots_asked_for_together_come_one_by_one(queue):
    producer = local_producer(queue)
    producer.ask(2)
    first, second = (producer.try_acquire(5) for _ in range(2))
    until(lambda: queue.stats()["waiting_producers"] == 0)
    assert {first.number, second.number} == {0, 1}
    producer.ask(2)
    assert producer.try_acquire(5).number == 2
    assert producer.try_acquire(0.05) is None  # the second waits
    producer.discard(first)
    assert producer.try_acquire(5).number == first.number
    producer.close()


def test_a_producer_over_its_quota_holds_up_nobody():
    staleness = StalenessManager(max_staleness=0, batch=2, quota=1)
    queue = SharedQueue(LAYOUT, slots=4, admission=staleness)
    quick, slow = (local_producer(queue, f"worker {i}") for i in range(2))
    quick.commit(quick.acquire(5))
    assert quick.try_acquire(0.05) is None
    slow.commit(slow.acquire(5))
    assert [queue.get(5).producer for _ in range(2)] == ["worker 0", "worker 1"]
    staleness.version = 1
    queue.admit_again()
    quick.acquire(5)
    for producer in (quick, slow):
        producer.close()
    queue.close()


def test_a_queue_made_smaller_gives_slots_and_memory_back():
    layout = (ArraySpec("x", (1 << 18,), "<f4"),)  # 1 MB
    queue = SharedQueue(layout, slots=4)
    producer = local_producer(queue)
    held = [producer.acquire(5) for _ in range(3)]
    for number, slot in enumerate(held):
        slot.arrays["x"][:] = number

    def resident():
        return os.fstat(queue._block._descriptor).st_blocks * 512

    before = resident()
    queue.shrink(2)
    assert before - resident() >= 0.9 * 2**20  # the free one at once
    producer.commit(held[0])
    slot = queue.get(5)
    assert (slot.arrays["x"] == 0).all()
    queue.release(slot)  # the other once it is free
    assert before - resident() >= 1.9 * 2**20
    assert producer.try_acquire(0.05) is None
    assert all((slot.arrays["x"] == number).all() for number, slot in enumerate(held[1:], 1))
    producer.discard(held[1])
    assert producer.try_acquire(5).number == held[1].number
    producer.close()
    queue.close()


def test_giving_a_slot_back_twice_is_refused(queue):
    producer = local_producer(queue)
    slot = producer.acquire(5)
    producer.commit(slot)
    with pytest.raises(PipelineError, match="worker 0: slot 0 has been given back already"):
        producer.discard(slot)
    assert queue.get(5).number == 0
    producer.close()


def test_an_idle_queue_uses_no_processor_time(queue):
    producer = local_producer(queue)
    for _ in range(3):
        producer.acquire(5)
    begin = time.process_time()
    assert producer.try_acquire(0.3) is None
    assert queue.try_get(0.3) is None
    assert time.process_time() - begin < 0.2
    producer.close()
