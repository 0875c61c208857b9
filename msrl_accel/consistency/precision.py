"""Rehearsal of lower precisions before a policy reaches a device.

The network is evaluated in NumPy (`NumpyPolicy`) with its numbers rounded where the mode rounds
them. Emulated are the formats of values between operators; sums are in float32, as the matrix unit
accumulates. Not emulated: the order of summation, the accuracy of the device's tanh and exp, fused
operators, and the lists of operators by which CANN decides in its mixed modes (`mixed_*` here
lowers matrix products and convolutions only). Values beyond the largest float16 become infinite;
devices that saturate instead are no more right.

Modes are those of ATC's `--precision_mode_v2`, and `int8-weights`, which AMCT makes before ATC.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from msrl_accel import html
from msrl_accel.consistency.compare import Comparison, Tolerances, action_range, named
from msrl_accel.consistency.reference import Arithmetic, NumpyPolicy
from msrl_accel.errors import ConfigError
from msrl_accel.spaces import Observations, PolicySpec

if TYPE_CHECKING:
    from msrl_accel.config import TrainConfig
    from msrl_accel.consistency.episodes import Episodes

ORIGIN = "origin"
CHUNK = 256


def half(x: np.ndarray) -> np.ndarray:
    """Round to float16, to nearest even; beyond 65504 to infinity."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(x.dtype)


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Round to the upper 16 bits of a float32, to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(
        0xFFFF0000
    )
    # Rounding up must not turn a NaN into another number.
    return np.where(np.isnan(x), x, rounded.view(np.float32)).astype(x.dtype)


def int8_channels(weight: np.ndarray) -> np.ndarray:
    """Symmetric 8-bit quantisation with one scale an output channel, back in float32.

    `weight` is [out, in], [members, out, in] or [filters, channels, k, k].
    """
    axes = (1, 2, 3) if weight.ndim == 4 else (-1,)
    largest = np.abs(weight).max(axis=axes, keepdims=True)
    scale = np.where(largest > 0, largest / 127, 1).astype(weight.dtype)
    return np.asarray(np.clip(np.rint(weight / scale), -127, 127) * scale)


@dataclass(frozen=True)
class PrecisionMode:
    """A precision and how it is emulated."""

    name: str
    emulates: str
    arithmetic: Arithmetic
    atc: str | None
    """Value of `--precision_mode_v2`; None where ATC has no mode for it."""


_MODES = (
    PrecisionMode(
        "fp16",
        "weights, observations and the result of every operator in float16; products summed in "
        "float32",
        Arithmetic(weight=half, matrix_input=half, matrix_output=half, vector=half),
        "fp16",
    ),
    PrecisionMode(
        "mixed_float16",
        "inputs, weights and results of matrix products and convolutions in float16; the rest in "
        "float32 (allow_fp32_to_fp16)",
        Arithmetic(weight=half, matrix_input=half, matrix_output=half),
        "mixed_float16",
    ),
    PrecisionMode(
        "cube_fp16in_fp32out",
        "inputs and weights of matrix products and convolutions in float16, results and the rest "
        "in float32",
        Arithmetic(weight=half, matrix_input=half),
        "cube_fp16in_fp32out",
    ),
    PrecisionMode(
        "mixed_bfloat16",
        "inputs, weights and results of matrix products and convolutions in bfloat16; the rest in "
        "float32",
        Arithmetic(weight=bfloat16, matrix_input=bfloat16, matrix_output=bfloat16),
        "mixed_bfloat16",
    ),
    PrecisionMode(
        "int8-weights",
        "weights of matrix products and convolutions in int8 with one scale an output channel; "
        "the rest in float32",
        Arithmetic(weight=int8_channels),
        None,
    ),
)
MODES = {mode.name: mode for mode in _MODES}
ALIASES = {"bf16": "mixed_bfloat16", "float16": "fp16", "int8": "int8-weights"}
CANDIDATES = ("fp16", "mixed_float16", "cube_fp16in_fp32out")
"""Modes that may be recommended, fastest first. mixed_bfloat16 is not among them: only some
products have it, and its 8 digits are worth less to a policy than float16's 11."""


