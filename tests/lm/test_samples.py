"""The log of completions, rewards and reasons."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from msrl_accel.envs.text import Problem, Score
from msrl_accel.errors import MsrlError
from msrl_accel.lm.samples import (
    SAMPLES_FILE,
    SampleLog,
    format_samples,
    html_samples,
    read_samples,
)

PROBLEMS = [Problem(f"{i}+1=", str(i + 1)) for i in range(4)]
COMPLETIONS = ["1", "<b>&\n", "über\ud800", "4"]
SCORES = [
    Score(1.0, {"task": 1.0}, "right"),
    Score(0.0, {"task": 0.0}, "expected 2"),
    Score(None, {"task": None}, "task: ValueError: no", "Traceback"),
    Score(1.0, {"task": 1.0}, "right"),
]


def test_what_is_logged_is_read_back(tmp_path: Path) -> None:
    with SampleLog(tmp_path) as log:
        stops, lengths = ["eos", "eos", "length", "eos"], [1, 5, 6, 1]
        written = log.log(3, PROBLEMS, COMPLETIONS, SCORES, stops=stops, lengths=lengths)
    read = read_samples(tmp_path)
    assert read == written
    assert [sample.completion for sample in read] == COMPLETIONS
    assert [sample.reward for sample in read] == [1.0, 0.0, None, 1.0]
    assert (read[2].reason, read[2].traceback) == ("task: ValueError: no", "Traceback")
    assert (read[2].stop, read[2].tokens, read[2].step) == ("length", 6, 3)
    text = (tmp_path / SAMPLES_FILE).read_text("utf-8")
    assert "über" in text
    assert json.loads(text.splitlines()[2])["reward"] is None


def test_failures_are_kept_before_others(tmp_path: Path) -> None:
    with SampleLog(tmp_path, per_call=2) as log:
        log.log(0, PROBLEMS, COMPLETIONS, SCORES)
    assert [sample.prompt for sample in read_samples(tmp_path)] == ["0+1=", "2+1="]


def test_resuming_drops_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    with SampleLog(tmp_path, per_call=1) as log:
        for step in (1, 2, 3):
            log.log(step, PROBLEMS, COMPLETIONS, SCORES)
    with (tmp_path / SAMPLES_FILE).open("ab") as file:
        file.write(b'{"step": 2, "pro')
    with SampleLog(tmp_path, per_call=1, resume_step=2) as log:
        log.log(4, PROBLEMS, COMPLETIONS, SCORES)
    assert [sample.step for sample in read_samples(tmp_path)] == [1, 2, 4]
    assert SampleLog(tmp_path / "new", resume_step=7).close() is None


def test_misuse_is_named(tmp_path: Path) -> None:
    log = SampleLog(tmp_path)
    log.close()
    log.close()
    with pytest.raises(MsrlError, match="is closed"):
        log.log(0, PROBLEMS, COMPLETIONS, SCORES)
    with pytest.raises(MsrlError, match="already holds samples"):
        SampleLog(tmp_path)
    (tmp_path / SAMPLES_FILE).write_text('{"step": 1}\n')
    with pytest.raises(MsrlError, match="line 1 is no sample"):
        read_samples(tmp_path)
    assert read_samples(tmp_path / "none") == []


def test_tables(tmp_path: Path) -> None:
    with SampleLog(tmp_path) as log:
        stops = ["eos", "eos", "length", "eos"]
        samples = log.log(3, PROBLEMS, [*COMPLETIONS[:2], "x" * 99, "4"], SCORES, stops=stops)
    lines = format_samples(samples, width=20).splitlines()
    assert len(lines) == 5
    assert lines[0].split() == ["step", "prompt", "completion", "answer", "reward", "reason"]
    assert lines[1].split() == ["3", "0+1=", "1", "1", "1", "right"]
    assert "<b>&\\n" in lines[2]
    assert "x" * 19 + "…" in lines[3]
    assert "failed  task: ValueError: no, cut off" in lines[3]
    page = html_samples(samples)
    assert "&lt;b&gt;&amp;" in page and "<b>&" not in page
    assert "x" * 99 in page
    assert page.count("<tr>") == 5


def test_text_that_is_no_unicode_can_be_printed(tmp_path: Path) -> None:
    with SampleLog(tmp_path) as log:
        samples = log.log(3, PROBLEMS, COMPLETIONS, SCORES)
    for text in (format_samples(samples), html_samples(samples)):
        assert "\\ud800" in text
        text.encode("utf-8")
