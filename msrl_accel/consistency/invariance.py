"""Does a row's result depend on the batch it came in, and what does it cost that it does not?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from msrl_accel.runtime.base import ActResult, PolicyRuntime
from msrl_accel.spaces import Observations

ROWS = 10_000
LARGEST_BATCH = 256


@dataclass
class InvarianceResult:
    """Rows that gave more than one result when they came in other batches."""

    rows: int
    changed: int
    """Rows with more than one result."""
    passes: int
    """Times every row was evaluated, each time in another order and other batches."""
    tiles: tuple[int, ...] = ()
    """Batch sizes that the engine was called with; empty where it took the batches as they came."""

    @property
    def ok(self) -> bool:
        return self.changed == 0

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **vars(self), "tiles": list(self.tiles)}

    def __str__(self) -> str:
        if self.ok:
            return (
                f"batch-invariant: one result for each of {self.rows:,} rows (tiles {self.tiles})"
            )
        return f"{self.changed:,} of {self.rows:,} rows depend on the batch they come in"


def check_batch_invariance(
    runtime: PolicyRuntime,
    observations: Observations,
    noise: np.ndarray,
    *,
    passes: int = 2,
    largest: int = LARGEST_BATCH,
    seed: int = 0,
) -> InvarianceResult:
    """Evaluate every row in random batches of 1 to `largest`, `passes` times in random order.

    Args:
        observations: [N, ...] each; noise: [N, noise_size].
    """
    rng = np.random.default_rng([seed, 3])
    n = len(noise)
    results = [
        _shuffled_bits(runtime, observations, noise, largest, rng) for _ in range(max(passes, 2))
    ]
    changed = np.zeros(n, bool)
    for other in results[1:]:
        changed |= (other != results[0]).any(axis=1)
    return InvarianceResult(n, int(changed.sum()), len(results), getattr(runtime, "tiles", ()))


def _shuffled_bits(
    runtime: PolicyRuntime,
    observations: Observations,
    noise: np.ndarray,
    largest: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Bits [N, bytes] of every row's outputs, evaluated in a random order and random batches."""
    n = len(noise)
    order = rng.permutation(n)
    bits: np.ndarray | None = None
    start = 0
    while start < n:
        rows = order[start : start + int(rng.integers(1, largest + 1))]
        got = _bits(runtime.act(tuple(x[rows] for x in observations), noise[rows]))
        if bits is None:
            bits = np.zeros((n, got.shape[1]), np.uint8)
        bits[rows] = got
        start += len(rows)
    assert bits is not None
    return bits


def _bits(result: ActResult) -> np.ndarray:
    rows = len(result.log_prob)
    with_rows = tuple(x for x in result.parameters if x.ndim > 1)
    outputs = replace(result, parameters=with_rows).outputs()
    return np.concatenate(
        [
            np.ascontiguousarray(x).reshape(rows, -1).view(np.uint8).reshape(rows, -1)
            for x in outputs
        ],
        axis=1,
    )


def measure_cost(
    plain: PolicyRuntime,
    invariant: PolicyRuntime,
    batches: Sequence[int] = (1, 32, 256),
    *,
    calls: int = 200,
    seed: int = 0,
) -> dict[int, tuple[float, float]]:
    """Median microseconds of a call, plain and batch-invariant, by batch size."""
    from msrl_accel.consistency.observations import make_observations

    rng = np.random.default_rng(seed)
    cost = {}
    for batch in batches:
        observations = make_observations(plain.spec, "random", batch, rng)
        noise = plain.spec.draw_noise(rng, (batch,))
        cost[batch] = (
            _median_us(plain, observations, noise, calls),
            _median_us(invariant, observations, noise, calls),
        )
    return cost


def _median_us(
    runtime: PolicyRuntime, observations: Observations, noise: np.ndarray, calls: int
) -> float:
    for _ in range(max(calls // 10, 2)):
        runtime.act(observations, noise)
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        runtime.act(observations, noise)
        seconds.append(time.perf_counter() - start)
    return 1e6 * float(np.median(seconds))