@dataclass(frozen=True)
class PrecisionLimits:
    """What a lower precision may change; a mode outside any of them is not recommended."""

    flip_rate: float = 1e-3
    """Share of discrete decisions that come out differently (half with noise, half without)."""
    kl_max: float = 1e-3
    """Of any observation, in nats."""
    kl_mean: float = 1e-4
    action: float = 1e-2
    """Largest change of a continuous action, in units of half its range."""
    returns: float = 0.05
    """Relative change of the mean return, where episodes are played."""


@dataclass
class PrecisionResult:
    """One mode against the unrounded network."""

    mode: PrecisionMode
    rows: int
    flips: int
    decisions: int
    kl_max: float
    kl_mean: float
    max_abs: dict[str, float]
    """Largest difference of each output; of log_prob, value and actions where no action flips."""
    action_error: float
    """Largest change of a continuous action in units of half its range; 0 for discrete kinds."""
    finite: bool
    """Whether every output stayed finite."""
    mean_return: float | None = None
    baseline_mean_return: float | None = None

    @property
    def flip_rate(self) -> float:
        return self.flips / max(self.decisions, 1)

    def violations(self, limits: PrecisionLimits) -> list[str]:
        """Which limits it is outside of."""
        found = [] if self.finite else ["an output overflows"]
        for name, value, limit in (
            ("flips", self.flip_rate, limits.flip_rate),
            ("largest KL", self.kl_max, limits.kl_max),
            ("mean KL", self.kl_mean, limits.kl_mean),
            ("action error", self.action_error, limits.action),
            ("change of return", self.return_change, limits.returns),
        ):
            if value is not None and not value <= limit:
                found.append(f"{name} {value:.2g} > {limit:g}")
        return found

    @property
    def return_change(self) -> float | None:
        """Of the mean, relative to the baseline's (to 1 where that is smaller)."""
        if self.mean_return is None or self.baseline_mean_return is None:
            return None
        scale = max(1.0, abs(self.baseline_mean_return))
        return abs(self.mean_return - self.baseline_mean_return) / scale

    def to_dict(self, limits: PrecisionLimits) -> dict[str, Any]:
        content = {k: v for k, v in vars(self).items() if k != "mode"}
        content = {k: _json_number(v) for k, v in content.items()}
        content["max_abs"] = {k: _json_number(v) for k, v in self.max_abs.items()}
        return {
            "emulates": self.mode.emulates,
            "precision_mode_v2": self.mode.atc,
            "flip_rate": self.flip_rate,
            "violations": self.violations(limits),
            **content,
        }


@dataclass
class PrecisionReport:
    """Every rehearsed mode, and the one to build with."""

    results: dict[str, PrecisionResult]
    limits: PrecisionLimits = field(default_factory=PrecisionLimits)

    @property
    def recommended(self) -> str:
        """Value for `--precision_mode_v2`: the fastest candidate within the limits, or origin."""
        for name in CANDIDATES:
            if name in self.results and not self.results[name].violations(self.limits):
                return name
        return ORIGIN

    @property
    def reason(self) -> str:
        """Why, in one sentence."""
        if self.recommended != ORIGIN:
            rows = self.results[self.recommended].rows
            return f"it is within the limits on {rows:,} rows, and the fastest mode that is"
        tried = [n for n in CANDIDATES if n in self.results]
        if not tried:
            return "no faster mode of ATC was rehearsed"
        reasons = (f"{n}: {', '.join(self.results[n].violations(self.limits))}" for n in tried)
        return "; ".join(reasons)

    def to_dict(self) -> dict[str, Any]:
        return {
            "recommended": self.recommended,
            "reason": self.reason,
            "limits": dict(vars(self.limits)),
            "modes": {name: r.to_dict(self.limits) for name, r in self.results.items()},
        }

    def _rows(self) -> list[list[str]]:
        rows = [["precision", "flips", "largest KL", "mean KL", "action error", "mean return", ""]]
        for name, r in self.results.items():
            discrete = r.decisions > 0
            rows.append(
                [
                    name,
                    f"{r.flips:,} of {r.decisions:,}" if discrete else "",
                    f"{r.kl_max:.1e}",
                    f"{r.kl_mean:.1e}",
                    "" if discrete else f"{r.action_error:.1e}",
                    ""
                    if r.mean_return is None
                    else f"{r.mean_return:.5g} ({r.baseline_mean_return:.5g})",
                    "; ".join(r.violations(self.limits)) or "within limits",
                ]
            )
        return rows

    def __str__(self) -> str:
        rows = self._rows()
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, f"precision_mode_v2: {self.recommended} ({self.reason})"])

    def _repr_html_(self) -> str:
        header, *rows = self._rows()
        verdict = html.render(f"precision_mode_v2: {self.recommended} ({self.reason})")
        return f"{html.table(rows, header)}<p>{verdict}</p>"


