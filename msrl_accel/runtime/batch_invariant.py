"""Results that do not depend on the batch a row came in, bit for bit.

Matrix products of different sizes sum in different orders: the same observation gives other last
bits alone than in a batch of 32. Here every call is made of calls of a few sizes, measured to give
each row the same bits at every size and at every place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from msrl_accel.errors import PolicyError
from msrl_accel.runtime.base import ActResult, PolicyRuntime, check_inputs, pad_rows
from msrl_accel.spaces import Observations

TILES = (256, 128, 64, 32, 16, 8, 4, 2, 1)
"""Batch sizes that are tried, largest first. On CPU, MindSpore and Lite agree with the largest
from 32 rows on (64- and 256-wide layers) or 128 (512-wide); onnxruntime depends on the width too,
and single rows often take another path."""
_ROTATIONS = (1, 3, 13)


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

    The largest candidate whose rows do not depend on their place is the reference; smaller ones are
    taken as long as they agree with it on random rows.

    Raises:
        PolicyError: there is none.
    """
    ordered = sorted(candidates, reverse=True)
    observations, noise = _random_rows(runtime, ordered[0], seed)
    for i, largest in enumerate(ordered):
        rows = tuple(x[:largest] for x in observations)
        reference = runtime.act(rows, noise[:largest])
        if all(
            _same(reference, _rotated(runtime, rows, noise[:largest], k, largest))
            for k in _ROTATIONS
        ):
            tiles = [largest]
            for tile in ordered[i + 1 :]:
                if not _same(reference, _rotated(runtime, rows, noise[:largest], 1, tile)):
                    break
                tiles.append(tile)
            return tuple(reversed(tiles))
    raise PolicyError(f"{type(runtime).__name__} gives a row other bits at every place of a batch")


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
    """Apply `change` to every output that has a row for each observation (log_std has none)."""
    action, log_prob, value, raw = (change(x) for x in _fixed(result))
    parameters = tuple(change(x) if x.ndim > 1 else x for x in result.parameters)
    return ActResult(action, log_prob, value, raw, parameters)


def _rows(result: ActResult, n: int) -> ActResult:
    return _each_row(result, lambda x: x[:n])


def _fixed(result: ActResult) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return result.action, result.log_prob, result.value, result.raw_action


def _join(parts: Sequence[ActResult]) -> ActResult:
    action, log_prob, value, raw = (
        np.concatenate(outputs) for outputs in zip(*(_fixed(p) for p in parts))
    )
    parameters = tuple(
        np.concatenate(outputs) if outputs[0].ndim > 1 else outputs[0]
        for outputs in zip(*(p.parameters for p in parts))
    )
    return ActResult(action, log_prob, value, raw, parameters)


def _same(a: ActResult, b: ActResult) -> bool:
    pairs = [*zip(_fixed(a), _fixed(b)), *zip(a.parameters, b.parameters)]
    return all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in pairs)
