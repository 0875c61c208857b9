"""A timeline of the pipeline's stages, in the trace format of Chrome and Perfetto."""

from __future__ import annotations

import json
from pathlib import Path


class Timeline:
    """Writes spans of stages as they end.

    Args:
        path: of the file; None writes nothing. A file that was not closed can still be read.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("a", encoding="utf-8")
        self._tracks: dict[str, int] = {}
        if self._file is not None and self._file.tell() == 0:
            self._file.write("[\n")

    def add(self, track: str, name: str, begin: float, end: float) -> None:
        """A span of one track, in monotonic seconds."""
        if self._file is None:
            return
        if track not in self._tracks:
            self._tracks[track] = len(self._tracks)
            self._write({"ph": "M", "name": "thread_name", "args": {"name": track}}, track)
        span = {
            "ph": "X",
            "name": name,
            "ts": round(begin * 1e6),
            "dur": round((end - begin) * 1e6),
        }
        self._write(span, track)

    def _write(self, event: dict[str, object], track: str) -> None:
        assert self._file is not None
        event = {**event, "pid": 0, "tid": self._tracks[track]}
        self._file.write(json.dumps(event) + ",\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
