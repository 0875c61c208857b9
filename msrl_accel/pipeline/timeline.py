"""A timeline of the pipeline's stages, in the trace format of Chrome and Perfetto.

The array form of the Trace Event Format: its closing bracket may be missing, so that the file of a
run that was killed loads too. Each event is one line, written by one system call.
"""

from __future__ import annotations

import json
import time
from io import FileIO
from pathlib import Path
from typing import Any

from msrl_accel.files import append_line, disk_errors, whole_lines

TRACE_FILE = "trace.json"
_MICROSECONDS = 1e6
_PROCESS_NAME = "process_name"


class Timeline:
    """Appends events to `trace.json`; a resumed run goes on in the same file.

    Args:
        run_dir: of the run.
        enabled: False writes nothing.
    """

    def __init__(self, run_dir: Path, enabled: bool) -> None:
        self._file: FileIO | None = None
        self._run_dir = run_dir
        self._tracks: dict[str, int] = {}
        # Monotonic times are others after a reboot: the file has times since the epoch.
        self._epoch = time.time() - time.monotonic()
        if not enabled:
            return
        with disk_errors("the trace", run_dir):
            self._file = (run_dir / TRACE_FILE).open("a+b", buffering=0)
            self._file.seek(0)
            written = self._file.read()
            self._file.truncate(written.rfind(b"\n") + 1)  # a kill may have torn the last line
            if b"\n" not in written:
                append_line(self._file, "[\n")
        # Each part of a resumed run is a process of its own.
        self._process = written.count(_PROCESS_NAME.encode()) + 1
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        self._write({"ph": "M", "name": _PROCESS_NAME, "args": {"name": f"run from {started}"}})

    def span(self, track: str, name: str, begin: float, end: float) -> None:
        """What one track did from `begin` to `end`, in monotonic seconds."""
        if self._file is not None and end > begin:
            times = {"ts": self._time(begin), "dur": round((end - begin) * _MICROSECONDS)}
            self._write({"ph": "X", "name": name, "tid": self._track(track), **times})

    def mark(self, track: str, name: str) -> None:
        """An event of this moment."""
        if self._file is not None:
            now = self._time(time.monotonic())
            self._write({"ph": "i", "s": "t", "name": name, "tid": self._track(track), "ts": now})

    def count(self, name: str, at: float, value: float) -> None:
        """A number that is drawn as a curve."""
        if self._file is not None:
            self._write({"ph": "C", "name": name, "ts": self._time(at), "args": {name: value}})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _time(self, monotonic: float) -> int:
        return round((self._epoch + monotonic) * _MICROSECONDS)

    def _track(self, track: str) -> int:
        if track not in self._tracks:
            number = self._tracks[track] = len(self._tracks) + 1
            named = {"ph": "M", "name": "thread_name", "args": {"name": track}}
            self._write({**named, "tid": number})
        return self._tracks[track]

    def _write(self, event: dict[str, Any]) -> None:
        assert self._file is not None
        line = json.dumps({"pid": self._process, "tid": 0, **event})
        with disk_errors("the trace", self._run_dir):
            append_line(self._file, line + ",\n")


def read_timeline(path: Path) -> list[dict[str, Any]]:
    """Events of a trace file, whole or cut short by a kill."""
    lines = (line.strip().rstrip(",") for line in whole_lines(path))
    return [json.loads(line) for line in lines if line not in ("", "[", "]")]
