"""A test of the checker: small damage to a policy must be seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from msrl_accel.consistency.compare import Comparison, Tolerances
from msrl_accel.consistency.observations import Case
from msrl_accel.errors import PolicyError
from msrl_accel.runtime.base import ActResult, PolicyRuntime
from msrl_accel.spaces import Observations, PolicySpec

WEIGHT_STEP = 1e-2
"""Added to one weight."""
NORMALIZER_STEP = 0.1
"""Added to one mean, in standard deviations."""

Swap = Callable[[Observations], Observations]


@dataclass
class DriftResult:
    """Whether the checker saw one perturbation."""

    name: str
    caught: bool
    excess: float
    """Largest difference divided by what the tolerance allows."""

    def to_dict(self) -> dict[str, Any]:
        excess = self.excess if np.isfinite(self.excess) else str(self.excess)
        return {"name": self.name, "caught": self.caught, "excess": excess}

    def __str__(self) -> str:
        return f"drift not caught: {self.name}"


class SwappedRuntime:
    """Another runtime whose observations arrive with two components or entries exchanged."""

    def __init__(self, runtime: PolicyRuntime, swap: Swap) -> None:
        self.runtime = runtime
        self.swap = swap
        self.spec = runtime.spec
        self.version = runtime.version

    def load_weights(self, version: int, arrays: Mapping[str, np.ndarray]) -> None:
        self.runtime.load_weights(version, arrays)

    def act(self, observations: Observations, noise: np.ndarray) -> ActResult:
        return self.runtime.act(self.swap(observations), noise)

    def close(self) -> None:
        self.runtime.close()


def drift_test(
    runtime: PolicyRuntime,
    arrays: Mapping[str, np.ndarray],
    answers: Sequence[tuple[Case, ActResult]],
    tolerances: Tolerances,
) -> list[DriftResult]:
    """Perturb one weight, one normaliser entry and one pair of inputs, each on its own.

    Args:
        runtime: is given its own weights back in the end; one that cannot take others is only
            tested with other inputs.
        arrays: the weights it has.
        answers: calls and what the baseline gave.
    """
    results = []
    for name, damaged in (damaged_weights(arrays) if _takes(runtime, arrays) else {}).items():
        try:
            runtime.load_weights(runtime.version, damaged)
            results.append(_judge(name, runtime, answers, tolerances))
        finally:
            runtime.load_weights(runtime.version, arrays)
    for name, swap in swaps(runtime.spec).items():
        swapped = SwappedRuntime(runtime, swap)
        results.append(_judge(name, swapped, answers, tolerances))
    return results


def _takes(runtime: PolicyRuntime, arrays: Mapping[str, np.ndarray]) -> bool:
    """Whether the engine can be given weights: those of a compiled file are fixed."""
    try:
        runtime.load_weights(runtime.version, arrays)
    except PolicyError:
        return False
    return True


def _judge(
    name: str,
    runtime: PolicyRuntime,
    answers: Sequence[tuple[Case, ActResult]],
    tolerances: Tolerances,
) -> DriftResult:
    comparison = Comparison(runtime.spec, runtime.spec.output_names, tolerances)
    for case, expected in answers:
        got = runtime.act(case.observations, case.noise)
        comparison.add(expected, got, case.noise, str(case))
    excess = max(o.excess for o in comparison.outputs.values())
    return DriftResult(name, bool(comparison.problems()), excess)


def damaged_weights(arrays: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Copies of the weights with one number changed each, by what was changed."""
    damaged = {"one weight (actor.weight)": _changed(arrays, "actor.weight", WEIGHT_STEP)}
    for name in sorted(arrays):
        if name.startswith("normalizer.") and name.endswith(".mean"):
            inverse_std = np.ravel(arrays[name.replace(".mean", ".inverse_std")])[0]
            label = f"one normaliser entry ({name})"
            damaged[label] = _changed(arrays, name, NORMALIZER_STEP / float(inverse_std))
            break
    return damaged


def _changed(arrays: Mapping[str, np.ndarray], name: str, step: float) -> dict[str, np.ndarray]:
    copy = {k: np.array(v) for k, v in arrays.items()}
    copy[name].flat[0] += step
    return copy


def swaps(spec: PolicySpec) -> dict[str, Swap]:
    """Exchanges of inputs that a wrong export could make: two components, two Dict entries."""
    found: dict[str, Swap] = {}
    for i, o in enumerate(spec.observations):
        if o.size > 1:
            found[f"two components of {o.name} exchanged"] = _component_swap(i, o.size)
            break
    for i, a in enumerate(spec.observations):
        for j, b in enumerate(spec.observations[:i]):
            if (a.shape, a.dtype) == (b.shape, b.dtype):
                return {**found, f"{b.name} and {a.name} exchanged": _entry_swap(j, i)}
    return found


def _component_swap(entry: int, size: int) -> Swap:
    def swap(observations: Observations) -> Observations:
        x = observations[entry]
        flat = np.array(x).reshape(len(x), size)
        flat[:, [0, size - 1]] = flat[:, [size - 1, 0]]
        return (*observations[:entry], flat.reshape(x.shape), *observations[entry + 1 :])

    return swap


def _entry_swap(i: int, j: int) -> Swap:
    def swap(observations: Observations) -> Observations:
        swapped = list(observations)
        swapped[i], swapped[j] = swapped[j], swapped[i]
        return tuple(swapped)

    return swap