def parse_modes(text: str) -> tuple[str, ...]:
    """Comma-separated names of modes, in full or short ('bf16').

    Raises:
        ConfigError: there is no such mode.
    """
    names = []
    for word in filter(None, (w.strip() for w in text.split(","))):
        name = ALIASES.get(word, word)
        if name not in MODES:
            known = ", ".join([*MODES, *ALIASES])
            raise ConfigError(f"precision {word!r} is unknown: choose of {known}")
        names.append(name)
    return tuple(dict.fromkeys(names))


def rehearse_precision(
    spec: PolicySpec,
    arrays: Mapping[str, np.ndarray],
    observations: Observations,
    *,
    activation: str = "tanh",
    observation_clip: float = 10.0,
    modes: Sequence[str] = tuple(MODES),
    config: TrainConfig | None = None,
    episodes: int = 0,
    limits: PrecisionLimits | None = None,
    seed: int = 0,
) -> PrecisionReport:
    """Evaluate a policy in each mode on given observations, half with noise and half without.

    Args:
        arrays: weights and statistics, as `Policy.arrays` gives them.
        observations: [N, ...] each, best recorded in rollouts.
        activation, observation_clip: of the policy's configuration.
        config: of the run, for episodes.
        episodes: whole episodes to play in each mode, deterministic and sampled; 0 for none.
    """

    def network(arithmetic: Arithmetic) -> NumpyPolicy:
        return NumpyPolicy(
            spec,
            arrays,
            activation=activation,
            observation_clip=observation_clip,
            arithmetic=arithmetic,
        )

    baseline = network(Arithmetic())
    played = None
    if episodes and config is not None:
        from msrl_accel.consistency.episodes import play

        played = play(baseline, config, episodes, seed)
    results = {}
    for name in modes:
        mode = MODES[name]
        candidate = network(mode.arithmetic)
        result = _compare(mode, baseline, candidate, observations, seed)
        if played is not None and config is not None:
            result.baseline_mean_return = _mean_return(played)
            result.mean_return = _mean_return(play(candidate, config, episodes, seed))
        results[name] = result
    return PrecisionReport(results, limits or PrecisionLimits())


def _compare(
    mode: PrecisionMode,
    baseline: NumpyPolicy,
    candidate: NumpyPolicy,
    observations: Observations,
    seed: int,
) -> PrecisionResult:
    spec, rng = baseline.spec, np.random.default_rng([seed, 4])
    continuous = spec.action.kind == "continuous"
    comparison = Comparison(spec, spec.output_names, Tolerances())
    rows, finite, action_error = len(observations[0]), True, 0.0
    for start in range(0, rows, CHUNK):
        part = tuple(x[start : start + CHUNK] for x in observations)
        noise = spec.draw_noise(rng, (len(part[0]),))
        noise[::2] = 0.0
        expected, got = baseline.act(part, noise), candidate.act(part, noise)
        comparison.add(expected, got, noise, mode.name)
        finite &= all(np.isfinite(x).all() for x in named(spec, got).values())
        if continuous:
            change = np.abs(expected.action - got.action) / action_range(spec.action)
            action_error = max(action_error, float(np.nan_to_num(change, nan=np.inf).max()))
    return PrecisionResult(
        mode=mode,
        rows=rows,
        flips=comparison.flips.count,
        decisions=comparison.flips.decisions,
        kl_max=comparison.kl_max,
        kl_mean=comparison.kl_mean,
        max_abs={o.name: o.max_abs for o in comparison.outputs.values()},
        action_error=action_error,
        finite=bool(finite),
    )


def _mean_return(episodes: Episodes) -> float:
    return float(np.mean([r.mean() for r in episodes.returns.values()]))


def _json_number(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value
