"""The trace file, against the rules of the Trace Event Format (array form)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from msrl_accel.pipeline.timeline import Timeline, read_timeline


def load_as_viewers_do(path):
    """Chrome's importer: a text that begins with [ gets its missing end."""
    text = path.read_text().strip()
    assert text.startswith("[")
    if not text.endswith("]"):
        text = text.rstrip(",") + "]"
    return json.loads(text)


def check_rules(events):
    """Phases and their required fields; slices of one track nest or follow each other."""
    required = {
        "M": {"name", "pid", "tid", "args"},
        "X": {"name", "pid", "tid", "ts", "dur"},
        "i": {"name", "pid", "tid", "ts", "s"},
        "C": {"name", "pid", "ts", "args"},
    }
    tracks: dict = {}
    for event in events:
        assert required[event["ph"]] <= set(event)
        if event["ph"] == "X":
            assert isinstance(event["ts"], int)
            assert isinstance(event["dur"], int)
            assert event["dur"] >= 0
            tracks.setdefault((event["pid"], event["tid"]), []).append(event)
        if event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
    for slices in tracks.values():
        slices.sort(key=lambda e: e["ts"])
        for a, b in zip(slices, slices[1:]):
            assert b["ts"] >= a["ts"] + a["dur"] - 1  # rounding
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(tracks) <= named


def test_events_keep_to_the_format_and_times_are_those_of_the_clock(tmp_path):
    now = time.monotonic()
    timeline = Timeline(tmp_path, True)
    timeline.span("learner", "wait", now, now + 0.25)
    timeline.span("learner", "update", now + 0.25, now + 1)
    timeline.span("learner", "nothing", now, now)  # left out
    timeline.span("worker 0", "collect", now, now + 2)
    timeline.mark("worker 0", "replaced")
    timeline.count("queue depth", now, 1.5)
    timeline.close()
    events = load_as_viewers_do(tmp_path / "trace.json")
    check_rules(events)
    assert events == read_timeline(tmp_path / "trace.json")
    slices = [e for e in events if e["ph"] == "X"]
    assert [(e["name"], e["dur"]) for e in slices] == [
        ("wait", 250_000),
        ("update", 750_000),
        ("collect", 2_000_000),
    ]
    assert abs(slices[0]["ts"] / 1e6 - time.time()) < 60


def test_a_resumed_run_is_a_process_of_its_own_in_the_same_file(tmp_path):
    for part in (1, 2):
        timeline = Timeline(tmp_path, True)
        timeline.span("learner", f"part {part}", 1, 2)
        timeline.close()
    events = load_as_viewers_do(tmp_path / "trace.json")
    check_rules(events)
    assert {e["pid"]: e["name"] for e in events if e["ph"] == "X"} == {1: "part 1", 2: "part 2"}
    assert len([e for e in events if e["name"] == "process_name"]) == 2


def test_the_file_of_a_killed_run_loads(tmp_path):
    code = f"""
import os, signal, time
from pathlib import Path
from msrl_accel.pipeline.timeline import Timeline
timeline = Timeline(Path({str(tmp_path)!r}), True)
for i in range(100):
    timeline.span("learner", "update", i, i + 1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL
    events = load_as_viewers_do(tmp_path / "trace.json")
    check_rules(events)
    assert sum(e["ph"] == "X" for e in events) == 100


@pytest.mark.parametrize("torn", ['{"ph": "X", "na', '{"ph": "X"}'])
def test_a_torn_line_is_left_out_when_read_and_when_resumed(tmp_path, torn):
    timeline = Timeline(tmp_path, True)
    timeline.span("learner", "update", 1, 2)
    timeline.close()
    path = tmp_path / "trace.json"
    with path.open("a") as file:
        file.write(torn)
    assert sum(e["ph"] == "X" for e in read_timeline(path)) == 1
    Timeline(tmp_path, True).close()
    check_rules(load_as_viewers_do(path))


def test_without_trace_nothing_is_written(tmp_path):
    timeline = Timeline(tmp_path, False)
    timeline.span("learner", "update", 1, 2)
    timeline.mark("learner", "x")
    timeline.count("y", 1, 2)
    timeline.close()
    assert list(tmp_path.iterdir()) == []
