"""What the processes of the pipeline's tests run; imports neither MindSpore nor pytest."""

from __future__ import annotations

import os
import signal
import time

import numpy as np

from msrl_accel.pipeline.shared_queue import Producer, QueueClosed
from msrl_accel.shared_memory import ArraySpec

LAYOUT = (ArraySpec("x", (5, 3), "<f4"), ArraySpec("label", (2,), "<i8"))


def fill(slot, label):
    """Write a trajectory that tells, in every number, what it is."""
    slot.arrays["x"][...] = label
    slot.arrays["label"][...] = (label, os.getpid())


def produce(handle, first, count):
    """Commit `count` trajectories labelled `first`, `first` + 1, ..."""
    producer = Producer(handle)
    for label in range(first, first + count):
        slot = producer.acquire(60)
        fill(slot, label)
        producer.commit(slot)
    producer.close()


def produce_until_closed(handle, results):
    producer = Producer(handle)
    count = 0
    try:
        while True:
            slot = producer.acquire(60)
            fill(slot, count)
            producer.commit(slot)
            count += 1
    except QueueClosed as error:
        results.put((str(error), count))


def produce_and_die(handle, committed):
    """Commit some, take one more slot, write half of it, and be killed."""
    producer = Producer(handle)
    for label in range(committed):
        slot = producer.acquire(60)
        fill(slot, label)
        producer.commit(slot)
    slot = producer.acquire(60)
    slot.arrays["x"][:2] = np.nan
    os.kill(os.getpid(), signal.SIGKILL)


def hold(handle, ready):
    """Take a slot and keep it until the process is ended."""
    producer = Producer(handle)
    producer.acquire(60)
    ready.send(None)
    time.sleep(600)


def start_and_hang(handle):
    """Never says hello."""
    time.sleep(600)


def wait_for_a_slot(handle, results):
    """Report what the wait ends with."""
    producer = Producer(handle)
    try:
        producer.acquire(60)
    except QueueClosed as error:
        results.put(str(error))
