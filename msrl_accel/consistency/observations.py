"""The observations and noises that policies are compared on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from msrl_accel.runtime.base import check_inputs
from msrl_accel.spaces import Observations, ObservationSpec, PolicySpec

BATCHES = (1, 3, 32, 256)
"""Batch sizes that every kind of observation is compared at."""
CHUNK = 256
"""Rows of one call when many recorded observations are compared."""
REACH = 10.0
"""Where an observation has no finite bound, it is taken to lie within this many standard
deviations of its mean (as the policy normalises it), or within +- this without statistics."""

OPEN = 1e30
"""A bound this far off, or further, is none."""


@dataclass
class Case:
    """One call that every backend answers."""

    kind: str
    """'zero', 'corner', 'random' or 'recorded'."""
    deterministic: bool
    observations: Observations
    noise: np.ndarray

    @property
    def batch(self) -> int:
        return len(self.noise)

    def __str__(self) -> str:
        mode = "deterministic" if self.deterministic else "fixed noise"
        return f"{self.kind} observations, batch {self.batch}, {mode}"


def make_observations(
    spec: PolicySpec,
    kind: str,
    n: int,
    rng: np.random.Generator,
    *,
    statistics: Mapping[str, np.ndarray] | None = None,
) -> Observations:
    """`n` observations of a kind that needs no environment.

    Args:
        kind: 'zero'; 'corner', every component at one of its bounds (the first two rows hold all
            lowest and all highest); 'random', uniform between the bounds.
        statistics: weights of the policy, for the reach of unbounded components.
    """
    return tuple(
        _observation(o, kind, n, rng, *finite_bounds(o, statistics)) for o in spec.observations
    )


def _observation(
    o: ObservationSpec,
    kind: str,
    n: int,
    rng: np.random.Generator,
    low: np.ndarray,
    high: np.ndarray,
) -> np.ndarray:
    shape = (n, *o.shape)
    if kind == "zero":
        return np.zeros(shape, o.dtype)
    if kind == "corner":
        upper = rng.random(shape) < 0.5
        upper[:1], upper[1:2] = False, True
        return np.where(upper, high, low).astype(o.dtype)
    if o.dtype == "uint8":
        return rng.integers(low, high.astype(np.int64) + 1, shape).astype(np.uint8)
    return rng.uniform(low, high, shape).astype(np.float32)


def finite_bounds(
    o: ObservationSpec, statistics: Mapping[str, np.ndarray] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest value of each component; see `REACH` for components without one."""
    if o.dtype == "uint8":
        return np.zeros(o.shape), np.full(o.shape, 255.0)
    statistics = statistics or {}
    mean = np.asarray(statistics.get(f"normalizer.{o.name}.mean", np.zeros(o.size)))
    inverse_std = np.asarray(statistics.get(f"normalizer.{o.name}.inverse_std", np.ones(o.size)))
    # A component that never varied has a huge inverse standard deviation, never a zero one.
    reach = (REACH / inverse_std.astype(np.float64)).reshape(o.shape)
    mean = mean.reshape(o.shape)
    low, high = o.bounds
    # Gymnasium environments write the largest float32 for "no bound".
    return (
        np.where(np.abs(low) < OPEN, low, mean - reach),
        np.where(np.abs(high) < OPEN, high, mean + reach),
    )


def make_cases(
    spec: PolicySpec,
    *,
    recorded: Observations | None = None,
    statistics: Mapping[str, np.ndarray] | None = None,
    batches: tuple[int, ...] = BATCHES,
    seed: int = 0,
) -> Iterator[Case]:
    """Every kind of observation at every batch size, deterministic and with fixed noise.

    All of the recorded observations follow in batches of `CHUNK` with fixed noise, beyond those in
    the batch sizes.

    Args:
        recorded: observations of a rollout, [N, ...] each; None leaves the kind out.
    """
    rng = np.random.default_rng([seed, 1])
    rows = max(batches)
    sources = {
        kind: make_observations(spec, kind, rows, rng, statistics=statistics)
        for kind in ("zero", "corner", "random")
    }
    if recorded is not None:
        recorded = check_inputs(spec, recorded)
        sources["recorded"] = repeat_rows(recorded, rows)
    for kind, observations in sources.items():
        noise = spec.draw_noise(rng, (rows,))
        for batch in batches:
            part = tuple(x[:batch] for x in observations)
            yield Case(kind, True, part, spec.zero_noise((batch,)))
            yield Case(kind, False, part, noise[:batch])
    if recorded is not None:
        for start in range(rows, len(recorded[0]) - CHUNK + 1, CHUNK):
            part = tuple(x[start : start + CHUNK] for x in recorded)
            yield Case("recorded", False, part, spec.draw_noise(rng, (CHUNK,)))


def repeat_rows(observations: Observations, n: int) -> Observations:
    """The first `n` rows, over and over where there are fewer."""
    index = np.arange(n) % len(observations[0])
    return tuple(x[index] for x in observations)
