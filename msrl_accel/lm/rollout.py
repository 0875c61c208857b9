"""Problems in, scored completions out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from msrl_accel.envs.text import Problem, Score, Scorer, describe_failures
from msrl_accel.errors import EnvError
from msrl_accel.lm.evaluation import TextEvaluation, rewards_of, text_evaluation
from msrl_accel.lm.generation import Completions, CompletionSampler
from msrl_accel.lm.packing import Sequences
from msrl_accel.lm.prompts import PromptEncoder


@dataclass
class Rollout:
    """Groups of completions, one group a problem, and what they are worth."""

    problems: list[Problem]
    prompts: list[np.ndarray]
    completions: Completions
    texts: list[str]
    scores: list[Score]
    """Of each completion, as `texts`."""

    @property
    def n(self) -> int:
        """Completions."""
        return len(self.texts)

    @property
    def mask(self) -> np.ndarray:
        """Tokens the model chose [N, L]."""
        tokens = self.completions.tokens
        mask: np.ndarray = np.arange(tokens.shape[1]) < self.completions.lengths[:, None]
        return mask

    @property
    def rewards(self) -> np.ndarray:
        """[N] float64; NaN where a verifier failed."""
        return rewards_of(self.scores)

    @property
    def asked(self) -> list[Problem]:
        """The problem of each completion."""
        return [self.problems[i] for i in self.completions.prompt_index]

    def sequences(self) -> Sequences:
        c = self.completions
        return Sequences(self.prompts, c.prompt_index, c.tokens, c.lengths, self.mask)


class Roller:
    """Asks a model for completions, and the verifiers what they are worth.

    Args:
        generator: of the model.
        encoder: of its prompts.
        scorer: of the task.
        temperature, top_k, top_p: how tokens are sampled.
    """

    def __init__(
        self,
        generator: CompletionSampler,
        encoder: PromptEncoder,
        scorer: Scorer,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
    ) -> None:
        self.generator, self.encoder, self.scorer = generator, encoder, scorer
        self.sampling: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}

    def roll(
        self, problems: Sequence[Problem], group_size: int, rng: np.random.Generator | None
    ) -> Rollout:
        """`group_size` completions of each problem, sampled with noise from `rng`; None: greedy."""
        prompts = [self.encoder.prompt(problem) for problem in problems]
        completions = self.generator.generate(
            prompts, group_size, rng, eos_ids=self.encoder.tokenizer.eos_ids, **self.sampling
        )
        return self.judge(list(problems), prompts, completions)

    def judge(
        self, problems: list[Problem], prompts: list[np.ndarray], completions: Completions
    ) -> Rollout:
        """The verifiers' scores of completions, wherever they were generated."""
        texts = [
            self.encoder.tokenizer.decode(tokens[:length])
            for tokens, length in zip(completions.tokens, completions.lengths)
        ]
        asked = [problems[i] for i in completions.prompt_index]
        return Rollout(problems, prompts, completions, texts, self.scorer.score(asked, texts))


def select(rollout: Rollout, groups: np.ndarray) -> Rollout:
    """The groups of some problems, in their order; `groups` are indices of problems."""
    groups = np.flatnonzero(np.isin(np.arange(len(rollout.problems)), groups))
    c = rollout.completions
    rows = np.flatnonzero(np.isin(c.prompt_index, groups))
    completions = replace(
        c,
        tokens=c.tokens[rows],
        lengths=c.lengths[rows],
        log_probs=c.log_probs[rows],
        stop=c.stop[rows],
        prompt_index=np.searchsorted(groups, c.prompt_index[rows]).astype(np.int32),
        kept=None if c.kept is None else c.kept[rows],
        versions=None if c.versions is None else c.versions[rows],
    )
    return Rollout(
        [rollout.problems[i] for i in groups],
        [rollout.prompts[i] for i in groups],
        completions,
        [rollout.texts[i] for i in rows],
        [rollout.scores[i] for i in rows],
    )


def join(rollouts: Sequence[Rollout]) -> Rollout:
    """Several rollouts of one version of the weights as one."""
    if len(rollouts) == 1:
        return rollouts[0]
    parts = [r.completions for r in rollouts]
    longest = max(c.tokens.shape[1] for c in parts)
    first = np.cumsum([0, *(len(r.problems) for r in rollouts)])

    def padded(name: str) -> np.ndarray:
        arrays = [getattr(c, name) for c in parts]
        widths = [((0, 0), (0, longest - a.shape[1]), *[(0, 0)] * (a.ndim - 2)) for a in arrays]
        return np.concatenate([np.pad(a, w) for a, w in zip(arrays, widths)])

    completions = Completions(
        tokens=padded("tokens"),
        lengths=np.concatenate([c.lengths for c in parts]),
        log_probs=padded("log_probs"),
        stop=np.concatenate([c.stop for c in parts]),
        prompt_index=np.concatenate([c.prompt_index + n for c, n in zip(parts, first)]),
        version=min(c.version for c in parts),
        kept=None if parts[0].kept is None else padded("kept"),
        versions=None if parts[0].versions is None else padded("versions"),
    )
    return Rollout(
        [problem for r in rollouts for problem in r.problems],
        [prompt for r in rollouts for prompt in r.prompts],
        completions,
        [text for r in rollouts for text in r.texts],
        [score for r in rollouts for score in r.scores],
    )


def evaluate_problems(
    roller: Roller, problems: Sequence[Problem], samples: int, seed: int | None
) -> tuple[TextEvaluation, Rollout]:
    """What a model makes of problems.

    Args:
        samples: completions of each.
        seed: of their noise; None: greedy.

    Raises:
        EnvError: not one of them could be scored.
    """
    rng = None if seed is None else np.random.default_rng(seed)
    rollout = roller.roll(problems, samples, rng)
    if all(score.failed for score in rollout.scores):
        raise EnvError(f"evaluation: {describe_failures(rollout.scores)}")
    lengths = rollout.completions.lengths
    return text_evaluation(rollout.scores, lengths, samples, seed is None), rollout
