"""The batching inference server: who gets which answer, when, and what happens when one dies."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import threading
import time
from contextlib import contextmanager

import inference_helpers as h
import numpy as np
import pytest

from msrl_accel.errors import PipelineError, PolicyError
from msrl_accel.pipeline.inference import (
    NUMBERS,
    InferenceServer,
    inference_metrics,
)
from msrl_accel.pipeline.inference_client import InferenceClient
from msrl_accel.publish import WeightStore
from msrl_accel.runtime.batch_invariant import BatchInvariantRuntime

spawn = multiprocessing.get_context("spawn")


def new_name():
    return f"msrl_test_{secrets.token_hex(8)}"


@contextmanager
def serving(**options):
    """A server in a thread of this process."""
    name = new_name()
    server = InferenceServer(options.pop("runtime", None) or h.RecordingRuntime(), name, **options)
    server.name = name
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stopping = True
        thread.join()
        server.close()


@contextmanager
def process(target, *args):
    child = spawn.Process(target=target, args=args)
    child.start()
    try:
        yield child
    finally:
        child.kill()
        child.join()


def together(server, requests, timeout_seconds=0.002):
    """Requests of several clients at once: {label: rows}; their results.

    All are known to the server before the first asks; they wait for each other that long.
    """
    results = {}
    ready = threading.Barrier(
        len(requests), lambda: setattr(server, "timeout_seconds", timeout_seconds)
    )

    def ask(label, n):
        client = InferenceClient(h.SPEC, server.name, max(requests.values()))
        client.act(*h.rows(0, 1))
        ready.wait()
        results[label] = client.act(*h.rows(label, n))
        client.close()

    threads = [threading.Thread(target=ask, args=request) for request in requests.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_everybody_gets_his_own_answer():
    with serving() as server:
        results = together(server, {10: 3, 20: 1, 30: 7})
    for label, n in {10: 3, 20: 1, 30: 7}.items():
        h.check(results[label], label, n)


def test_requests_that_wait_are_run_as_one_batch():
    with serving() as server:
        started = time.monotonic()
        results = together(server, {1: 5, 2: 5, 3: 5}, timeout_seconds=60.0)
        assert time.monotonic() - started < 60.0  # everybody waited long before that
        calls = server.runtime.runtime.calls
    assert len(results) == 3
    assert calls[-1] == 32  # 15 rows, padded to the next size
    assert set(calls) <= {8, 32, 128, 512}


def test_a_request_does_not_wait_for_a_client_that_asks_nothing():
    with serving(timeout_seconds=0.002) as server:
        idle = InferenceClient(h.SPEC, server.name, 4)
        idle.act(*h.rows(1, 1))
        busy = InferenceClient(h.SPEC, server.name, 4, patience=10)
        for label in range(20):
            h.check(busy.act(*h.rows(label, 2)), label, 2)
        assert server.numbers[NUMBERS.index("waited")] >= 20 * 0.002
        idle.close()
        busy.close()


def test_more_rows_than_a_client_or_a_size_holds():
    with serving(sizes=(4, 16)) as server:
        small = InferenceClient(h.SPEC, server.name, 6)
        h.check(small.act(*h.rows(3, 20)), 3, 20)
        large = InferenceClient(h.SPEC, server.name, 100)
        h.check(large.act(*h.rows(4, 50)), 4, 50)
        small.close()
        large.close()


def test_answers_carry_the_version_that_acted():
    store = WeightStore.create({"w": np.zeros(1, np.float32)})
    store.publish(3, {"w": np.array([10], np.float32)})
    with serving(store=store) as server:
        client = InferenceClient(h.SPEC, server.name, 4)
        assert client.act(*h.rows(1, 2)).value[0] == 11
        assert client.version == 3
        store.publish(4, {"w": np.array([20], np.float32)})
        assert client.act(*h.rows(1, 2)).value[0] == 21
        assert client.version == 4
        client.close()
    store.close()


def test_metrics():
    with serving() as server:
        before = server.numbers.copy()
        client = InferenceClient(h.SPEC, server.name, 8)
        for _ in range(5):
            client.act(*h.rows(1, 2))
        client.close()
    metrics = inference_metrics(before, server.numbers)
    assert metrics["inference/queue_depth"] == 1
    assert metrics["inference/batch_rows"] == 2
    assert metrics["inference/batch_fill"] == 2 / 8
    assert 0 < metrics["inference/wait_ms"] <= metrics["inference/latency_ms"]
    assert metrics["inference/latency_ms"] <= metrics["inference/latency_ms_max"]
    assert inference_metrics(server.numbers, server.numbers) == {}


def test_what_the_policy_refuses_is_told_and_the_server_goes_on():
    with serving() as server:
        client = InferenceClient(h.SPEC, server.name, 4)
        with pytest.raises(PolicyError, match="does not like that"):
            client.act(*h.rows(h.REFUSED, 2))
        with pytest.raises(PolicyError, match="not finite"):
            client.act(*h.rows(np.nan, 2))
        h.check(client.act(*h.rows(5, 4)), 5, 4)
        client.close()


def test_many_processes():
    results = spawn.Queue()
    with serving() as server:
        clients = [
            spawn.Process(target=h.ask_many, args=(server.name, label, 200, results))
            for label in range(3)
        ]
        for client in clients:
            client.start()
        done = [results.get(timeout=120) for _ in clients]
        for client in clients:
            client.join()
    assert sorted(done) == [(label, 200) for label in range(3)]


def test_a_killed_client_holds_up_nobody():
    ours, theirs = spawn.Pipe()
    with serving() as server:
        with process(h.ask_for_ever, server.name, 4, theirs) as victim:
            assert ours.poll(60)
            victim.kill()
        client = InferenceClient(h.SPEC, server.name, 4, patience=30)
        for label in range(10):
            h.check(client.act(*h.rows(label, 3)), label, 3)
        assert len(server._sessions) == 1
        client.close()


def test_a_killed_server_is_replaced_under_its_name():
    name = new_name()
    client = InferenceClient(h.SPEC, name, 4, patience=60)
    with process(h.serve, name) as first:
        h.check(client.act(*h.rows(1, 2)), 1, 2)
        first.kill()
        first.join()
        with process(h.serve, name):
            h.check(client.act(*h.rows(2, 2)), 2, 2)
    client.close()


def test_a_killed_server_that_nobody_replaces():
    name = new_name()
    client = InferenceClient(h.SPEC, name, 4, patience=60)
    with process(h.serve, name) as server:
        client.act(*h.rows(1, 2))
        server.kill()
    client.patience = 0.3
    with pytest.raises(PipelineError, match=r"inference: the server has ended, .* within 0\.3 s"):
        client.act(*h.rows(2, 2))
    client.close()


def test_a_stopped_server_is_noticed():
    name = new_name()
    client = InferenceClient(h.SPEC, name, 4, patience=60)
    with process(h.serve, name) as server:
        client.act(*h.rows(1, 2))
        os.kill(server.pid, signal.SIGSTOP)
        client.patience = 0.3
        with pytest.raises(PipelineError, match=r"no answer for 0\.3 s"):
            client.act(*h.rows(2, 2))
    client.close()


def test_what_a_stranger_says_is_not_answered():
    import socket

    with serving() as server:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect(f"\0{server.name}")
        stranger.send(b"nonsense")
        stranger.settimeout(30)
        assert stranger.recv(100) == b""
        stranger.close()
        client = InferenceClient(h.SPEC, server.name, 4)
        h.check(client.act(*h.rows(7, 1)), 7, 1)
        client.close()


def test_weights_are_not_given_through_clients():
    client = InferenceClient(h.SPEC, "nobody", 4)
    with pytest.raises(PolicyError, match="cannot be given"):
        client.load_weights(1, {})


def test_a_batch_invariant_runtime_keeps_its_sizes():
    runtime = BatchInvariantRuntime(h.RecordingRuntime(), tiles=(2, 4))
    with serving(runtime=runtime) as server:
        client = InferenceClient(h.SPEC, server.name, 8)
        h.check(client.act(*h.rows(2, 7)), 2, 7)
        client.close()
        assert set(server.runtime.runtime.calls) == {2, 4}
