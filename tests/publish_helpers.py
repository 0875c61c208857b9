"""What the processes of the weight store's tests run; imports neither MindSpore nor pytest."""

from __future__ import annotations

import numpy as np

from msrl_accel.publish import WeightStore


def patterned(version, words):
    """Arrays that tell which version every one of their words is of."""
    half = words // 2
    return {
        "first": np.full(half, version, np.int64),
        "second": np.arange(version, version + words - half, dtype=np.int64),
    }


def fail_when_torn(version, arrays):
    for name, expected in patterned(version, sum(map(len, arrays.values()))).items():
        if not np.array_equal(arrays[name], expected):
            raise SystemExit(f"torn read of version {version} in {name!r}")


def write_versions(pipe, words):
    """Make a store, say where, and publish for ever."""
    store = WeightStore.create(patterned(0, words))
    pipe.send(store.handle)
    pipe.recv()
    version = 0
    while True:
        store.publish(version, patterned(version, words))
        version += 1


def read_until(handle, reads, results):
    """Check `reads` reads; reports reads, different versions seen, and reads done again."""
    store = WeightStore.attach(handle)
    last, versions = -1, 0
    for _ in range(reads):
        version, arrays = store.read()
        fail_when_torn(version, arrays)
        if version < last:
            raise SystemExit(f"version {version} after {last}")
        versions += version > last
        last = version
    results.put((reads, versions, store.retries))
    store.close()
