"""What the processes of the inference server's tests run; no MindSpore, no pytest."""

from __future__ import annotations

import time

import gymnasium
import numpy as np

from msrl_accel.errors import PolicyError
from msrl_accel.pipeline.inference import InferenceServer
from msrl_accel.pipeline.inference_client import InferenceClient
from msrl_accel.publish import WeightStore
from msrl_accel.runtime.base import ActResult
from msrl_accel.spaces import PolicySpec

SPEC = PolicySpec.from_spaces(
    gymnasium.spaces.Box(-1, 1, (3,), np.float32), gymnasium.spaces.Discrete(4)
)
REFUSED = 666.0


class RecordingRuntime:
    """Adds a weight to what it is given; tells the rows of every call."""

    def __init__(self, seconds=0.0):
        self.spec, self.version, self.weight = SPEC, 0, 0.0
        self.calls = []
        self.seconds = seconds

    def load_weights(self, version, arrays):
        self.version, self.weight = version, float(arrays["w"][0])

    def act(self, observations, noise):
        (x,) = observations
        self.calls.append(len(noise))
        time.sleep(self.seconds)
        if (x == REFUSED).any():
            raise PolicyError("this policy does not like that")
        logits = noise + x.sum(axis=1, keepdims=True)
        action = logits.argmax(axis=1).astype(np.int32)
        values = x[:, 0] + np.float32(self.weight)
        return ActResult(action, -values, values, action, (logits,))

    def close(self):
        pass


def rows(label, n):
    """Inputs that tell, in every row, what they are."""
    x = np.full((n, 3), label, np.float32)
    x[:, 1] = np.arange(n)
    return (x,), np.tile(np.arange(4, dtype=np.float32), (n, 1)) * (1 + np.arange(n)[:, None] % 2)


def check(result, label, n):
    (x,), noise = rows(label, n)
    np.testing.assert_array_equal(result.value, x[:, 0])
    np.testing.assert_array_equal(result.parameters[0], noise + x.sum(axis=1, keepdims=True))


def serve(name, handle=None, seconds=0.0):
    store = handle and WeightStore.attach(handle)
    server = InferenceServer(RecordingRuntime(seconds), name, store)
    server.run()


def ask_for_ever(name, n, ready):
    client = InferenceClient(SPEC, name, n)
    client.act(*rows(1, n))
    ready.send(None)
    while True:
        client.act(*rows(1, n))


def ask_many(name, label, count, results):
    """Requests of changing sizes; reports how many answers were right."""
    client = InferenceClient(SPEC, name, 9)
    for i in range(count):
        n = 1 + (label + i) % 9
        check(client.act(*rows(label * 1000 + i, n)), label * 1000 + i, n)
    results.put((label, count))
    client.close()
