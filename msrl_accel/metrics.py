"""Metrics of a run: CSV, JSON lines and TensorBoard events; statistics of finished episodes."""

from __future__ import annotations

import csv
import io
import json
import math
import operator
import warnings
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from msrl_accel.errors import CheckpointError, MsrlError
from msrl_accel.files import (
    PathLike,
    append_line,
    disk_errors,
    whole_lines,
    write_text_atomic,
)

CSV_FILE = "metrics.csv"
JSONL_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"

_Row = dict[str, str]  # column -> CSV text


class MetricsLogger:
    """Appends metrics to `metrics.csv`, `metrics.jsonl` and TensorBoard events in `run_dir`.

    `resume_step=None` starts new files and refuses to overwrite old ones; an integer continues
    them after dropping every row beyond that step. Without tensorboardX one warning is given and
    the other two go on. Each call of `log` reaches the operating system before it returns (the
    TensorBoard file within a second), so a killed process loses at most the row it was writing.
    """

    def __init__(
        self, run_dir: PathLike, tensorboard: bool = True, resume_step: int | None = None
    ) -> None:
        self.run_dir = Path(run_dir)
        self._columns: list[str] = ["step"]
        self._csv: FileIO | None = None
        self._jsonl: FileIO | None = None
        with disk_errors("metrics", self.run_dir):
            self.run_dir.mkdir(parents=True, exist_ok=True)
            if resume_step is None:
                self._start()
            else:
                self._resume(resume_step)
            self._open()
        self._writer = self._tensorboard_writer(resume_step) if tensorboard else None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append one row at environment step `step`; NaN and infinities are allowed."""
        if self._csv is None or self._jsonl is None:
            raise MsrlError(f"metrics of {self.run_dir} are closed: log before close()")
        step = operator.index(step)
        row = {name: float(value) for name, value in values.items()}
        with disk_errors("metrics", self.run_dir):
            self._widen([name for name in row if name not in self._columns])
            texts = {"step": str(step), **{name: repr(value) for name, value in row.items()}}
            append_line(self._csv, _csv_line([texts.get(name, "") for name in self._columns]))
            finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
            append_line(self._jsonl, json.dumps({"step": step, **finite}, allow_nan=False) + "\n")
            if self._writer is not None:
                self._writer.file_writer.add_summary(_summary(finite), step)
                self._writer.flush()

    def close(self) -> None:
        """Close the files; closing twice is allowed."""
        for file in (self._csv, self._jsonl, self._writer):
            if file is not None:
                file.close()
        self._csv = self._jsonl = self._writer = None

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self) -> None:
        if (self.run_dir / CSV_FILE).exists():
            raise MsrlError(
                f"{self.run_dir} already holds {CSV_FILE}: resume that run or choose another folder"
            )
        self._rewrite_csv([])
        write_text_atomic(self.run_dir / JSONL_FILE, "")

    def _resume(self, step: int) -> None:
        path = self.run_dir / CSV_FILE
        if path.exists():
            self._columns, rows = _read_csv(path)
        else:
            rows = []
        self._rewrite_csv([row for row in rows if int(row["step"]) <= step])
        jsonl = self.run_dir / JSONL_FILE
        lines = whole_lines(jsonl) if jsonl.exists() else []
        kept = [line + "\n" for line in lines if json.loads(line)["step"] <= step]
        write_text_atomic(jsonl, "".join(kept))

    def _open(self) -> None:
        self._csv = (self.run_dir / CSV_FILE).open("ab", buffering=0)
        if self._jsonl is None:
            self._jsonl = (self.run_dir / JSONL_FILE).open("ab", buffering=0)

    def _widen(self, new: list[str]) -> None:
        """Rewrite the CSV with further columns."""
        if not new:
            return
        for name in new:
            if not name or not name.isprintable():
                raise MsrlError(f"metric name {name!r} cannot be a column: use printable text")
        _, rows = _read_csv(self.run_dir / CSV_FILE)
        self._columns = [*self._columns, *new]
        self._rewrite_csv(rows)
        if self._csv is not None:
            self._csv.close()
        self._open()

    def _rewrite_csv(self, rows: list[_Row]) -> None:
        lines = [[row.get(name, "") for name in self._columns] for row in rows]
        text = "".join(_csv_line(line) for line in [self._columns, *lines])
        write_text_atomic(self.run_dir / CSV_FILE, text)

    def _tensorboard_writer(self, resume_step: int | None) -> Any:
        try:
            from tensorboardX import SummaryWriter  # type: ignore[import-not-found,import-untyped]
        except ImportError as error:
            warnings.warn(
                f"no TensorBoard events are written ({error}), {CSV_FILE} and {JSONL_FILE} are: "
                "pip install 'msrl_accel[tensorboard]'",
                stacklevel=3,
            )
            return None
        options: dict[str, Any] = {}
        if resume_step is not None:
            # TensorBoard hides the earlier files' events from the purge step on. File names count
            # whole seconds: without a suffix a quick resume would overwrite the earlier file.
            options = {"purge_step": resume_step + 1, "filename_suffix": f".from{resume_step:012d}"}
        with disk_errors("metrics", self.run_dir):
            folder = str(self.run_dir / TENSORBOARD_FOLDER)
            return SummaryWriter(folder, flush_secs=1, **options)


def _summary(values: Mapping[str, float | None]) -> Any:
    """All numbers of a row as one TensorBoard event: a fifth of the time of one event each."""
    from tensorboardX.proto.summary_pb2 import (  # type: ignore[import-not-found,import-untyped]
        Summary,
    )

    return Summary(
        value=[
            Summary.Value(tag=name, simple_value=number)
            for name, number in values.items()
            if number is not None
        ]
    )


def read_metrics(run_dir: PathLike) -> dict[str, np.ndarray]:
    """Columns of `metrics.csv`: "step" int64 [rows], all others float64 [rows], NaN where missing.

    A torn last line, as a kill leaves it, is ignored. MsrlError if there are no metrics.
    """
    path = Path(run_dir) / CSV_FILE
    if not path.exists():
        raise MsrlError(f"{path} does not exist: check the run directory")
    columns, rows = _read_csv(path)
    metrics = {
        name: np.array([float(row[name] or "nan") for row in rows], np.float64)
        for name in columns[1:]
    }
    return {"step": np.array([int(row["step"]) for row in rows], np.int64), **metrics}


class EpisodeStats:
    """Returns and lengths of episodes of `num_envs` environments, over the last `window` ended."""

    def __init__(self, num_envs: int, window: int = 100) -> None:
        self.episodes = 0
        """Episodes that have ended so far."""
        self.log: list[tuple[float, float]] | None = None
        """Where returns and lengths of ended episodes are noted one by one, if anywhere."""
        self._returns = np.zeros(num_envs, np.float64)
        self._lengths = np.zeros(num_envs, np.int64)
        self._window_returns = np.zeros(window, np.float64)  # ring buffers
        self._window_lengths = np.zeros(window, np.int64)

    def update(self, rewards: np.ndarray, dones: np.ndarray, valid: np.ndarray) -> None:
        """Add one step: raw rewards, episode ends, and False where there was no step; all [N]."""
        self._returns += np.where(valid, rewards, 0.0)
        self._lengths += valid
        (ended,) = np.nonzero(dones & valid)
        if not len(ended):
            return
        self.add(self._returns[ended], self._lengths[ended])
        self._returns[ended] = 0.0
        self._lengths[ended] = 0

    def add(self, returns: np.ndarray, lengths: np.ndarray) -> None:
        """Add ended episodes."""
        if self.log is not None:
            self.log += zip(returns.tolist(), lengths.tolist())
        window = len(self._window_returns)
        self.episodes += len(returns)
        kept = min(len(returns), window)
        slots = (self.episodes - kept + np.arange(kept)) % window
        self._window_returns[slots] = returns[len(returns) - kept :]
        self._window_lengths[slots] = lengths[len(lengths) - kept :]

    def abandon_running(self) -> None:
        """Forget the episodes under way: the environments have been reset."""
        self._returns[:] = 0.0
        self._lengths[:] = 0

    @property
    def return_mean(self) -> float:
        """Mean return over the window; NaN before the first episode ends."""
        returns = self._recent(self._window_returns)
        return float(returns.mean()) if len(returns) else math.nan

    @property
    def length_mean(self) -> float:
        """Mean length in steps over the window; NaN before the first episode ends."""
        lengths = self._recent(self._window_lengths)
        return float(lengths.mean()) if len(lengths) else math.nan

    def summary(self) -> dict[str, float]:
        """Metrics ready to log, as `plotting` knows them; only the count before the first end."""
        metrics = {"episode/count": float(self.episodes)}
        if self.episodes:
            returns = self._recent(self._window_returns)
            metrics["episode/return"] = self.return_mean
            metrics["episode/return_std"] = float(returns.std())
            metrics["episode/return_min"] = float(returns.min())
            metrics["episode/return_max"] = float(returns.max())
            metrics["episode/length"] = self.length_mean
        return metrics

    def state(self) -> dict[str, Any]:
        """Everything, exactly, for a checkpoint."""
        arrays = {name: getattr(self, f"_{name}").copy() for name in _EPISODE_ARRAYS}
        return {"episodes": self.episodes, **arrays}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`; CheckpointError if it is of another size."""
        for name in _EPISODE_ARRAYS:
            current = getattr(self, f"_{name}")
            saved = np.array(state[name], current.dtype)
            if saved.shape != current.shape:
                raise CheckpointError(
                    f"saved episode {name} has shape {saved.shape}, this run {current.shape}: "
                    "resume with the same number of environments"
                )
            setattr(self, f"_{name}", saved)
        self.episodes = int(state["episodes"])

    def _recent(self, ring: np.ndarray) -> np.ndarray:
        return ring[: self.episodes]


_EPISODE_ARRAYS = ("returns", "lengths", "window_returns", "window_lengths")


def _read_csv(path: Path) -> tuple[list[str], list[_Row]]:
    """Column names and rows; MsrlError names a line that does not fit them."""
    table = list(csv.reader(whole_lines(path)))
    if not table or table[0][:1] != ["step"]:
        raise MsrlError(f"{path} does not start with a header of metrics: delete or restore it")
    columns = table[0]
    rows = []
    for number, fields in enumerate(table[1:], start=2):
        row = dict(zip(columns, fields))
        try:
            if len(fields) != len(columns):
                raise ValueError(f"{len(fields)} fields instead of {len(columns)}")
            int(row["step"])
            for field in fields:
                float(field or "nan")
        except ValueError as error:
            raise MsrlError(f"{path} line {number} is damaged: {error}; delete it") from error
        rows.append(row)
    return columns, rows


def _csv_line(fields: list[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(fields)
    return buffer.getvalue()
