from __future__ import annotations

import time

import pytest

from msrl_accel.pipeline.learner_stages import LearnerStages
from msrl_accel.pipeline.timeline import Timeline, read_timeline


@pytest.fixture
def made(tmp_path):
    timeline = Timeline(tmp_path, True)
    stages = LearnerStages(timeline, limit=0.1)
    yield stages, tmp_path / "trace.json"
    stages.close()
    timeline.close()


def test_stages_are_timed_and_drawn(made, caplog):
    stages, file = made
    for seconds in (0.03, 0.01):
        stages.restart()
        with stages("update"):
            time.sleep(seconds)
        with stages("publish"):
            pass
    assert stages.seconds["update"] >= 0.01
    assert set(stages.seconds) == {"update", "publish"}
    spans = [e["name"] for e in read_timeline(file) if e["ph"] == "X"]
    assert spans.count("update") == 2
    assert caplog.text == ""


def test_a_stage_that_does_not_end_is_named_once_with_where_it_is(made, caplog):
    stages, _ = made
    with stages("wait", watched=False):
        time.sleep(0.3)
    assert caplog.text == ""
    with stages("update"):
        time.sleep(0.6)
    assert caplog.text.count("stage 'update' has taken more than 0.1 s so far") == 1
    assert "time.sleep(0.6)" in caplog.text


def test_a_failing_stage_ends(made, caplog):
    stages, _ = made
    with pytest.raises(ValueError, match="x"), stages("update"):
        raise ValueError("x")
    time.sleep(0.3)
    assert caplog.text == ""
