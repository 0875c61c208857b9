"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864): frequencies and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from msrl_accel.lm.config import LMConfig


def inverse_frequencies(config: LMConfig) -> np.ndarray:
    """Radians a position turns each pair of numbers [head_dim / 2], scaling included."""
    d = config.head_dim
    frequencies: np.ndarray = config.rope_theta ** (-np.arange(0, d, 2, dtype=np.float64) / d)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling["rope_type"] == "linear":
        slower: np.ndarray = frequencies / scaling["factor"]
        return slower
    return _llama3_scaled(
        frequencies,
        scaling["factor"],
        scaling["low_freq_factor"],
        scaling["high_freq_factor"],
        scaling["original_max_position_embeddings"],
    )


def _llama3_scaled(
    frequencies: np.ndarray, factor: float, low: float, high: float, length: float
) -> np.ndarray:
    """Llama 3.1: slow frequencies are divided by `factor`, fast ones kept, in between a blend."""
    turns = length * frequencies / (2.0 * np.pi)  # within the original context
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / factor)


def rope_tables(config: LMConfig, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine [positions, head_dim / 2] float32 of positions 0, 1, ..."""
    angles = np.arange(positions, dtype=np.float64)[:, None] * inverse_frequencies(config)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
