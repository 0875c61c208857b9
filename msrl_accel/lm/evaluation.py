"""What a language model reaches on held-out problems: mean reward, accuracy, pass@k."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from msrl_accel.envs.text import Score
from msrl_accel.evaluation import Evaluation


@dataclass
class TextEvaluation(Evaluation):
    """Completions of held-out problems: their rewards are the returns, their tokens the lengths.

    Completions that no verifier could score are left out of `returns` and `lengths`.
    """

    right: np.ndarray
    """[problems, samples] bool: right by the first reward of the formula; unscored ones are not."""
    failed: int
    """Completions without a reward, because a verifier failed."""
    problem_means: np.ndarray
    """[problems] mean reward of each problem's scored completions; NaN where none was scored."""

    @property
    def accuracy(self) -> float:
        """Share of right completions."""
        return float(self.right.mean())

    @property
    def ci95(self) -> float:
        """Half the width of the 95 % confidence interval of the mean reward, over problems."""
        means = self.problem_means[np.isfinite(self.problem_means)]
        return float(1.96 * means.std(ddof=1) / np.sqrt(means.size)) if means.size > 1 else np.inf

    def pass_at(self, k: int) -> float:
        """Mean probability that at least one of k completions of a problem is right."""
        n = self.right.shape[1]
        return float(np.mean([pass_at_k(n, int(right), k) for right in self.right.sum(axis=1)]))

    def pass_rates(self) -> dict[int, float]:
        """pass@k for 1, 2, 4, ... and the number of samples."""
        n = self.right.shape[1]
        ks = sorted({*(2**i for i in range(n.bit_length()) if 2**i <= n), n})
        return {k: self.pass_at(k) for k in ks}

    def to_dict(self) -> dict[str, Any]:
        rates = self.pass_rates()
        return {
            **super().to_dict(),
            "problems": len(self.right),
            "accuracy": self.accuracy,
            "return_ci95": self.ci95,
            **({} if self.deterministic else {f"pass@{k}": rate for k, rate in rates.items()}),
            "failed": self.failed,
        }

    def __str__(self) -> str:
        problems = f"{len(self.right)} held-out problems"
        if self.deterministic:
            text = f"{self.accuracy:.1%} right of {problems}"
        else:
            rates = ", ".join(f"pass@{k} {rate:.1%}" for k, rate in self.pass_rates().items())
            text = f"{rates} of {problems}"
        text += f", mean reward {self.mean:.3f} +- {self.ci95:.3f}"
        return text + (f" ({self.failed} completions could not be scored)" if self.failed else "")


def text_evaluation(
    scores: Sequence[Score], lengths: np.ndarray, samples: int, deterministic: bool
) -> TextEvaluation:
    """The evaluation of `samples` consecutive completions of each problem."""
    rewards = rewards_of(scores)
    scored = np.isfinite(rewards)
    return TextEvaluation(
        returns=rewards[scored],
        lengths=np.asarray(lengths, np.int64)[scored],
        deterministic=deterministic,
        right=right_completions(scores).reshape(-1, samples),
        failed=int((~scored).sum()),
        problem_means=_problem_means(rewards.reshape(-1, samples)),
    )


def _problem_means(rewards: np.ndarray) -> np.ndarray:
    scored = np.isfinite(rewards)
    sums = np.where(scored, rewards, 0.0).sum(axis=1)
    counts = scored.sum(axis=1)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def rewards_of(scores: Sequence[Score]) -> np.ndarray:
    """Rewards [N] float64; NaN where a verifier failed."""
    return np.array([np.nan if s.value is None else s.value for s in scores], np.float64)


def right_completions(scores: Sequence[Score]) -> np.ndarray:
    """Which completions are right [N]: the first reward of their formula is at least 1."""
    first = [next(iter(score.parts.values()), None) for score in scores]
    return np.array([value is not None and value >= 1 for value in first], bool)


def pass_at_k(n: int, right: int, k: int) -> float:
    """Unbiased 1 - C(n - right, k) / C(n, k) of n samples (Chen et al. 2021, arXiv:2107.03374)."""
    if n - right < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - right + 1, n + 1)))
