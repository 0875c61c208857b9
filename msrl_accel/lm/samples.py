"""Readable samples of a run: prompts, completions, rewards and reasons, on disk and as tables."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrl_accel import html
from msrl_accel.errors import MsrlError
from msrl_accel.files import PathLike, append_line, disk_errors, whole_lines, write_text_atomic

if TYPE_CHECKING:
    from msrl_accel.envs.text import Problem, Score

SAMPLES_FILE = "samples.jsonl"
_WIDTH = 40
_HEADER = ("step", "prompt", "completion", "answer", "reward", "reason")


@dataclass(frozen=True)
class Sample:
    """One completion and what became of it.

    `reward` is None where a verifier failed; then `traceback` says more than `reason`. `split` is
    "train" or "held_out"; `stop` and `tokens` are those of the generation, where they were given.
    """

    step: int
    prompt: str
    completion: str
    answer: str
    reward: float | None
    parts: Mapping[str, float | None] = field(default_factory=dict)
    reason: str = ""
    traceback: str = ""
    split: str = "train"
    stop: str = ""
    tokens: int | None = None


class SampleLog:
    """Appends samples to `samples.jsonl` in a run directory, one JSON object a line.

    Args:
        run_dir: the run's directory.
        per_call: how many completions of one call of `log` are kept, failed ones first; 0 for all.
        resume_step: None starts a new file; an integer continues after dropping later steps.

    Raises MsrlError where the file cannot be written, or would be overwritten.
    """

    def __init__(
        self, run_dir: PathLike, per_call: int = 16, resume_step: int | None = None
    ) -> None:
        self.path = Path(run_dir) / SAMPLES_FILE
        self._per_call = per_call
        with disk_errors("samples", self.path.parent):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if resume_step is not None:
                _drop_after(self.path, resume_step)
            elif self.path.exists():
                raise MsrlError(f"{self.path} already holds samples: choose another directory")
            self._file: FileIO | None = self.path.open("ab", buffering=0)

    def log(
        self,
        step: int,
        problems: Sequence[Problem],
        completions: Sequence[str],
        scores: Sequence[Score],
        *,
        stops: Sequence[str] | None = None,
        lengths: Sequence[int] | None = None,
        split: str = "train",
    ) -> list[Sample]:
        """Append the completions of one step, `per_call` of them, and return those.

        `stops` are the stop reasons, `lengths` the numbers of tokens.
        """
        if self._file is None:
            raise MsrlError(f"{self.path} is closed: log before close()")
        samples = []
        for i in _chosen(scores, self._per_call):
            sample = Sample(
                operator.index(step),
                problems[i].prompt,
                completions[i],
                problems[i].answer,
                scores[i].value,
                dict(scores[i].parts),
                scores[i].reason,
                scores[i].traceback,
                split,
                stops[i] if stops is not None else "",
                int(lengths[i]) if lengths is not None else None,
            )
            with disk_errors("samples", self.path.parent):
                append_line(self._file, _to_json(sample) + "\n")
            samples.append(sample)
        return samples

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> SampleLog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def read_samples(run_dir: PathLike) -> list[Sample]:
    """Every sample of a run; empty where none was logged. MsrlError names a damaged line."""
    path = Path(run_dir) / SAMPLES_FILE
    samples = []
    for number, line in enumerate(whole_lines(path) if path.exists() else [], 1):
        try:
            samples.append(Sample(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise MsrlError(f"{path} line {number} is no sample: {error}") from error
    return samples


def format_samples(samples: Sequence[Sample], width: int = _WIDTH) -> str:
    """A table for terminals; texts are escaped and cut to `width` characters."""
    rows = [_HEADER, *(_cells(sample, width) for sample in samples)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join(lines)


def html_samples(samples: Sequence[Sample]) -> html.Markup:
    """A table for notebooks and pages, texts in full."""
    rows: list[list[object]] = []
    for sample in samples:
        step, *_, reward, reason = _cells(sample, 0)
        mark: object = reward
        if sample.reward is None:
            mark = html.verdict(reward, False)
        texts = [_block(text) for text in (sample.prompt, sample.completion, sample.answer)]
        rows.append([step, *texts, mark, reason])
    return html.table(rows, _HEADER)


def _block(text: str) -> html.Markup:
    return html.Markup(f"<span style='white-space:pre-wrap'>{html.render(_encodable(text))}</span>")


def _cells(sample: Sample, width: int) -> tuple[str, ...]:
    reward = "failed" if sample.reward is None else f"{sample.reward:.4g}"
    reason = sample.reason + (", cut off" if sample.stop == "length" else "")
    texts = (sample.prompt, sample.completion, sample.answer)
    shown = [_cut(_encodable(json.dumps(t, ensure_ascii=False)[1:-1]), width) for t in texts]
    return (str(sample.step), *shown, reward, _cut(reason.replace("\n", " "), 2 * width))


def _cut(text: str, width: int) -> str:
    return text if not width or len(text) <= width else text[: width - 1] + "…"


def _chosen(scores: Sequence[Score], limit: int) -> list[int]:
    """Indices of at most `limit` scores in their order: the failed ones, then the first."""
    failed_first = sorted(range(len(scores)), key=lambda index: not scores[index].failed)
    return sorted(failed_first[:limit] if limit else failed_first)


def _to_json(sample: Sample) -> str:
    return _encodable(json.dumps(asdict(sample), ensure_ascii=False, allow_nan=False))


def _encodable(text: str) -> str:
    """Write halves of surrogate pairs, which a tokenizer may decode to, as JSON's escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _drop_after(path: Path, step: int) -> None:
    lines = whole_lines(path) if path.exists() else []
    kept = [line + "\n" for line in lines if _step(line) <= step]
    write_text_atomic(path, "".join(kept))


def _step(line: str) -> Any:
    return json.loads(line)["step"]
