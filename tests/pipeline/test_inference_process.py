"""The inference server as a process, and workers that ask it; no policy graph takes part."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
from ray_helpers import PushEngine, push_task

from msrl_accel.errors import EnvError
from msrl_accel.pipeline.inference_process import InferenceProcess, sizes_for
from msrl_accel.pipeline.placement import Place
from msrl_accel.pipeline.shared_queue import SharedQueue
from msrl_accel.pipeline.slots import slot_layout, slot_trajectories
from msrl_accel.pipeline.watchdog import WorkerPool
from msrl_accel.pipeline.worker import run_worker
from msrl_accel.publish import WeightStore
from msrl_accel.spaces import PolicySpec


class BrokenEngine:
    def runtime(self, spec):
        raise OSError("no device for the server")


def cart_pole():
    env = gymnasium.make("CartPole-v1")
    return PolicySpec.from_spaces(env.observation_space, env.action_space)


@pytest.fixture
def store():
    store = WeightStore.create({"w": np.zeros(1)})
    store.publish(0, {"w": np.array([10.0])})
    yield store
    store.close()


def make_server(store, engine, **options):
    known = {"env_id": "CartPole-v1", "hang_seconds": 60, "max_restarts": 3, **options}
    return InferenceProcess(engine, cart_pole(), False, 4, store.handle, Place(), **known)


def test_workers_ask_the_server_and_outlive_it(store):
    server = make_server(store, PushEngine())
    server.start()
    queue = SharedQueue(slot_layout(cart_pole(), 5, 2), 4)

    def task(index, attempt, report):
        return replace(
            push_task(index, attempt),
            engine=server.client(),
            queue=queue.producer(f"worker {index}"),
            heartbeats=pool.heartbeats,
            report=report,
        )

    pool = WorkerPool(
        2, run_worker, task, queue.reclaim, env_id="CartPole-v1", hang_seconds=60, max_restarts=0
    )
    pool.start()

    def collect(count, version):
        deadline = time.monotonic() + 120
        while count:
            assert time.monotonic() < deadline
            server.supervise()
            pool.supervise()
            slot = queue.try_get(0.05)
            if slot is None:
                continue
            t = slot_trajectories(slot)
            assert (t.values == 10 + t.versions).all()  # the version is that of the weights
            count -= t.versions.min() >= version
            queue.release(slot)

    try:
        collect(4, 0)
        store.publish(1, {"w": np.array([11.0])})
        collect(4, 1)
        metrics = server.metrics()
        assert metrics["inference/batch_rows"] in (2, 4) or 2 < metrics["inference/batch_rows"] < 4
        (pid,) = server.pids
        os.kill(pid, signal.SIGKILL)
        store.publish(2, {"w": np.array([12.0])})
        collect(4, 2)
        assert server.restarts == 1
        assert pool.restarts == 0
    finally:
        queue.close()
        pool.close()
        server.close()
        server.close()


def test_a_server_that_cannot_start_says_why(store):
    server = make_server(store, BrokenEngine(), max_restarts=0)
    server.start()
    try:
        with pytest.raises(EnvError, match=r"(?s)inference server 0 failed 1 times.*no device"):
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                server.supervise()
                time.sleep(0.02)
    finally:
        server.close()


def test_sizes():
    assert sizes_for(1) == (8,)
    assert sizes_for(33) == (8, 32, 128)
    assert sizes_for(10_000) == (8, 32, 128, 512)
