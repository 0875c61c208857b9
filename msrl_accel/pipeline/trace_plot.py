"""Picture of a run in time: what its stages did, returns, lag."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from msrl_accel.files import write_bytes_atomic
from msrl_accel.plotting import png_bytes

_COLOURS = {
    "wait": "#d9d9d9",
    "blocked": "#d9d9d9",
    "collect": "#1f5fa8",
    "take": "#8a6fb0",
    "update": "#d9661f",
    "publish": "#3a8f5c",
}
_MOST_TRACKS = 14
_UPDATES_SHOWN = 8


def plot_trace(
    metrics: Mapping[str, np.ndarray],
    events: Sequence[Mapping[str, Any]],
    path: Path,
    title: str,
) -> bool:
    """Write a PNG; without matplotlib (extra `plot`) nothing is written and the result is False.

    Args:
        metrics: as `read_metrics` gives them.
        events: of the timeline; none leaves its panel out.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    slices = last_slices(events)
    heights = ([2.4] if slices else []) + [1.6, 1.2, 1.2]
    figure = Figure(figsize=(9.0, 2.0 * sum(heights) / 1.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    if slices:
        _draw_timeline(axes.pop(0), slices)
    for panel, draw in zip(axes, (_draw_returns, _draw_lag, _draw_shares)):
        draw(panel, metrics)
        panel.grid(True, color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("environment steps")
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    write_bytes_atomic(path, png_bytes(figure))
    return True


def last_slices(events: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, float, float]]:
    """Track, stage, begin and seconds of what happened in the last updates; begin counts from the
    first of these."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X"]
    updates = [e for e in spans if e["name"] == "update"][-_UPDATES_SHOWN:]
    if not updates:
        return []
    begin = updates[0]["ts"]
    end = updates[-1]["ts"] + updates[-1]["dur"]
    found = []
    for e in spans:
        start, stop = max(e["ts"], begin), min(e["ts"] + e["dur"], end)
        if stop > start and e["pid"] == updates[-1]["pid"]:
            track = names[e["pid"], e["tid"]]
            found.append((track, e["name"], (start - begin) / 1e6, (stop - start) / 1e6))
    return found


def _draw_timeline(axes: Any, slices: Sequence[tuple[str, str, float, float]]) -> None:
    tracks = sorted({track for track, *_ in slices}, key=_track_order)[:_MOST_TRACKS]
    for row, track in enumerate(tracks):
        for stage in _COLOURS:
            spans = [(b, s) for t, name, b, s in slices if t == track and name == stage]
            if spans:
                axes.broken_barh(spans, (row - 0.4, 0.8), color=_COLOURS[stage], linewidth=0)
    axes.set_yticks(range(len(tracks)), tracks, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"seconds, the last {_UPDATES_SHOWN} updates")
    shown = {stage for _, stage, *_ in slices}
    from matplotlib.patches import Patch

    handles = [Patch(color=c, label=s) for s, c in _COLOURS.items() if s in shown]
    _legend_above(axes, handles)
    axes.spines[["top", "right"]].set_visible(False)


def _track_order(track: str) -> list[Any]:
    """The learner first, then workers and their environments by number."""
    return [track != "learner", *(int(word) for word in track.replace(",", "").split()[1::2])]


def _draw_returns(axes: Any, metrics: Mapping[str, np.ndarray]) -> None:
    steps, mean = metrics["step"], metrics.get("episode/return")
    axes.set_ylabel("return")
    if mean is None:
        return
    spread = metrics.get("episode/return_std", np.zeros_like(mean))
    axes.fill_between(
        steps,
        mean - spread,
        mean + spread,
        color="#1f5fa8",
        alpha=0.18,
        linewidth=0,
        label="± spread of the last 100 episodes",
    )
    axes.plot(steps, mean, color="#1f5fa8", linewidth=1.6, label="mean")
    _legend_above(axes)


def _draw_lag(axes: Any, metrics: Mapping[str, np.ndarray]) -> None:
    steps = metrics["step"]
    axes.set_ylabel("lag, versions")
    for name, colour, label in (
        ("staleness/lag_max", "#d9661f", "largest"),
        ("staleness/lag_mean", "#1f5fa8", "mean"),
        ("pipeline/queue_depth", "#4a4a4a", "queue depth, updates"),
    ):
        if name in metrics:
            axes.plot(steps, metrics[name], color=colour, linewidth=1.2, label=label)
    if axes.get_legend_handles_labels()[0]:
        _legend_above(axes)
    axes.set_ylim(bottom=0)


def _draw_shares(axes: Any, metrics: Mapping[str, np.ndarray]) -> None:
    steps = metrics["step"]
    stages = {
        "wait": ("time/wait_seconds", "time/rollout_seconds"),
        "take": ("time/take_seconds",),
        "update": ("time/update_seconds",),
        "publish": ("time/publish_seconds",),
    }
    seconds = np.array(
        [
            np.nan_to_num(sum(metrics.get(name, np.zeros(len(steps))) for name in names))
            for names in stages.values()
        ]
    )
    shares = seconds / np.maximum(seconds.sum(axis=0), 1e-9)
    axes.stackplot(steps, shares, colors=[_COLOURS[s] for s in stages], labels=list(stages))
    axes.set_ylabel("learner's time")
    axes.set_ylim(0, 1)
    _legend_above(axes)


def _legend_above(axes: Any, handles: Sequence[Any] | None = None) -> None:
    handles = axes.get_legend_handles_labels()[0] if handles is None else handles
    axes.legend(
        handles=handles,
        ncols=len(handles),
        fontsize=8,
        frameon=False,
        loc="lower right",
        bbox_to_anchor=(1.0, 0.97),
        borderpad=0.2,
    )
