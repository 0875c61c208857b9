"""Two policies' outputs against each other: differences, action flips, divergence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from msrl_accel.consistency.reference import components, log_softmax, softplus
from msrl_accel.runtime.base import ActResult
from msrl_accel.spaces import ActionSpec, PolicySpec

SAMPLES = 20_000
"""Differences kept of each output, for the figure."""


@dataclass(frozen=True)
class Tolerances:
    """What counts as consistent. A number x may differ by `absolute` + `relative` * |x|."""

    absolute: float = 1e-5
    """Distribution parameters (logits, means), values, and actions in units of their range."""
    relative: float = 1e-6
    """Eight units in the last place: a value of -500 has no digits below 3e-5. Of a squashed policy
    it is relative to the largest number of the call: its means, which tanh flattens, grow large in
    training, and a small one is the difference of sums as large."""
    log_prob: float = 1e-4
    """Instead of `absolute`, in rows where the action is the same; a standardised distance enters
    squared."""
    margin: float = 1e-5
    """An action may flip only where the choice was closer than this."""
    kl: float = 1e-6
    """Largest KL divergence of a row, in nats."""

    @classmethod
    def exact(cls) -> Tolerances:
        """Bit-equality."""
        return cls(absolute=0.0, relative=0.0, log_prob=0.0, margin=0.0, kl=0.0)

    @property
    def is_exact(self) -> bool:
        return self == Tolerances.exact()


@dataclass
class OutputDifference:
    """One output over all calls."""

    name: str
    bit_equal: bool = True
    max_abs: float = 0.0
    max_ulp: int = 0
    """Largest number of float32 values between the two; 0 for whole numbers."""
    excess: float = 0.0
    """Largest difference divided by what the tolerance allows; above 1 is too much."""
    worst: str = ""
    """The call of the largest excess."""
    samples: np.ndarray = field(default_factory=lambda: np.empty(0), repr=False)
    """Absolute differences of single numbers, up to `SAMPLES`."""

    def to_dict(self) -> dict[str, Any]:
        content = {k: v for k, v in vars(self).items() if k != "samples"}
        return {k: _json_number(v) for k, v in content.items()}


@dataclass
class Flips:
    """Discrete decisions that came out differently, of how many."""

    decisions: int = 0
    count: int = 0
    smallest_margin: float | None = None
    largest_margin: float | None = None
    """Of the decisions that flipped, in units of logit + noise."""

    def add(self, margins: np.ndarray, flipped: np.ndarray) -> None:
        self.decisions += int(flipped.size)
        self.count += int(flipped.sum())
        if flipped.any():
            low, high = float(margins[flipped].min()), float(margins[flipped].max())
            self.smallest_margin = min(low, _or(self.smallest_margin, low))
            self.largest_margin = max(high, _or(self.largest_margin, high))

    def to_dict(self) -> dict[str, Any]:
        return {k: _json_number(v) for k, v in vars(self).items()}


class Comparison:
    """Accumulates the differences of one policy from the baseline.

    Args:
        spec: the policy's tensors.
        names: of the outputs to compare: action, log_prob, value, raw_action, and the parameters.
        tolerances: what is allowed.
    """

    def __init__(self, spec: PolicySpec, names: tuple[str, ...], tolerances: Tolerances) -> None:
        self.spec = spec
        self.tolerances = tolerances
        self.outputs = {name: OutputDifference(name) for name in names}
        self.flips = Flips()
        self.kl_max = 0.0
        self.kl_sum = 0.0
        self.rows = 0
        self._rng = np.random.default_rng(0)

    def add(self, expected: ActResult, got: ActResult, noise: np.ndarray, where: str) -> None:
        """Compare one call's outputs, [B, ...] each."""
        ours, theirs = named(self.spec, expected), named(self.spec, got)
        flipped_rows: np.ndarray = np.zeros(len(noise), bool)
        if self.spec.action.kind != "continuous":
            margins, flipped = flips(self.spec.action, expected, got, noise)
            self.flips.add(margins, flipped)
            flipped_rows = np.asarray(flipped.any(axis=-1))
        for name, output in self.outputs.items():
            _check_shapes(name, ours[name], theirs[name])
            skip = flipped_rows if name in ("action", "raw_action", "log_prob") else None
            largest = self._largest(name, ours)
            self._add_output(output, ours[name], theirs[name], skip, largest, where)
        kl = divergence(self.spec.action, expected.parameters, got.parameters)
        self.kl_max = max(self.kl_max, float(np.nan_to_num(kl, nan=np.inf).max(initial=0.0)))
        self.kl_sum += float(kl.sum())
        self.rows += len(noise)

    def _add_output(
        self,
        output: OutputDifference,
        a: np.ndarray,
        b: np.ndarray,
        flipped: np.ndarray | None,
        largest: float,
        where: str,
    ) -> None:
        output.bit_equal &= same_bits(a, b)
        output.max_ulp = max(output.max_ulp, ulp_distance(a, b))
        difference = absolute_difference(a, b)
        output.max_abs = max(output.max_abs, float(difference.max(initial=0.0)))
        counted = difference
        if flipped is not None and flipped.any():
            # A flipped choice is judged by its margin; its log-probability is another action's.
            counted = difference[~flipped]
            a = a[~flipped]
        allowed = self._allowed(output.name, a, largest)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(counted > 0, counted / allowed, 0.0)
        excess = float(ratio.max(initial=0.0))
        if excess > output.excess:
            output.excess, output.worst = excess, where
        self._keep(output, counted)

    def _largest(self, name: str, expected: Mapping[str, np.ndarray]) -> float:
        """What an error of a squashed policy's output is relative to, over the call; else 0."""
        if not self.spec.action.squashed:
            return 0.0
        # An action is off by what its mean is off, and its log-probability by twice that.
        of_mean = {"action": 1, "raw_action": 1, "log_prob": 2 * self.spec.action.size}
        source = "mean" if name in of_mean else name
        return of_mean.get(name, 1) * float(np.abs(expected[source]).max(initial=0.0))

    def _allowed(self, name: str, expected: np.ndarray, largest: float) -> np.ndarray:
        t = self.tolerances
        relative = t.relative * np.maximum(np.abs(expected, dtype=np.float64), largest)
        if name == "log_prob":
            return np.asarray(t.log_prob + relative)
        if name == "action" and self.spec.action.kind == "continuous":
            scale = np.maximum(1.0, action_range(self.spec.action))
            return np.asarray(t.absolute * scale + relative * (scale if largest else 1.0))
        return np.asarray(t.absolute + relative)

    def _keep(self, output: OutputDifference, difference: np.ndarray) -> None:
        room = SAMPLES - len(output.samples)
        flat = difference.ravel()
        if len(flat) > max(room // 4, 64):
            flat = self._rng.choice(flat, min(max(room // 4, 64), len(flat)), replace=False)
        output.samples = np.concatenate([output.samples, flat[: max(room, 0)]])

    @property
    def kl_mean(self) -> float:
        return self.kl_sum / max(self.rows, 1)

    def problems(self) -> list[str]:
        """What is outside the tolerances, one sentence each."""
        t, found = self.tolerances, []
        for o in self.outputs.values():
            if o.excess > 1 or (t.is_exact and not o.bit_equal):
                what = "not bit-equal" if t.is_exact else f"{o.excess:.3g} times what is allowed"
                found.append(f"{o.name} differs by up to {o.max_abs:.3g}, {what} ({o.worst})")
        margin = self.flips.largest_margin
        if margin is not None and not margin < t.margin:
            found.append(
                f"{self.flips.count} of {self.flips.decisions} actions flip, "
                f"with margins up to {margin:.3g} (allowed below {t.margin:g})"
            )
        if not self.kl_max <= t.kl:
            found.append(f"KL divergence up to {self.kl_max:.3g} (allowed {t.kl:g})")
        return found


def named(spec: PolicySpec, result: ActResult) -> dict[str, np.ndarray]:
    """Outputs by name."""
    return dict(zip(spec.output_names, result.outputs()))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays of equal shape hold the same bits; whole numbers of any width."""
    if a.dtype.kind in "iub":
        return bool(np.array_equal(a, b))
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def absolute_difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|a - b| in float64; infinite where one is not a number and the other is."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        difference = np.abs(a - b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(same, 0.0, np.where(np.isnan(difference), np.inf, difference))


def ulp_distance(a: np.ndarray, b: np.ndarray) -> int:
    """Largest number of steps between neighbouring float32 values from a to b; -0 equals +0."""
    if a.dtype.kind != "f":
        return 0
    with np.errstate(over="ignore"):
        x, y = _ordered(a.astype(np.float32)), _ordered(b.astype(np.float32))
    return int(np.abs(x - y).max(initial=0))


def _ordered(x: np.ndarray) -> np.ndarray:
    """Integers in the order of the floats, neighbours one apart."""
    bits = np.ascontiguousarray(x).view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def flips(
    action: ActionSpec, expected: ActResult, got: ActResult, noise: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Margin [B, D] of each discrete decision under the baseline, and whether it flipped.

    The margin is the best minus the second best of logits + noise, or |logit + noise| of a bit.
    """
    perturbed = expected.parameters[0].astype(np.float64) + noise
    if action.kind == "multi_binary":
        margins = np.abs(perturbed)
    else:
        margins = np.stack([_top_gap(x) for x in components(action, perturbed)], axis=1)
    shape = margins.shape
    return margins, expected.raw_action.reshape(shape) != got.raw_action.reshape(shape)


def _top_gap(x: np.ndarray) -> np.ndarray:
    if x.shape[-1] == 1:
        return np.full(len(x), np.inf)
    best = np.partition(x, -2, axis=-1)
    return np.asarray(best[:, -1] - best[:, -2])


def divergence(
    action: ActionSpec, p: tuple[np.ndarray, ...], q: tuple[np.ndarray, ...]
) -> np.ndarray:
    """KL(p || q) [B] in nats, in closed form and float64; NaN where a parameter is not finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        return _divergence(action, p, q)


def _divergence(
    action: ActionSpec, p: tuple[np.ndarray, ...], q: tuple[np.ndarray, ...]
) -> np.ndarray:
    p = tuple(x.astype(np.float64) for x in p)
    q = tuple(x.astype(np.float64) for x in q)
    if action.kind == "continuous":
        (mean_p, log_p), (mean_q, log_q) = (_shown(action, *x) for x in (p, q))
        # expm1 and the difference of logarithms keep small divergences from cancelling.
        ratio = 2.0 * (log_p - log_q)
        terms = np.expm1(ratio) - ratio + ((mean_p - mean_q) * np.exp(-log_q)) ** 2
        return np.asarray(0.5 * terms.sum(axis=-1))
    if action.kind == "multi_binary":
        # Of a bit with logit l: log p(1) = -softplus(-l), log p(0) = -softplus(l).
        on = softplus(-q[0]) - softplus(-p[0])
        off = softplus(q[0]) - softplus(p[0])
        prob = np.exp(-softplus(-p[0]))
        return np.asarray((prob * on + (1 - prob) * off).sum(axis=-1).clip(min=0))
    total = np.zeros(len(p[0]))
    for x, y in zip(components(action, p[0]), components(action, q[0])):
        log_x, log_y = log_softmax(x), log_softmax(y)
        total += (np.exp(log_x) * (log_x - log_y)).sum(axis=-1)
    return total.clip(min=0)


def _shown(
    action: ActionSpec, mean: np.ndarray, log_std: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Of a squashed Gaussian, as far as actions show it: those of a mean beyond 10 are all 1, and
    next to a spread below a tenth the rounding of means would count."""
    if not action.squashed:
        return mean, log_std
    return mean.clip(-10.0, 10.0), np.maximum(log_std, math.log(0.1))


def action_range(action: ActionSpec) -> np.ndarray:
    """Half the distance between the bounds, in the action's shape; 1 where one is open."""
    low, high = np.array(action.low), np.array(action.high)
    with np.errstate(invalid="ignore", over="ignore"):
        half = (high - low) / 2
    return np.where(np.isfinite(half) & (half < 1e30), half, 1.0).reshape(action.shape)


def _check_shapes(name: str, a: np.ndarray, b: np.ndarray) -> None:
    if a.shape != b.shape:
        raise ValueError(f"output {name!r} has shape {b.shape}, the baseline gives {a.shape}")


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _json_number(value: Any) -> Any:
    """JSON has no infinity."""
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value
