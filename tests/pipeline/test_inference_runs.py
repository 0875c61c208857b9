"""Asynchronous runs whose workers ask the inference server."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from async_helpers import alive, mapped_segments, train_async, weights
from run_helpers import no_curves  # noqa: F401

from msrl_accel.pipeline.async_ import AsyncTrainer
from msrl_accel.pipeline.inference_process import InferenceProcess

pytest.importorskip("onnxruntime")


def test_a_run_through_the_server(tmp_path):
    run = train_async(tmp_path / "run", pipeline__inference="server")
    assert run.summary["steps"] == 6 * 128
    metrics = run.metrics
    known = ~np.isnan(metrics["inference/batch_rows"])  # updates in which a batch was run
    assert known[0]
    assert (metrics["inference/batch_rows"][known] >= 1).all()
    fill = metrics["inference/batch_fill"][known]
    assert ((fill > 0) & (fill <= 1)).all()
    assert (metrics["inference/latency_ms"][known] > 0).all()
    assert metrics["ppo/updates"][-1] > 0
    assert not mapped_segments()


def compare_with_local(tmp_path, **settings):
    """One worker, no lag: who runs the policy changes not a bit of what is learnt."""
    settings.update(pipeline__max_staleness=0, pipeline__workers=1, updates=3)
    train_async(tmp_path / "local", **settings)
    train_async(tmp_path / "server", pipeline__inference="server", **settings)
    assert weights(tmp_path / "local") == weights(tmp_path / "server")


@pytest.mark.slow
def test_a_run_in_time_is_that_without_the_server(tmp_path):
    compare_with_local(tmp_path)


@pytest.mark.slow
def test_batch_invariant_mode_works_through_the_server(tmp_path):
    compare_with_local(tmp_path, runtime__batch_invariant=True)


def test_a_killed_server_is_replaced(tmp_path, monkeypatch):
    iterate = AsyncTrainer.iterate
    killed = []

    def kill_once(self):
        metrics = iterate(self)
        if self.iteration == 2 and not killed:
            killed.extend(self.server.pids)
            os.kill(killed[0], signal.SIGKILL)
        return metrics

    monkeypatch.setattr(AsyncTrainer, "iterate", kill_once)
    run = train_async(tmp_path / "run", updates=8, pipeline__inference="server")
    assert run.summary["steps"] == 8 * 128
    assert run.metrics["inference/restarts"][-1] == 1
    assert run.metrics["pipeline/restarts"][-1] == 0  # no worker was lost with it
    assert np.isfinite(run.metrics["ppo/policy_loss"]).all()
    assert not alive(killed[0])


@pytest.mark.slow
def test_the_server_ends_with_the_run(tmp_path, monkeypatch):
    pids = []
    start = InferenceProcess.start

    def note(self):
        start(self)
        pids.extend(self.pids)

    monkeypatch.setattr(InferenceProcess, "start", note)
    train_async(tmp_path / "run", updates=2, pipeline__inference="server")
    assert len(pids) == 1
    assert not alive(pids[0])
