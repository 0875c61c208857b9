"""What the check of an exported language model found: text and JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from msrl_accel.export.lm_reference import Generated
    from msrl_accel.lm.parity import Parity


@dataclass
class GraphResult:
    """One exported graph, or what was recorded of it, against the training Cell."""

    tokens: int = 0
    """Compared."""
    different: int = 0
    """Of these."""
    max_difference: float = 0.0
    """Of log-probabilities from those of the training Cell that generates."""
    bit_equal: bool = True
    training: Parity | None = None
    """Against the training graph's log-probabilities of the same tokens."""
    problems: list[str] = field(default_factory=list)
    """Why it is not consistent, one sentence each."""

    def add(self, found: Generated, expected: Generated, inside: np.ndarray, what: str) -> None:
        """Compare the tokens and log-probabilities of one call where `inside` [N, S]."""
        unequal = (found.tokens != expected.tokens) & inside
        self.tokens += int(inside.sum())
        self.different += int(unequal.sum())
        if unequal.any():
            row, step = np.argwhere(unequal)[0]
            self.problems.append(
                f"{what}: {unequal.sum()} of {inside.sum()} tokens differ, first token {step} of "
                f"row {row}: {found.tokens[row, step]} instead of {expected.tokens[row, step]}"
            )
        ours, theirs = (np.where(inside & ~unequal, x.log_probs, 0.0) for x in (found, expected))
        distance = float(np.abs(ours - theirs).max(initial=0.0))
        self.max_difference = max(self.max_difference, distance if distance >= 0 else np.inf)
        if not np.array_equal(ours, theirs):
            self.bit_equal = False

    def judge(self, whose: str, distance: float, tolerance: float) -> None:
        """Note a problem where log-probabilities differ from others by too much."""
        if not distance <= tolerance:
            self.problems.append(
                f"log-probabilities differ from {whose} by up to {distance:.2g}, more than "
                f"{tolerance:g}"
            )

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": not self.problems,
            "problems": self.problems,
            "tokens": self.tokens,
            "different_tokens": self.different,
            "bit_equal": self.bit_equal,
            "max_difference": _finite(self.max_difference),
            "training": None if self.training is None else _finite_values(self.training),
        }


@dataclass
class LanguageModelReport:
    """Every graph of a bundle, what the bundle recorded, and the controls."""

    subject: str
    baseline: str
    results: dict[str, GraphResult]
    controls: dict[str, GraphResult]
    """Damaged graphs, which must not be consistent."""

    @property
    def missed(self) -> list[str]:
        """Controls that were not caught."""
        return [name for name, result in self.controls.items() if not result.problems]

    @property
    def ok(self) -> bool:
        return not self.missed and not any(r.problems for r in self.results.values())

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "subject": self.subject,
            "baseline": self.baseline,
            "results": {name: r.to_dict() for name, r in self.results.items()},
            "controls": {
                name: {**r.to_dict(), "caught": bool(r.problems)}
                for name, r in self.controls.items()
            },
        }

    def __str__(self) -> str:
        verdict = "consistent" if self.ok else "NOT CONSISTENT"
        lines = [f"{self.subject}: {verdict}", f"baseline: {self.baseline}", ""]
        header = ["", "tokens", "log-probs of generation", "of training: max", "mean", "KL"]
        rows = [header, *(_row(name, r) for name, r in self.results.items())]
        rows += [_row(f"control: {name}", r) for name, r in self.controls.items()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        lines += ["  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows]
        notes = [f"{name}: {p}" for name, r in self.results.items() for p in r.problems]
        notes += [f"control {name}: NOT caught" for name in self.missed]
        caught = [name for name in self.controls if name not in self.missed]
        if caught:
            notes.append(f"controls caught: {', '.join(caught)}")
        return "\n".join([*lines, "", *notes]).rstrip()


def _row(name: str, r: GraphResult) -> list[str]:
    same = f"{r.tokens - r.different:,} of {r.tokens:,} equal"
    generation = "bit-equal" if r.bit_equal else f"within {r.max_difference:.1e}"
    if r.training is None:
        return [name, same if r.tokens else "", generation if r.tokens else "failed", "", "", ""]
    return [name, same, generation, *(f"{x:.1e}" for x in r.training)]


def _finite(x: float) -> Any:
    return x if np.isfinite(x) else str(x)


def _finite_values(values: Parity) -> dict[str, Any]:
    return {name: _finite(x) for name, x in values._asdict().items()}
