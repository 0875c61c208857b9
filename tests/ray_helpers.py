"""A stand-in for Ray: the documented calls that the workers make, with actors in this process."""

from __future__ import annotations

import threading
import types
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for

import numpy as np

from msrl_accel.pipeline.placement import Place
from msrl_accel.pipeline.worker import WorkerTask
from msrl_accel.runtime.base import ActResult


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause):
        super().__init__(str(cause))
        self.cause = cause


class ActorDiedError(RayError):
    pass


class Ref:
    """Of an object in the store, or of a result to come."""

    def __init__(self, future):
        self.future = future


def _done(value):
    future = Future()
    future.set_result(value)
    return Ref(future)


class _Actor:
    def __init__(self, cls, options, arguments):
        self.options = options
        self.pool = ThreadPoolExecutor(options["max_concurrency"])
        self.dead = threading.Event()
        self.running = set()
        self.instance = cls(*arguments)

    def __getattr__(self, name):
        return types.SimpleNamespace(remote=lambda *args: self.call(name, args))

    def call(self, name, args):
        ref = Ref(Future())
        if self.dead.is_set():
            ref.future.set_exception(ActorDiedError("The actor died."))
            return ref
        self.running.add(ref)
        values = [a.future.result() if isinstance(a, Ref) else a for a in args]

        def run():
            try:
                result, error = getattr(self.instance, name)(*values), None
            except Exception as failure:
                result, error = None, RayTaskError(failure)
            self.running.discard(ref)
            if self.dead.is_set():
                return
            if error is None:
                ref.future.set_result(result)
            else:
                ref.future.set_exception(error)

        self.pool.submit(run)
        return ref

    def die(self):
        """As a process that is killed: what it was asked fails."""
        self.dead.set()
        self.instance.stop()
        for ref in list(self.running):
            if not ref.future.done():
                ref.future.set_exception(ActorDiedError("The actor died."))
        self.pool.shutdown(wait=False)


class StandIn:
    """The module. `actors` are those that live; `room` is how many the cluster can hold."""

    exceptions = types.SimpleNamespace(
        RayError=RayError, RayTaskError=RayTaskError, ActorDiedError=ActorDiedError
    )

    def __init__(self):
        self.actors = []
        self.killed = []
        self.puts = 0
        self.initialized = False

    def is_initialized(self):
        return self.initialized

    def init(self, **options):
        self.initialized = True
        self.options = options

    def shutdown(self):
        self.initialized = False

    def put(self, value):
        self.puts += 1
        return _done(value)

    def get(self, ref):
        return ref.future.result()

    def wait(self, refs, *, num_returns=1, timeout=None):
        futures = {ref.future: ref for ref in refs}
        done, _ = wait_for(futures, timeout, FIRST_COMPLETED)
        ready = [ref for ref in refs if ref.future in done or ref.future.done()][:num_returns]
        return ready, [ref for ref in refs if ref not in ready]

    def kill(self, actor, *, no_restart=True):
        assert no_restart
        self.killed.append(actor)
        actor.die()
        if actor in self.actors:
            self.actors.remove(actor)

    def remote(self, cls):
        def start(options, arguments):
            actor = _Actor(cls, options, arguments)
            self.actors.append(actor)
            return actor

        def options(**values):
            return types.SimpleNamespace(remote=lambda *a: start(values, a))

        return types.SimpleNamespace(options=options)


class PushEngine:
    """Pushes the cart to the side it leans to; its value is the weight it was given."""

    def runtime(self, spec):
        return _Push(spec)


class _Push:
    def __init__(self, spec):
        self.spec, self.version, self.weight = spec, -1, 0.0

    def load_weights(self, version, arrays):
        self.version, self.weight = version, float(arrays["w"][0])

    def act(self, observations, noise):
        action = (observations[0][:, 2] > 0).astype(np.int32)
        values = np.full(len(noise), self.weight, np.float32)
        return ActResult(action, -values, values, action, (noise,))

    def close(self):
        pass


def push_task(index, attempt):
    """A worker of two CartPoles."""
    return WorkerTask(
        index=index,
        attempt=attempt,
        seed=0,
        env="CartPole-v1",
        env_kwargs={},
        backend="sync",
        hang_seconds=60,
        n_envs=2,
        n_steps=5,
        apart=False,
        engine=PushEngine(),
        batch_invariant=False,
        place=Place(),
        rewards=None,
    )
