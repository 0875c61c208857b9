"""Progress while training, and the block of text that closes a run."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TextIO

from tqdm import tqdm

_BAR = "{percentage:3.0f}% |{bar}| {n:,}/{total:,} steps [{rate_text}{postfix}, {remaining} left]"


class Progress:
    """Steps done, steps/s, return and time left, on `stream` (default: standard error).

    A terminal shows a bar that redraws in place; anything else gets a plain line at most every
    `interval` seconds (default 10) and one at the end; `quiet` prints nothing. `initial` steps
    were done before this process and do not count for the speed.
    """

    def __init__(
        self,
        total_steps: int,
        initial: int = 0,
        quiet: bool = False,
        stream: TextIO | None = None,
        interval: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_steps
        self._initial = initial
        self._step = initial
        self._return = math.nan
        self._stream = stream or sys.stderr
        self._interval = interval
        self._clock = clock
        self._start = self._last_line = clock()
        self._last_step = initial
        self._quiet = quiet
        self._bar: tqdm[None] | None = None
        if not quiet and self._stream.isatty():
            self._bar = _StepsBar(
                total=total_steps,
                initial=initial,
                file=self._stream,
                bar_format=_BAR,
                dynamic_ncols=True,
            )

    def update(self, step: int, episode_return: float = math.nan) -> None:
        """`step` environment steps are done in all; the last return given stays on display."""
        advance = step - self._step
        self._step = step
        if not math.isnan(episode_return):
            self._return = episode_return
        if self._bar is not None:
            if not math.isnan(self._return):
                self._bar.set_postfix_str(f"return {_short(self._return)}", refresh=False)
            self._bar.update(advance)
        elif self._clock() - self._last_line >= self._interval:
            self._print_line()

    def write(self, text: str) -> None:
        """Print a line without breaking the bar; nothing when quiet."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Show the final state; closing twice is allowed."""
        if self._bar is not None:
            self._bar.close()
        elif self._step != self._last_step:
            self._print_line()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _print_line(self) -> None:
        now = self._clock()
        self._last_line, self._last_step = now, self._step
        rate = (self._step - self._initial) / max(now - self._start, 1e-9)
        parts = [
            f"{self._step:,}/{self._total:,} steps ({self._step / max(self._total, 1):.0%})",
            f"{rate:,.0f} steps/s",
        ]
        if not math.isnan(self._return):
            parts.append(f"return {_short(self._return)}")
        if rate > 0 and self._step < self._total:
            parts.append(f"{format_duration((self._total - self._step) / rate)} left")
        self.write(", ".join(parts))


class _StepsBar(tqdm):  # type: ignore[type-arg]
    """tqdm with its rate always in steps/s, with thousands separators."""

    @property
    def format_dict(self) -> dict[str, object]:
        values = dict(super().format_dict)
        rate, elapsed = values["rate"], float(str(values["elapsed"]))
        if rate is None:
            rate = (self.n - self.initial) / elapsed if elapsed else 0.0
        values["rate_text"] = f"{float(str(rate)):,.0f} steps/s"
        return values


def _short(number: float) -> str:
    return f"{number:.1f}" if abs(number) >= 10 else f"{number:.3g}"


def format_duration(seconds: float) -> str:
    """65 -> "1:05", 3700 -> "1:01:40"."""
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole:02d}" if hours else f"{minutes}:{whole:02d}"


def format_summary(title: str, rows: Mapping[str, object]) -> str:
    """A title and one aligned "key: value" line each; further lines of a value are indented."""
    width = max((len(key) for key in rows), default=0) + 1
    indent = "\n" + " " * (width + 3)
    lines = [f"  {key + ':':<{width}} {value}".replace("\n", indent) for key, value in rows.items()]
    return "\n".join([title, *lines])
