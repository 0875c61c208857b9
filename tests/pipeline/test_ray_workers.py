"""Ray actors that collect, and the learner's view of them; no policy graph takes part."""

from __future__ import annotations

import importlib.util
import os
import signal
import time

import gymnasium
import numpy as np
import pytest
from ray_helpers import StandIn, push_task

from msrl_accel.errors import EnvError
from msrl_accel.pipeline.ray_actor import NewestWeights, Outbox
from msrl_accel.pipeline.ray_workers import RayOptions, RayWorkers, connect
from msrl_accel.pipeline.shared_queue import QueueClosed
from msrl_accel.pipeline.slots import slot_layout, slot_trajectories
from msrl_accel.pipeline.staleness import StalenessManager
from msrl_accel.shared_memory import ArraySpec
from msrl_accel.spaces import PolicySpec

LAYOUT = (ArraySpec("x", (2,), "<f4"),)


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module", params=["stand-in", "ray"])
def ray(request):
    """Both do what the workers need; Ray itself runs where it is installed."""
    if request.param == "stand-in":
        yield StandIn()
        return
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    import ray

    assert connect(ray, None, 2)
    yield ray
    ray.shutdown()


def cart_poles(ray, staleness, **options):
    env = gymnasium.make("CartPole-v1")
    layout = slot_layout(PolicySpec.from_spaces(env.observation_space, env.action_space), 5, 2)
    known = {"env_id": "CartPole-v1", "hang_seconds": 60, "max_restarts": 3}
    settings = RayOptions(count=2, layout=layout, slots=6, per_worker=1, **known, **options)
    workers = RayWorkers(ray, settings, push_task, staleness)
    workers.publish(0, {"w": np.array([10.0])})
    workers.start()
    return workers


def collect(workers, count):
    """Trajectories as a trainer takes them, copied, with who made them."""
    taken = []
    deadline = time.monotonic() + 120
    while len(taken) < count:
        assert time.monotonic() < deadline, workers.describe()
        slot = workers.try_get(0.1)
        workers.supervise()
        if slot is not None:
            t = slot_trajectories(slot)
            taken.append((slot.producer, t.values.copy(), t.versions.copy(), t.valid.copy()))
            workers.release(slot)
    return taken


def test_trajectories_come_with_the_newest_weights(ray):
    staleness = StalenessManager(2, 4)
    workers = cart_poles(ray, staleness)
    try:
        first = collect(workers, 4)
        for _, values, versions, valid in first:
            assert (values == 10).all() and (versions == 0).all() and valid.any()
        for version in (1, 2, 3, 4):
            workers.publish(version, {"w": np.array([10.0 + version])})
            staleness.version = version
            workers.admit_again()
            later = collect(workers, 4)
        assert {name for name, *_ in first + later} == {"worker 0", "worker 1"}
        for _, values, versions, _ in later:
            assert (values == 10 + versions).all()  # the version is that of the weights
            assert versions.max() >= 2
        assert workers.restarts == 0
    finally:
        workers.close()


def kill_one(ray, workers):
    if isinstance(ray, StandIn):
        ray.actors[0].die()
    else:
        os.kill(ray.get(workers._members[0].actor.process_id.remote()), signal.SIGKILL)


def test_a_killed_worker_is_replaced(ray):
    staleness = StalenessManager(1000, 4)
    workers = cart_poles(ray, staleness)
    try:
        collect(workers, 4)
        kill_one(ray, workers)
        until(lambda: workers.supervise() or workers.restarts == 1)
        names = {name for name, *_ in collect(workers, 40)}
        until(lambda: "worker 0" in names or names.update(n for n, *_ in collect(workers, 4)))
        assert workers.restarts == 1
        admitted = 1001 * 4 - staleness.capacity
        stats = workers.stats()
        assert admitted <= 400 and stats["filling"] <= 2
    finally:
        workers.close()


class Silent:
    """An actor that fills nothing."""

    silent = 0.0
    """Seconds since its worker gave a sign of life."""

    def __init__(self, task, layout):
        pass

    def take(self, timeout):
        time.sleep(timeout / 100)
        return [], "a step of Env-v0", self.silent

    def grant(self, count, version, weights):
        pass

    def publish(self, version, weights):
        pass

    def stop(self):
        pass


def silent_workers(ray, monkeypatch, staleness, **options):
    monkeypatch.setattr("msrl_accel.pipeline.ray_workers.WorkerActor", Silent)
    monkeypatch.setattr("msrl_accel.pipeline.ray_workers.BACKOFF_SECONDS", 0.01)
    known = {"layout": LAYOUT, "env_id": "Env-v0", "hang_seconds": 1, "max_restarts": 1}
    workers = RayWorkers(ray, RayOptions(**known, **options), lambda *place: place, staleness)
    workers.publish(0, {"w": np.zeros(1)})
    workers.start()
    assert workers.stats()["filling"] == 0  # nobody has found a place in the cluster yet
    until(lambda: workers.supervise() or workers.stats()["filling"] >= options["count"], 20)
    return workers


def test_a_hung_worker_is_killed_and_what_it_was_granted_is_free(monkeypatch):
    ray, staleness = StandIn(), StalenessManager(1, 4)
    workers = silent_workers(ray, monkeypatch, staleness, count=2, slots=4, per_worker=1)
    assert staleness.capacity == 8 - 2
    monkeypatch.setattr(Silent, "silent", 99.0)
    with pytest.raises(EnvError, match=r"hung in a step of Env-v0 for 99\.0 s and was killed"):
        until(lambda: workers.supervise() or False, 20)
    assert workers.reclaimed >= 1
    assert staleness.capacity == 8 - workers.stats()["filling"]
    workers.close()
    assert not ray.actors


def test_slots_are_granted_as_there_is_room_and_admission(monkeypatch):
    ray, staleness = StandIn(), StalenessManager(0, 4)
    workers = silent_workers(ray, monkeypatch, staleness, count=3, slots=5, per_worker=4)
    until(lambda: workers.supervise() or workers.stats()["filling"] == 4, 20)  # one batch
    staleness.version = 1
    workers.admit_again()
    assert workers.stats()["filling"] == 5  # the room there is
    workers.close()


def test_an_outbox():
    outbox = Outbox("worker 0", LAYOUT)
    assert outbox.try_acquire(0.0) is None
    outbox.grant(1)
    slot = outbox.try_acquire(0.0)
    assert slot.arrays["x"].shape == (2,) and outbox.try_acquire(0.0) is None
    slot.arrays["x"][:] = 7
    assert outbox.take(0.0) == []
    outbox.commit(slot)
    (arrays,) = outbox.take(0.0)
    np.testing.assert_array_equal(arrays["x"], [7, 7])
    outbox.close()
    with pytest.raises(QueueClosed):
        outbox.try_acquire(0.0)
    outbox.fail("its traceback")
    with pytest.raises(RuntimeError, match="its traceback"):
        outbox.take(0.0)


def test_newest_weights():
    weights = NewestWeights()
    assert weights.read(-1) is None
    weights.put(3, {"w": 3})
    weights.put(2, {"w": 2})  # came late
    assert weights.read(2) == (3, {"w": 3})
    assert weights.read(3) is None
