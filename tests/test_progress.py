from __future__ import annotations

import io

from msrl_accel.progress import Progress, format_duration, format_summary


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_plain_lines_at_most_every_interval():
    stream, clock = io.StringIO(), Clock()
    with Progress(100_000, initial=20_000, stream=stream, clock=clock) as progress:
        for second in range(1, 26):
            clock.now = float(second)
            progress.update(20_000 + 2_000 * second, 100.0 + second)
            progress.update(20_000 + 2_000 * second)  # keeps the last return
    assert stream.getvalue().splitlines() == [
        "40,000/100,000 steps (40%), 2,000 steps/s, return 110.0, 0:30 left",
        "60,000/100,000 steps (60%), 2,000 steps/s, return 120.0, 0:20 left",
        "70,000/100,000 steps (70%), 2,000 steps/s, return 125.0, 0:15 left",
    ]
    assert "\r" not in stream.getvalue()


def test_quiet_prints_nothing(capsys):
    for stream in (io.StringIO(), Terminal()):
        with Progress(10, quiet=True, stream=stream, interval=0.0) as progress:
            progress.update(5, 1.0)
            progress.write("hidden")
        assert stream.getvalue() == ""
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_terminal_shows_a_bar():
    stream = Terminal()
    with Progress(2_000, stream=stream) as progress:
        progress.update(1_000, 123.45)
        progress.write("checkpoint saved")
        progress.update(2_000)
    last = stream.getvalue().rstrip("\n").rsplit("\r", 1)[-1]
    assert last.startswith("100% |")
    for expected in ("2,000/2,000 steps", "steps/s", "return 123.5", "left"):
        assert expected in last
    assert "checkpoint saved\n" in stream.getvalue()


def test_no_steps_and_no_total_do_not_fail():
    stream = io.StringIO()
    with Progress(0, stream=stream, interval=0.0) as progress:
        progress.update(0)
    assert stream.getvalue() == "0/0 steps (0%), 0 steps/s\n"


def test_durations():
    assert [format_duration(s) for s in (0.4, 65, 3700)] == ["0:00", "1:05", "1:01:40"]


def test_summary_is_aligned():
    assert format_summary("Done", {"return": 500.0, "next": "a\nb"}) == (
        "Done\n  return: 500.0\n  next:   a\n          b"
    )
    assert format_summary("Done", {}) == "Done"
