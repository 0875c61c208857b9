"""Groups of completions: choosing and joining them."""

from __future__ import annotations

import numpy as np
import pytest

from msrl_accel.envs.text import Problem, Score
from msrl_accel.lm.generation import Completions
from msrl_accel.lm.rollout import Rollout, join, select


def make(lengths, seed=0, kept=None):
    """Two completions a problem; the tokens of completion n are 10 n, 10 n + 1, ..."""
    n, longest = len(lengths), max(lengths)
    rng = np.random.default_rng(seed)
    lengths = np.array(lengths, np.int32)
    mask = np.arange(longest) < lengths[:, None]
    tokens = np.where(mask, 10 * np.arange(n)[:, None] + np.arange(longest), 0).astype(np.int32)
    completions = Completions(
        tokens=tokens,
        lengths=lengths,
        log_probs=np.where(mask, rng.standard_normal(mask.shape), 0).astype(np.float32),
        stop=np.where(lengths < longest, "eos", "length"),
        prompt_index=np.repeat(np.arange(n // 2), 2).astype(np.int32),
        version=seed,
        kept=None if kept is None else np.repeat(tokens[..., None], kept, axis=2),
    )
    problems = [Problem(f"p{seed}{i}", "") for i in range(n // 2)]
    scores = [Score(float(i), {"task": float(i)}) for i in range(n)]
    prompts = [np.array([seed, i]) for i in range(n // 2)]
    return Rollout(problems, prompts, completions, [f"t{seed}{i}" for i in range(n)], scores)


def contents(rollout):
    """(problem, prompt, tokens, log-probabilities, text, reward) of every completion."""
    c = rollout.completions
    return [
        (
            rollout.asked[n].prompt,
            rollout.prompts[c.prompt_index[n]].tolist(),
            c.tokens[n, : c.lengths[n]].tolist(),
            c.log_probs[n, : c.lengths[n]].tolist(),
            rollout.texts[n],
            rollout.rewards[n],
            c.stop[n],
            None if c.kept is None else c.kept[n, : c.lengths[n]].tolist(),
        )
        for n in range(rollout.n)
    ]


@pytest.mark.parametrize("kept", [None, 3])
def test_selected_groups_stay_whole(kept):
    rollout = make([3, 1, 4, 1, 5, 2], kept=kept)
    chosen = select(rollout, np.array([2, 0]))
    every = contents(rollout)
    assert contents(chosen) == [*every[:2], *every[4:]]
    assert select(rollout, np.array([], int)).n == 0


@pytest.mark.parametrize("kept", [None, 3])
def test_joined_rollouts_follow_each_other(kept):
    first, second = make([3, 1, 2, 2], 5, kept), make([6, 1], 4, kept)
    joined = join([first, second])
    assert contents(joined) == contents(first) + contents(second)
    assert joined.completions.version == 4
    assert joined.mask.sum() == joined.completions.lengths.sum()
    sequences = joined.sequences()
    assert sequences.prompt_index.tolist() == [0, 0, 1, 1, 2, 2]


def test_a_failed_verifier_gives_no_reward():
    rollout = make([1, 1])
    rollout.scores[1] = Score(None, {"task": None}, "oh")
    assert np.isnan(rollout.rewards).tolist() == [False, True]
