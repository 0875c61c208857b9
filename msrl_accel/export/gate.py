"""The parity gate of an export: every exported form against the training graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from msrl_accel.consistency.checker import TOLERANCES
from msrl_accel.consistency.compare import Comparison, Tolerances
from msrl_accel.consistency.observations import Case, make_cases, make_observations
from msrl_accel.errors import MsrlError
from msrl_accel.export.bundle import Bundle
from msrl_accel.runtime.base import ActResult, PolicyRuntime
from msrl_accel.runtime.load import available_backends, open_runtime

BATCHES = (1, 3, 32)
REFERENCE_SEED = 20_000
REFERENCE_ROWS = {"zero": 1, "corner": 15, "random": 48}
"""Observations of each kind in the reference set, one batch together."""

Arrays = dict[str, np.ndarray]


def make_reference(graph: PolicyRuntime, statistics: Arrays, outputs: tuple[str, ...]) -> Arrays:
    """Fixed observations and noises with the training graph's answers; see `Bundle.reference`."""
    spec, rng = graph.spec, np.random.default_rng(REFERENCE_SEED)
    parts = [
        make_observations(spec, kind, rows, rng, statistics=statistics)
        for kind, rows in REFERENCE_ROWS.items()
    ]
    observations = tuple(np.concatenate(arrays) for arrays in zip(*parts))
    noise = spec.draw_noise(rng, (len(observations[0]),))
    arrays = {f"observation/{o.name}": x for o, x in zip(spec.observations, observations)}
    arrays["noise"] = noise
    for mode, given in (("deterministic", np.zeros_like(noise)), ("sampled", noise)):
        answer = graph.act(observations, given).outputs()
        arrays.update({f"{mode}/{name}": x for name, x in zip(outputs, answer)})
    return arrays


def check_parity(graph: PolicyRuntime, bundle: Bundle, statistics: Arrays) -> dict[str, Any]:
    """Compare every form in `bundle` that has an engine here with the training graph.

    Returns:
        For each form `passed` (None where it could not be compared), `problems`, and for each
        output the largest absolute difference and whether all bits are equal.
    """
    cases = [
        *make_cases(bundle.spec, statistics=statistics, batches=BATCHES),
        *_reference_cases(bundle),
    ]
    answers = [(case, graph.act(case.observations, case.noise)) for case in cases]
    usable = available_backends(bundle)
    results: dict[str, Any] = {}
    for backend in bundle.manifest["models"]:
        found, reason = usable[backend]
        if found:
            results[backend] = _compare(bundle, backend, answers)
        else:
            results[backend] = {"passed": None, "problems": [], "reason": reason}
    return results


def _reference_cases(bundle: Bundle) -> list[Case]:
    arrays = bundle.reference()
    observations = tuple(arrays[f"observation/{o.name}"] for o in bundle.spec.observations)
    noise = arrays["noise"]
    return [Case("reference", mode == 0, observations, mode * noise) for mode in (0, 1)]


def _compare(
    bundle: Bundle, backend: str, answers: Iterable[tuple[Case, ActResult]]
) -> dict[str, Any]:
    tolerances = TOLERANCES.get(backend, Tolerances())
    comparison = Comparison(bundle.spec, bundle.output_names, tolerances)
    try:
        runtime = open_runtime(bundle, backend)
        for case, expected in answers:
            got = runtime.act(case.observations, case.noise)
            comparison.add(expected, got, case.noise, str(case))
        runtime.close()
    except (MsrlError, ValueError) as error:  # refused by the engine, or shapes that differ
        return {"passed": False, "problems": [str(error)]}
    problems = comparison.problems()
    return {
        "passed": not problems,
        "problems": problems,
        "flips": comparison.flips.to_dict(),
        "outputs": {
            name: {k: o.to_dict()[k] for k in ("max_abs", "bit_equal")}
            for name, o in comparison.outputs.items()
        },
    }
