"""Shuffled, padded minibatches of rows, laid out for a compiled loop of fixed shapes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from msrl_accel.parallel.world import world


@dataclass
class Minibatches:
    """All minibatches of one update, in order."""

    rows: np.ndarray
    """Row numbers [I, B] int32; padding repeats row 0 with weight 0."""
    weights: np.ndarray
    """Those of real rows, of sum 1 in each minibatch, and 0 on padding; [I, B] float32. Where
    several processes train together, of mean 1 over their parts of a minibatch."""
    count: int
    """Minibatches in use; the rest, up to the fixed capacity I, is padding."""


def n_minibatches(n_rows: int, batch_size: int, n_epochs: int) -> int:
    return n_epochs * -(-n_rows // batch_size)


def make_minibatches(
    rng: np.random.Generator,
    usable: np.ndarray,
    batch_size: int,
    n_epochs: int,
    row_weights: np.ndarray | None = None,
) -> Minibatches:
    """Draw a new permutation of the usable rows for each epoch and cut it into minibatches.

    Args:
        usable: which of the R rows may be used, [R] bool.
        row_weights: what each row counts within its minibatch, [R]; rows of weight 0 are left
            out. None: all the same.
    """
    if row_weights is not None:
        usable = usable & (row_weights > 0)
    usable_rows = np.flatnonzero(usable).astype(np.int32)
    processes = world()
    # All take as many steps together, also those with fewer usable rows.
    per_epoch = processes.max(n_minibatches(len(usable_rows), batch_size, 1))
    capacity = n_minibatches(len(usable), batch_size, n_epochs)
    rows = np.zeros((capacity, batch_size), np.int32)
    weights = np.zeros((capacity, batch_size), np.float32)
    for epoch in range(n_epochs):
        shuffled = rng.permutation(usable_rows)
        for i in range(per_epoch):
            part = shuffled[i * batch_size : (i + 1) * batch_size]
            rows[epoch * per_epoch + i, : len(part)] = part
            weights[epoch * per_epoch + i, : len(part)] = 1.0 / max(len(part), 1)
    if row_weights is not None:
        weights *= row_weights[rows]
        weights /= np.maximum(weights.sum(axis=1, keepdims=True), np.finfo(np.float32).tiny)
    if processes.size > 1:
        weights = _weigh_together(rows, weights, row_weights)
    return Minibatches(rows, weights, n_epochs * per_epoch)


def _weigh_together(
    rows: np.ndarray, weights: np.ndarray, row_weights: np.ndarray | None
) -> np.ndarray:
    """Weights whose gradients, averaged over the processes, are those of the whole minibatch."""
    counted = (weights > 0) * (1.0 if row_weights is None else row_weights[rows])
    mass = world().sum(counted.sum(axis=1, keepdims=True))
    shares: np.ndarray = world().size * counted / np.maximum(mass, np.finfo(np.float32).tiny)
    return shares.astype(np.float32)


def standardize(advantages: np.ndarray, batches: Minibatches) -> np.ndarray:
    """Advantages [R] -> [I, B], each minibatch shifted and scaled to mean 0 and unbiased std 1.

    A minibatch of one real row is left as it is: it has no standard deviation. Where several
    processes train together, their parts of a minibatch are shifted and scaled as one.
    """
    total = world().sum
    values = advantages[batches.rows].astype(np.float64)
    real = batches.weights > 0
    n = total(real.sum(axis=1, keepdims=True))
    # Not by the float32 weights: their rounding times a large mean would be of the spread's order.
    mean = total(np.where(real, values, 0.0).sum(axis=1, keepdims=True)) / np.maximum(n, 1)
    centred = np.where(real, values - mean, 0.0)
    variance = total((centred**2).sum(axis=1, keepdims=True)) / np.maximum(n - 1, 1)
    scaled: np.ndarray = centred / (np.sqrt(variance) + 1e-8)
    return np.where(n > 1, scaled, values).astype(np.float32)
