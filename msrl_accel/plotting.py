"""Learning-curve figure of a run."""

from __future__ import annotations

import functools
import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from msrl_accel.files import PathLike, write_bytes_atomic

_BLUE, _ORANGE, _GREY = "#1f5fa8", "#d9661f", "#4a4a4a"
_TEXT_STEPS = "examples and completions"
"""Steps of language models."""
# Small panels, in order: title -> metric names, whole or after the last "/".
_PANELS = {
    "Supervised loss": ("sft/loss",),
    "Policy loss": ("policy_loss", "actor_loss", "grpo/loss"),
    "Value loss": ("value_loss", "critic_loss"),
    "KL divergence": ("approx_kl", "kl"),
    "Entropy": ("entropy",),
}


def plot_learning_curve(
    metrics: Mapping[str, np.ndarray], path: PathLike | None = None, title: str = ""
) -> Any:
    """Episode return over environment steps, evaluations marked, small panels for diagnostics.

    `metrics` is what `read_metrics` gives. Drawn are "step", "episode/return" with the band of
    "episode/return_min" and "_max" (or "_std"), "eval/return" with "eval/return_std", and losses,
    KL and entropy if present; of language models also "eval/pass@k".

    Returns the path of the PNG written, or the `matplotlib.figure.Figure` when `path` is None. The
    global state of pyplot stays untouched. Without matplotlib (extra `plot`): a warning, and None.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        warnings.warn(
            f"no learning curve is drawn ({error}): pip install 'msrl_accel[plot]'", stacklevel=2
        )
        return None
    panels = _present_panels(metrics)
    figure = Figure(figsize=(8.0, 6.4 if panels else 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    if panels:
        grid = figure.add_gridspec(2, len(panels), height_ratios=(2.2, 1.0))
        main = figure.add_subplot(grid[0, :])
        for column, (name, series) in enumerate(panels.items()):
            axes = figure.add_subplot(grid[1, column])
            _draw_panel(axes, name, series)
            if _of_text(metrics):
                axes.set_xlabel(_TEXT_STEPS)
    else:
        main = figure.add_subplot()
    _draw_returns(main, metrics)
    if title:
        main.set_title(title, fontsize=13, fontweight="bold", loc="left")
    if path is None:
        return shown_by_notebooks(figure)
    write_bytes_atomic(path, png_bytes(figure))
    return Path(path)


def png_bytes(figure: Any) -> bytes:
    """A Matplotlib figure as a PNG file."""
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def shown_by_notebooks(figure: Any) -> Any:
    """Let notebooks show a figure that pyplot did not make; they know only those of pyplot."""
    figure._repr_png_ = functools.partial(png_bytes, figure)
    return figure


def _draw_returns(axes: Any, metrics: Mapping[str, np.ndarray]) -> None:
    steps, returns = _series(metrics, "episode/return")
    if len(steps):
        band = _band(metrics)
        if band is not None:
            label, band_steps, low, high = band
            axes.fill_between(
                band_steps, low, high, color=_BLUE, alpha=0.16, linewidth=0, label=label
            )
        axes.plot(steps, returns, **_line(steps, _BLUE), linewidth=1.8, label="training, mean")
    steps, returns = _series(metrics, "eval/return")
    if len(steps):
        spread = _beside(metrics, "eval/return", "eval/return_std")
        axes.errorbar(
            steps,
            returns,
            yerr=spread,
            color=_ORANGE,
            fmt="o",
            markersize=5.5,
            capsize=2.5,
            elinewidth=1.0,
            markeredgecolor="white",
            label=("held out, greedy" if _of_text(metrics) else "evaluation")
            + ("" if spread is None else " ± std"),
        )
    for name, color in zip(_pass_rates(metrics), ("#3a8f5c", _GREY)):
        steps, rates = _series(metrics, name)
        label = f"held out, {name.rsplit('/', 1)[-1]}"
        axes.plot(steps, rates, ".--", color=color, linewidth=1.0, label=label)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", frameon=True, framealpha=0.85, edgecolor="none", fontsize=9)
    else:
        axes.text(0.5, 0.5, "no episode has ended yet", transform=axes.transAxes, ha="center")
    axes.set_ylabel("reward" if _of_text(metrics) else "episode return")
    _style(axes)
    if _of_text(metrics):
        axes.set_xlabel(_TEXT_STEPS)


def _of_text(metrics: Mapping[str, np.ndarray]) -> bool:
    """Whether a language model was trained."""
    return "sft/loss" in metrics or "rollout/accuracy" in metrics


def _pass_rates(metrics: Mapping[str, np.ndarray]) -> list[str]:
    """Metrics of pass@1 and of the largest k."""
    names = [name for name in metrics if name.startswith("eval/pass@")]
    names.sort(key=lambda name: int(name.rsplit("@", 1)[-1]))
    return names if len(names) < 2 else [names[0], names[-1]]


def _draw_panel(axes: Any, name: str, series: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
    for color, (label, (steps, values)) in zip((_BLUE, _ORANGE, "#3a8f5c", _GREY), series.items()):
        axes.plot(steps, values, **_line(steps, color), linewidth=1.2, label=label)
    axes.set_title(name, fontsize=10, loc="left")
    if len(series) > 1:
        axes.legend(loc="best", frameon=False, fontsize=8)
    _style(axes, ticks=3)
    axes.tick_params(labelsize=8)
    axes.xaxis.label.set_size(8)


def _style(axes: Any, ticks: int = 6) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.set_xlabel("environment steps")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=ticks))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.margins(x=0.01)
    axes.grid(True, color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _line(steps: np.ndarray, color: str) -> dict[str, Any]:
    # A single point has no line to draw: mark it.
    return {"color": color, "marker": "o" if len(steps) == 1 else None, "markersize": 4}


def _series(metrics: Mapping[str, np.ndarray], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values where the metric was logged and finite."""
    if name not in metrics:
        return np.empty(0), np.empty(0)
    values = np.asarray(metrics[name], np.float64)
    finite = np.isfinite(values)
    return np.asarray(metrics["step"])[finite], values[finite]


def _band(
    metrics: Mapping[str, np.ndarray],
) -> tuple[str, np.ndarray, np.ndarray, np.ndarray] | None:
    """Label, steps, low, high of the spread of returns, if it was logged."""
    steps, mean = _series(metrics, "episode/return")
    low = _beside(metrics, "episode/return", "episode/return_min")
    high = _beside(metrics, "episode/return", "episode/return_max")
    if low is not None and high is not None:
        return "training, min to max", steps, low, high
    spread = _beside(metrics, "episode/return", "episode/return_std")
    if spread is not None:
        return "training, ± std", steps, mean - spread, mean + spread
    return None


def _beside(metrics: Mapping[str, np.ndarray], name: str, other: str) -> np.ndarray | None:
    """Values of `other` in the rows of `_series(metrics, name)`; None if it has none there."""
    if other not in metrics:
        return None
    values = np.asarray(metrics[other], np.float64)[np.isfinite(metrics[name])]
    return values if np.isfinite(values).any() else None


def _present_panels(
    metrics: Mapping[str, np.ndarray],
) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
    # parity/kl is between two graphs of one policy: nothing that training moves.
    names = [name for name in metrics if not name.startswith("parity/")]
    by_tail = {name.rsplit("/", 1)[-1]: name for name in names}
    by_tail.update({name: name for name in metrics})
    panels = {}
    for title, tails in _PANELS.items():
        series = {tail: _series(metrics, by_tail[tail]) for tail in tails if tail in by_tail}
        present = {tail: pair for tail, pair in series.items() if len(pair[0])}
        if present:
            panels[title] = present
    return panels
