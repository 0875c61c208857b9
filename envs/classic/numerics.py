"""Arithmetic that gives the bits NumPy scalars give, on arrays.

Gymnasium computes on NumPy scalars. Sums, products, sin and cos of arrays agree with them; powers
do not, because arrays take a shortcut for squares while scalars call the C library's pow.
"""

from __future__ import annotations

from typing import Any

import numpy as np

WEAK_PYTHON_NUMBERS = (np.float32(1) * 1.5).dtype == np.float32
"""Whether a float32 scalar stays float32 beside a Python number (NumPy 2) or widens (NumPy 1)."""

SCALAR_FLOAT: Any = np.float32 if WEAK_PYTHON_NUMBERS else np.float64


def scalar_square(values: np.ndarray) -> np.ndarray:
    """`x ** 2` of each float64 scalar x: `float_power` calls the C library for each element."""
    result: np.ndarray = np.float_power(values, 2.0)
    return result


def scalar_square32(values: np.ndarray) -> np.ndarray:
    """`x ** 2` of each float32 scalar x: float32 in NumPy 2, exact in float64 in NumPy 1.

    The C library's powf errs by a small part of a unit in the last place, so it can differ from
    the correctly rounded product only where the exact square lies close to halfway between two
    float32 numbers; those few are computed as scalars.
    """
    exact = values.astype(np.float64)
    exact *= exact
    if not WEAK_PYTHON_NUMBERS:
        return exact
    squares = exact.astype(np.float32)
    doubtful = np.abs(exact - squares) > 0.48 * np.spacing(squares)
    for index in np.flatnonzero(doubtful):
        squares[index] = values[index] ** 2
    return squares
