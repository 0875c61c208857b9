"""Milliseconds that publishing weights through shared memory takes: of the learner, of a reader.

A learner publishes versions of 20 KB and of 50 MB while 0, 2 and 8 processes read every version.
Each version is waited for by all readers before the next one, so a reader's number is that of
getting one whole version (copy and checksum); the learner's is the whole cost of one publication to
training (copy and checksum too). The learner never waits for readers: that its number does not grow
with them, but for the shared memory bandwidth and cores, is what to look for.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from _report import begin, finish, make_parser, median_and_range, positive_int, table

from msrl_accel.publish import StoreHandle, WeightStore

SIZES = {"20 KB": 20 * 2**10, "50 MB": 50 * 2**20}
READERS = (0, 2, 8)


def parser() -> argparse.ArgumentParser:
    p = make_parser(__doc__)
    p.add_argument("--versions", type=positive_int, default=30, help="publications of each size")
    return p


def arrays_of(nbytes: int) -> dict[str, np.ndarray]:
    """Twelve arrays, as many as an actor-critic of two hidden layers has."""
    rng = np.random.default_rng(0)
    return {str(i): rng.random(nbytes // 4 // 12, np.float32) for i in range(12)}


def read_versions(handle: StoreHandle, versions: int, pipe: Any) -> None:
    """A reader's process: read each version once it is told to; report the milliseconds."""
    store = WeightStore.attach(handle)
    pipe.send(None)
    times = []
    for version in range(versions):
        pipe.recv()
        start = time.perf_counter()
        found = store.read(newer_than=version - 1)
        times.append(1e3 * (time.perf_counter() - start))
        assert found is not None
        pipe.send(None)
    pipe.send(times)
    store.close()


def measure(nbytes: int, readers: int, versions: int) -> dict[str, list[float]]:
    """Milliseconds of each publication and of each read but the first ones (page faults)."""
    context = multiprocessing.get_context("spawn")
    arrays = arrays_of(nbytes)
    store = WeightStore.create(arrays)
    pipes, processes = [], []
    for _ in range(readers):
        ours, theirs = context.Pipe()
        process = context.Process(target=read_versions, args=(store.handle, versions, theirs))
        process.start()
        pipes.append(ours)
        processes.append(process)
    for pipe in pipes:
        pipe.recv()
    publish = []
    for version in range(versions):
        start = time.perf_counter()
        store.publish(version, arrays)
        publish.append(1e3 * (time.perf_counter() - start))
        for pipe in pipes:
            pipe.send(None)
        for pipe in pipes:
            pipe.recv()
    reads = [t for pipe in pipes for t in pipe.recv()[2:]]
    for process in processes:
        process.join()
    store.close()
    return {"publish": publish[2:], "read": reads}


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    facts = begin(args, ["numpy"])
    results = {}
    rows = []
    for label, nbytes in SIZES.items():
        for readers in READERS:
            found = measure(nbytes, readers, args.versions + 2)
            results[f"{label}, {readers} readers"] = found
            p99 = statistics.quantiles(found["publish"], n=100)[-1] if args.versions > 1 else 0.0
            read = median_and_range(found["read"], 2) if readers else ""
            rows.append(
                [label, str(readers), median_and_range(found["publish"], 2), f"{p99:.2f}", read]
            )
    print(table(["", "readers", "publish, ms", "p99", "read, ms"], rows))
    finish(args, facts, results)


if __name__ == "__main__":
    main()
