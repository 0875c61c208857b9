"""Whether generation and training agree on the log-probabilities of what was generated."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from msrl_accel.errors import LMError


class ParityError(LMError):
    """Generation and training disagree by more than the gate allows."""


class Parity(NamedTuple):
    """Log-probabilities of training minus those of generation, over chosen tokens."""

    max: float
    mean: float
    """Of the absolute difference."""
    kl: float
    """Estimate of KL(generation || training): mean of exp(d) - 1 - d."""

    def metrics(self) -> dict[str, float]:
        return {f"parity/{name}": value for name, value in self._asdict().items()}


def parity(log_probs: np.ndarray, rollout_log_probs: np.ndarray, mask: np.ndarray) -> Parity:
    """How far training's log-probabilities [N, L] are from those of generation, where `mask`."""
    d = differences(log_probs, rollout_log_probs, mask)[mask]
    if not d.size:
        return Parity(0.0, 0.0, 0.0)
    with np.errstate(over="ignore"):
        kl = float(np.mean(np.expm1(d) - d))
    return Parity(float(np.abs(d).max()), float(np.abs(d).mean()), kl)


def differences(
    log_probs: np.ndarray, rollout_log_probs: np.ndarray, mask: np.ndarray
) -> np.ndarray:
    """Training's minus generation's, in float64; 0 outside of `mask`, infinite where not finite."""
    ours, theirs = (np.asarray(x, np.float64) for x in (log_probs, rollout_log_probs))
    d = np.where(mask, ours, 0.0) - np.where(mask, theirs, 0.0)
    return np.where(np.isfinite(d), d, np.inf)
