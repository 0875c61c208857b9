"""Data sets on disk: one JSON object a line, with a prompt and an answer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from msrl_accel.envs.text.base import (
    HELD_OUT_FRACTION,
    Problem,
    Reward,
    TextTask,
    hash_fraction,
    sorted_characters,
)
from msrl_accel.envs.text.rewards import RewardFunction, RewardSpec, build_reward, parse_rewards
from msrl_accel.errors import EnvError

_SHOWN = 20
"""Bad lines described one by one; of the others only the numbers are given."""


class JsonlTask(TextTask):
    """Problems of a JSON-lines file; a hash of the prompt decides which are held out.

    Args:
        path: the file. Blank lines are skipped; further keys of a line become the problem's meta.
        reward: how answers are judged: "exact", "numeric", "math" or `module:function`.
        prompt_key, answer_key: keys of a line; the answer is a text or a number.
        answer_after: only what follows the last such mark is the answer (`####` in GSM8K).
        held_out_fraction: share of the prompts kept for evaluation, at least one.

    Raises EnvError for an unreadable or empty file, and one that names every bad line: no JSON
    object, no prompt or answer, or an answer that `reward` cannot judge by.
    """

    name = "text/jsonl"

    def __init__(
        self,
        path: str | os.PathLike[str],
        reward: str = "exact",
        prompt_key: str = "prompt",
        answer_key: str = "answer",
        answer_after: str = "",
        held_out_fraction: float = HELD_OUT_FRACTION,
    ) -> None:
        if not 0 <= held_out_fraction < 1:
            raise EnvError(
                f"{self.name}: held_out_fraction is {held_out_fraction!r}; it must be in [0, 1)"
            )
        self.path = Path(path)
        self.reward = reward
        self._keys = (prompt_key, answer_key)
        self._answer_after = answer_after
        # A user's function is imported in worker processes only.
        self._function = None if ":" in reward else build_reward(_single(reward))
        self.problems = self._load()
        self.characters = sorted_characters(*(p.prompt + p.answer for p in self.problems))
        self._training, self._held_out = split_problems(self.problems, held_out_fraction)

    def sample(self, rng: np.random.Generator, n: int) -> list[Problem]:
        """n training problems, none twice before all have been taken."""
        indices: list[int] = []
        while len(indices) < n:
            indices += rng.permutation(len(self._training)).tolist()
        return [self._training[index] for index in indices[:n]]

    def held_out(self, n: int) -> list[Problem]:
        return self._held_out[:n]

    def score(self, problem: Problem, completion: str) -> Reward:
        if self._function is None:
            self._function = build_reward(_single(self.reward))
        return self._function(problem, completion)

    def _load(self) -> list[Problem]:
        try:
            lines = self.path.read_bytes().split(b"\n")
        except OSError as error:
            raise EnvError(f"data set {self.path}: {error.strerror or error}") from error
        problems: list[Problem] = []
        bad: list[tuple[int, str]] = []
        for number, line in enumerate(lines, 1):
            try:
                if line.strip():
                    problems.append(self._parse(number, line))
            except ValueError as error:
                bad.append((number, str(error)))
        if self._function is not None:
            bad += _unusable(self._function, problems)
        if bad:
            raise EnvError(describe_bad_lines(f"data set {self.path}", sorted(bad)))
        if not problems:
            raise EnvError(f"data set {self.path} is empty; it needs lines with prompt and answer")
        return problems

    def _parse(self, number: int, line: bytes) -> Problem:
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON in UTF-8: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"a JSON object is needed, not a {type(row).__name__}")
        prompt, answer = (_text(row, key) for key in self._keys)
        if self._answer_after:
            if self._answer_after not in answer:
                raise ValueError(f"the answer has no {self._answer_after!r}")
            answer = answer.rsplit(self._answer_after, 1)[-1].strip()
        meta = {key: value for key, value in row.items() if key not in self._keys}
        return Problem(prompt, answer, {**meta, "line": number})


def check_answers(source: str, function: RewardFunction, problems: Sequence[Problem]) -> None:
    """Raise an EnvError that names every problem whose answer the reward cannot judge by."""
    bad = list(_unusable(function, problems))
    if bad:
        raise EnvError(describe_bad_lines(source, bad))


def describe_bad_lines(source: str, bad: Sequence[tuple[int, str]]) -> str:
    """A message that names every bad line."""
    lines = [f"{source}: {len(bad)} bad line{'s' if len(bad) > 1 else ''}; mend or remove them"]
    lines += [f"  line {number}: {message}" for number, message in bad[:_SHOWN]]
    if len(bad) > _SHOWN:
        lines.append(f"  and lines {_ranges([number for number, _ in bad[_SHOWN:]])}")
    return "\n".join(lines)


def _unusable(function: RewardFunction, problems: Sequence[Problem]) -> Iterator[tuple[int, str]]:
    for index, problem in enumerate(problems):
        try:
            function.check(problem)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # math-verify's timeout is no Exception
            yield int(problem.meta.get("line", index + 1)), str(error)


def _ranges(numbers: list[int]) -> str:
    """Numbers in increasing order, as `3, 5-7`."""
    texts, start = [], numbers[0]
    for number, following in zip(numbers, [*numbers[1:], None]):
        if following != number + 1:
            texts.append(str(start) if start == number else f"{start}-{number}")
            start = following or 0
    return ", ".join(texts)


def _text(row: dict[str, Any], key: str) -> str:
    if key not in row:
        raise ValueError(f"no key {key!r}; it has {', '.join(row) or 'none'}")
    value = row[key]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = json.dumps(value)
    if not isinstance(value, str):
        raise ValueError(f"{key!r} is a {type(value).__name__}; a text is needed")
    if not value.strip():
        raise ValueError(f"{key!r} is empty")
    value.encode("utf-8")  # half of a surrogate pair is no text
    return value


def _single(reward: str) -> RewardSpec:
    specs = parse_rewards(reward)
    if len(specs) != 1 or specs[0].weight != 1 or specs[0].name == "task":
        raise EnvError(
            f"{JsonlTask.name}: reward is {reward!r}; it must be one of exact, numeric, math, or "
            "module:function"
        )
    return specs[0]


def split_problems(
    problems: Sequence[Problem], fraction: float
) -> tuple[list[Problem], list[Problem]]:
    """Training and held-out problems; equal prompts are on the same side, neither is empty."""
    keys = [problem.prompt.strip() for problem in problems]
    places = {key: hash_fraction(key) for key in keys}
    kept = {key for key, place in places.items() if place < fraction}
    if fraction > 0:
        if len(places) < 2:
            raise EnvError("a data set of one prompt has none to hold out; add more problems")
        if not kept:
            kept = {min(places, key=places.__getitem__)}
        if len(kept) == len(places):
            kept.discard(max(places, key=places.__getitem__))
    training = [problem for problem, key in zip(problems, keys) if key not in kept]
    unique = {key: problem for problem, key in zip(problems, keys) if key in kept}
    return training, list(unique.values())
