"""Results that do not depend on the batch a row came in, bit for bit.

Matrix products of different sizes sum in different orders: the same observation gives other last
bits alone than in a batch of 32. Here every call is made of calls of a few sizes, measured to give
each row the same bits at every size and at every place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from msrl_accel.errors import PolicyError
from msrl_accel.runtime.base import ActResult, PolicyRuntime, check_inputs, pad_rows
from msrl_accel.spaces import Observations

TILES = (256, 128, 64, 32, 16, 8, 4, 2, 1)
"""Batch sizes that are tried, largest first. On CPU, rows of MindSpore agree from 16 to 256 rows on
(64-wide layers), from 16 to 128 (256-wide) or from 128 to 256 (512-wide); of Lite from 8 on; of
onnxruntime from 1 or 2 on."""
_ROTATIONS = (0, 3, 13)


class BatchInvariantRuntime:
    """Another runtime, called only at batch sizes that give every row the same bits.

    A call is padded to the next such size; a larger one is split into calls of the largest.

    Args:
        runtime: any engine; `close` closes it.
        tiles: the batch sizes; None measures them (a few calls of 256 rows).
        seed: of the observations that are measured with.

    Raises:
        PolicyError: no batch size gives a row the same bits at every place.
    """

    def __init__(
        self, runtime: PolicyRuntime, *, tiles: Sequence[int] | None = None, seed: int = 0
    ) -> None:
        self.runtime = runtime
        self.spec = runtime.spec
        self.version = runtime.version
        self.tiles = tuple(sorted(tiles)) if tiles else measure_tiles(runtime, seed=seed)

    def load_weights(self, version: int, arrays: Mapping[str, np.ndarray]) -> None:
        self.runtime.load_weights(version, arrays)
        self.version = version

    def act(self, observations: Observations, noise: np.ndarray) -> ActResult:
        observations = check_inputs(self.spec, observations, noise)
        largest, n = self.tiles[-1], len(noise)
        if n == 0:
            raise PolicyError("the batch is empty; give at least one observation")
        parts = []
        for start in range(0, n, largest):
            rows = slice(start, min(start + largest, n))
            parts.append(self._act_tile(tuple(x[rows] for x in observations), noise[rows]))
        return parts[0] if len(parts) == 1 else _join(parts)

    def close(self) -> None:
        self.runtime.close()

    def _act_tile(self, observations: Observations, noise: np.ndarray) -> ActResult:
        n = len(noise)
        tile = next(t for t in self.tiles if t >= n)
        if tile == n:
            return self.runtime.act(observations, noise)
        padded = tuple(pad_rows(x, tile) for x in observations)
        return _rows(self.runtime.act(padded, pad_rows(noise, tile)), n)


def measure_tiles(
    runtime: PolicyRuntime, candidates: Sequence[int] = TILES, *, seed: int = 0
) -> tuple[int, ...]:
    """Batch sizes at which a row has the same bits, wherever it stands; ascending.

    Neighbouring candidates that agree on random rows form a group. The first group of two or more
    is taken, from the largest sizes down; where there is none, the largest size on its own.

    Raises:
        PolicyError: a row's bits depend on its place at every size.
    """
    ordered = sorted(candidates, reverse=True)
    rows = _random_rows(runtime, ordered[0], seed)
    groups: list[list[int]] = []
    reference: ActResult | None = None
    for tile in ordered:
        result = _rotated(runtime, *rows, 1, tile)
        if reference is not None and _same(reference, result):
            groups[-1].append(tile)
            continue
        if groups and len(groups[-1]) > 1:
            break
        fixed = all(_same(result, _rotated(runtime, *rows, by, tile)) for by in _ROTATIONS)
        reference = result if fixed else None
        groups += [[tile]] if fixed else []
    if not groups:
        raise PolicyError(
            f"{type(runtime).__name__} gives a row other bits at every place of a batch"
        )
    best: list[int] = max(groups, key=len)
    return tuple(sorted(best))


def _rotated(
    runtime: PolicyRuntime, observations: Observations, noise: np.ndarray, by: int, tile: int
) -> ActResult:
    """Results of the rows in calls of `tile` rows, each row moved by `by` places and moved back."""
    moved = tuple(np.roll(x, by, axis=0) for x in observations)
    moved_noise = np.roll(noise, by, axis=0)
    parts = [
        runtime.act(tuple(x[s : s + tile] for x in moved), moved_noise[s : s + tile])
        for s in range(0, len(noise), tile)
    ]
    joined = _join(parts)
    return _each_row(joined, lambda x: np.roll(x, -by, axis=0))


def _random_rows(runtime: PolicyRuntime, n: int, seed: int) -> tuple[Observations, np.ndarray]:
    rng = np.random.default_rng(seed)
    spec = runtime.spec
    observations = tuple(
        rng.integers(0, 256, (n, *o.shape)).astype(np.uint8)
        if o.dtype == "uint8"
        else rng.standard_normal((n, *o.shape), dtype=np.float32)
        for o in spec.observations
    )
    return observations, spec.draw_noise(rng, (n,))


def _each_row(result: ActResult, change: Callable[[np.ndarray], np.ndarray]) -> ActResult:
    """Apply `change` to every output that has rows; a log_std may have none."""
    return replace(
        result,
        action=change(result.action),
        log_prob=change(result.log_prob),
        value=None if result.value is None else change(result.value),
        raw_action=change(result.raw_action),
        parameters=tuple(change(x) if x.ndim > 1 else x for x in result.parameters),
    )


def _rows(result: ActResult, n: int) -> ActResult:
    return _each_row(result, lambda x: x[:n])


def _join(parts: Sequence[ActResult]) -> ActResult:
    values = [p.value for p in parts if p.value is not None]
    return ActResult(
        action=np.concatenate([p.action for p in parts]),
        log_prob=np.concatenate([p.log_prob for p in parts]),
        value=np.concatenate(values) if values else None,
        raw_action=np.concatenate([p.raw_action for p in parts]),
        parameters=tuple(
            np.concatenate(outputs) if outputs[0].ndim > 1 else outputs[0]
            for outputs in zip(*(p.parameters for p in parts))
        ),
    )


def _same(a: ActResult, b: ActResult) -> bool:
    pairs = zip(a.outputs(), b.outputs())
    return all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in pairs)
