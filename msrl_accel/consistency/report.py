"""What the checker found: text, JSON, HTML and a figure."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from msrl_accel import html
from msrl_accel.consistency.compare import Comparison, OutputDifference
from msrl_accel.consistency.episodes import EpisodeParity
from msrl_accel.files import PathLike, write_bytes_atomic
from msrl_accel.plotting import png_bytes, shown_by_notebooks

if TYPE_CHECKING:
    from msrl_accel.consistency.drift import DriftResult
    from msrl_accel.consistency.invariance import InvarianceResult
    from msrl_accel.consistency.layers import Divergence
    from msrl_accel.consistency.precision import PrecisionReport

RETURN_TOLERANCE = 0.05
"""Mean return of whole episodes, relative; rounding alone separates chaotic trajectories."""
_FLOOR = 1e-10
"""Left edge of the figure: where differences of zero are drawn."""
_COLORS = ("#1f5fa8", "#d9661f", "#3a8f5c", "#8a4fa3", "#4a4a4a", "#b0892b")


@dataclass
class BackendResult:
    """One form of the policy against the baseline."""

    name: str
    comparison: Comparison | None
    """None where the backend cannot be used here or failed."""
    error: str = ""
    """Why there is no comparison."""
    required: bool = True
    """Whether the report is not ok without it."""
    episodes: list[EpisodeParity] = field(default_factory=list)
    invariance: InvarianceResult | None = None
    drift: list[DriftResult] = field(default_factory=list)
    divergence: Divergence | None = None
    """Where it differs first, if it does and that could be found out."""

    @property
    def problems(self) -> list[str]:
        """Why it is not consistent, one sentence each."""
        if self.comparison is None:
            return [self.error]
        found = self.comparison.problems()
        for parity in self.episodes:
            if parity.mean_difference > RETURN_TOLERANCE:
                found.append(
                    f"{parity.mode} episodes return {parity.mean_return:.6g} on average, "
                    f"the baseline's {parity.baseline_mean_return:.6g}"
                )
        if self.invariance is not None and not self.invariance.ok:
            found.append(str(self.invariance))
        found += [str(d) for d in self.drift if not d.caught]
        return found

    @property
    def verdict(self) -> str:
        """'consistent', 'inconsistent' or 'not checked'."""
        if self.comparison is None and not self.required:
            return "not checked"
        return "inconsistent" if self.problems else "consistent"

    def to_dict(self) -> dict[str, Any]:
        content: dict[str, Any] = {"verdict": self.verdict, "problems": self.problems}
        c = self.comparison
        if c is not None:
            content.update(
                tolerances=dict(vars(c.tolerances)),
                rows=c.rows,
                outputs={name: o.to_dict() for name, o in c.outputs.items()},
                flips=c.flips.to_dict(),
                kl={"max": _finite(c.kl_max), "mean": _finite(c.kl_mean)},
                episodes=[e.to_dict() for e in self.episodes],
                drift=[d.to_dict() for d in self.drift],
            )
        if self.invariance is not None:
            content["batch_invariance"] = self.invariance.to_dict()
        if self.divergence is not None:
            content["first_divergence"] = self.divergence.to_dict()
        return content


@dataclass
class ConsistencyReport:
    """Every form of a policy against one baseline.

    `print(report)` gives a table, `report.to_dict()` JSON, `report.save_plot(path)` a figure of the
    differences; a notebook shows it as HTML.
    """

    subject: str
    """What was checked."""
    baseline: str
    """What the others are compared to."""
    results: dict[str, BackendResult]
    calls: int = 0
    rows: int = 0
    kinds: tuple[str, ...] = ()
    """Kinds of observations used."""
    precision: PrecisionReport | None = None

    @property
    def ok(self) -> bool:
        """Whether every form that had to be checked is consistent."""
        return all(r.verdict != "inconsistent" for r in self.results.values())

    def to_dict(self) -> dict[str, Any]:
        """JSON-able content; infinite and undefined numbers are strings."""
        content: dict[str, Any] = {
            "ok": self.ok,
            "subject": self.subject,
            "baseline": self.baseline,
            "calls": self.calls,
            "rows": self.rows,
            "kinds": list(self.kinds),
            "backends": {name: r.to_dict() for name, r in self.results.items()},
        }
        if self.precision is not None:
            content["precision"] = self.precision.to_dict()
        return content

    def __str__(self) -> str:
        header, rows = self._table()
        widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
        lines = [self.headline, f"baseline: {self.baseline}", self._extent(), ""]
        lines += [
            "  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in (header, *rows)
        ]
        notes = self._notes()
        if notes:
            lines += ["", *notes]
        if self.precision is not None:
            lines += ["", str(self.precision)]
        return "\n".join(lines)

    @property
    def headline(self) -> str:
        checked = [r for r in self.results.values() if r.comparison is not None]
        bad = [r.name for r in self.results.values() if r.verdict == "inconsistent"]
        if bad:
            return f"{self.subject}: NOT CONSISTENT ({', '.join(bad)})"
        names = ", ".join(r.name for r in checked) or "nothing"
        return f"{self.subject}: consistent ({names})"

    def _extent(self) -> str:
        kinds = ", ".join(self.kinds)
        return f"{self.rows:,} rows in {self.calls} calls: {kinds} observations"

    def _table(self) -> tuple[list[str], list[list[str]]]:
        checked = [r.comparison for r in self.results.values() if r.comparison is not None]
        present = {name for c in checked for name in c.outputs}
        names = [n for n in checked[0].spec.output_names if n in present] if checked else []
        header = ["form", "verdict", *names, "flips", "largest KL"]
        with_episodes = any(r.episodes for r in self.results.values())
        if with_episodes:
            header.append("episode returns")
        rows = []
        for r in self.results.values():
            row = [r.name, r.verdict]
            if r.comparison is None:
                row += [""] * (len(header) - 2)
            else:
                outputs = r.comparison.outputs
                row += [_cell(outputs[n]) if n in outputs else "" for n in names]
                row += [_flips(r.comparison), f"{r.comparison.kl_max:.1e}"]
                row += [_returns(r.episodes)] if with_episodes else []
            rows.append(row)
        return header, rows

    def _notes(self) -> list[str]:
        notes = []
        for r in self.results.values():
            if r.verdict == "not checked":
                notes.append(f"{r.name}: not checked: {r.error}")
                continue
            notes += [f"{r.name}: {problem}" for problem in r.problems]
            if r.divergence is not None:
                notes.append(f"{r.name}: {r.divergence}")
            if r.invariance is not None and r.invariance.ok:
                notes.append(f"{r.name}: {r.invariance}")
            caught = [d.name for d in r.drift if d.caught]
            if caught:
                notes.append(f"{r.name}: drift caught: {', '.join(caught)}")
        return notes

    def _repr_html_(self) -> str:
        header, rows = self._table()
        precision = "" if self.precision is None else self.precision._repr_html_()
        about = html.render(f"baseline: {self.baseline}; {self._extent()}")
        return (
            f"<div>{html.verdict(self.headline, self.ok)}<br><small>{about}</small>"
            f"{html.table(rows, header)}{html.bullets(self._notes())}{precision}</div>"
        )

    def plot(self) -> Any:
        """Distribution of the differences as a Matplotlib figure.

        Raises:
            ImportError: Matplotlib is missing (`pip install 'msrl_accel[plot]'`).
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        results = [r for r in self.results.values() if r.comparison is not None]
        comparisons = {r.name: r.comparison for r in results if r.comparison is not None}
        names = _plotted_outputs(list(comparisons.values()))
        columns = min(3, max(len(names), 1))
        rows = -(-max(len(names), 1) // columns)
        size = (4.2 * columns, 3.1 * rows + 0.9)
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
        figure = Figure(figsize=size, dpi=120, layout=layout)
        FigureCanvasAgg(figure)
        figure.suptitle(self.headline, x=0.01, ha="left", fontsize=12, fontweight="bold")
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for ax, name in zip(axes, names):
            _draw_output(ax, name, comparisons)
        for ax in axes[len(names) :]:
            ax.set_axis_off()
        found = [ax.get_legend_handles_labels() for ax in axes]
        legend = {label: h for handles, labels in found for label, h in zip(labels, handles)}
        if legend:
            where: dict[str, Any] = {"loc": "outside lower center", "ncols": len(legend)}
            figure.legend(list(legend.values()), list(legend), frameon=False, **where)
        return shown_by_notebooks(figure)

    def save_plot(self, path: PathLike) -> Path:
        """Write the figure as a PNG file."""
        write_bytes_atomic(path, png_bytes(self.plot()))
        return Path(path)


def _plotted_outputs(comparisons: list[Comparison]) -> list[str]:
    """Outputs that differ anywhere, or all where none does; not the choices of discrete actions."""
    if not comparisons:
        return []
    spec = comparisons[0].spec
    hidden = {"raw_action"} if spec.action.kind == "continuous" else {"raw_action", "action"}
    names = [n for n in spec.output_names if n not in hidden]
    outputs = [o for c in comparisons for o in c.outputs.values()]
    differing = {o.name for o in outputs if o.max_abs > 0}
    return [n for n in names if n in differing] or names


def _draw_output(ax: Any, name: str, comparisons: dict[str, Comparison]) -> None:
    """Share of numbers that differ by at most x, one line a backend."""
    right = 1e-4
    for i, (backend, c) in enumerate(comparisons.items()):
        if name not in c.outputs or not len(c.outputs[name].samples):
            continue
        samples = np.sort(np.nan_to_num(c.outputs[name].samples, posinf=1e6))
        right = max(right, 10 * float(samples[-1]))
        share = np.arange(1, len(samples) + 1) / len(samples)
        x = np.concatenate([[_FLOOR], np.maximum(samples, _FLOOR)])
        y = np.concatenate([[float((samples <= _FLOOR).mean())], share])
        ends = np.concatenate([x, [1e7]]), np.concatenate([y, [1.0]])
        color = _COLORS[i % len(_COLORS)]
        # Lines that coincide stay visible: later ones are thinner.
        width = 4.2 - 0.7 * min(i, 4)
        equal = all(o.bit_equal for o in c.outputs.values())
        label = f"{backend} (bit-equal)" if equal else backend
        ax.step(*ends, where="post", color=color, linewidth=width, label=label)
    allowed = {
        t.log_prob if name == "log_prob" else t.absolute
        for t in (c.tolerances for c in comparisons.values())
        if not t.is_exact
    }
    for value in sorted(allowed):
        ax.axvline(value, color="#b3261e", linestyle="--", linewidth=1.0, label=None)
        ax.annotate(
            "tolerance near 0",
            (value, 0.03),
            xytext=(-3, 0),
            textcoords="offset points",
            rotation=90,
            ha="right",
            va="bottom",
            fontsize=7.5,
            color="#b3261e",
        )
        right = max(right, 10 * value)
    ax.set_xscale("log")
    ax.set_xlim(_FLOOR, right)
    ax.set_ylim(0, 1.03)
    ticks = 10.0 ** np.arange(-10, np.log10(right) + 0.01, 2)
    ax.set_xticks(ticks, ["0"] + [f"$10^{{{round(np.log10(t))}}}$" for t in ticks[1:]])
    ax.minorticks_off()
    ax.set_title(name, fontsize=10, loc="left")
    ax.set_xlabel("absolute difference from the baseline", fontsize=8)
    ax.set_ylabel("share of numbers", fontsize=8)
    ax.tick_params(labelsize=8)
    ax.grid(True, color="#dddddd", linewidth=0.7)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def _cell(output: OutputDifference) -> str:
    if output.bit_equal:
        return "bit-equal"
    if output.max_abs == 0:
        return "equal"
    ulp = f" ({output.max_ulp} ulp)" if output.max_ulp else ""
    return f"{output.max_abs:.1e}{ulp}"


def _flips(c: Comparison) -> str:
    if c.spec.action.kind == "continuous" or not c.flips.decisions:
        return ""
    if not c.flips.count:
        return f"0 of {c.flips.decisions:,}"
    return f"{c.flips.count:,} of {c.flips.decisions:,}, margin {c.flips.smallest_margin:.1e}"


def _returns(episodes: list[EpisodeParity]) -> str:
    if not episodes:
        return ""
    if all(e.equal_returns for e in episodes):
        return f"equal ({sum(e.episodes for e in episodes)})"
    return f"differ by {max(e.max_return_difference for e in episodes):.1e}"


def _finite(x: float) -> Any:
    return x if np.isfinite(x) else str(x)
