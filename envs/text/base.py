"""What a text task is: problems with a verifiable answer, split so that none ever leaks."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from msrl_accel.errors import EnvError

HELD_OUT_FRACTION = 0.1
STYLES = ("plain", "instruction")


@dataclass(frozen=True)
class Problem:
    """A prompt with what its verifier needs.

    `answer` is a right answer (there may be others); `meta` holds JSON-able facts about it.
    """

    prompt: str
    answer: str
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reward:
    """What a verifier says of one completion: a finite value, and why."""

    value: float
    reason: str = ""


class TextTask(ABC):
    """Problems, and what a completion of one is worth.

    `sample` and `held_out` never give the same problem. Subclass it for a task of your own and
    name it `module:Class`; `make_task` passes the keyword arguments.
    """

    name: str = ""
    characters: str = ""
    """Every character that prompts and right answers use, sorted; empty where unknown."""
    inline: bool = False
    """True for a verifier that can neither hang nor crash: no worker process is needed."""
    reward: str = "task"
    """The reward this task stands for: its own `score`, or the name of another."""
    problems: Sequence[Problem] = ()
    """Every problem of a finite data set, both sides of the split."""
    origin: tuple[str, Mapping[str, Any]] | None = None
    """Id and arguments `make_task` made it of, so that worker processes can make it too."""

    @abstractmethod
    def sample(self, rng: np.random.Generator, n: int) -> list[Problem]:
        """n training problems, drawn with `rng`; the same state gives the same problems."""

    @abstractmethod
    def held_out(self, n: int) -> list[Problem]:
        """The first n distinct problems kept for evaluation, fewer where there are fewer."""

    @abstractmethod
    def score(self, problem: Problem, completion: str) -> Reward:
        """What `completion` is worth; raises where the verifier itself fails."""

    def demonstrate(self, problem: Problem) -> str:
        """A completion with full reward, for supervised warm starts."""
        return problem.answer


class ProceduralTask(TextTask):
    """A task whose problems are drawn at random; a hash of their key decides which are held out."""

    @abstractmethod
    def draw(self, rng: np.random.Generator) -> Problem:
        """One problem, of either side of the split."""

    def key(self, problem: Problem) -> str:
        """What makes two problems the same, such as 3+5 and 5+3; the prompt unless overridden."""
        return problem.prompt

    def sample(self, rng: np.random.Generator, n: int) -> list[Problem]:
        problems: list[Problem] = []
        for _ in range(10_000 + 100 * n):
            if len(problems) >= n:
                return problems
            problem = self.draw(rng)
            if not is_held_out(self.key(problem)):
                problems.append(problem)
        raise EnvError(f"{self.name}: almost no problem is left for training; make it larger")

    def held_out(self, n: int) -> list[Problem]:
        rng = np.random.default_rng(0)
        found: dict[str, Problem] = {}
        for _ in range(10_000 + 100 * n):  # a small task has fewer than n
            if len(found) >= n:
                break
            problem = self.draw(rng)
            key = self.key(problem)
            if is_held_out(key):
                found.setdefault(key, problem)
        return list(found.values())[:n]


def is_held_out(key: str, fraction: float = HELD_OUT_FRACTION) -> bool:
    """Whether a problem is for evaluation: a hash of its key decides, so it never changes side."""
    return hash_fraction(key) < fraction


def hash_fraction(key: str) -> float:
    """A hash of `key` in [0, 1)."""
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def check_integer(task: str, name: str, value: object, low: int, high: int) -> int:
    """The integer argument `name` of a task, within [low, high], or EnvError."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise EnvError(f"{task}: {name} is {value!r}; it must be an integer from {low} to {high}")
    return value


def check_style(task: str, style: object) -> str:
    """The argument `style` of a built-in task."""
    if style not in STYLES:
        raise EnvError(f"{task}: style is {style!r}; choose one of {', '.join(STYLES)}")
    return str(style)


def sorted_characters(*texts: str) -> str:
    """The distinct characters of the texts, sorted."""
    return "".join(sorted(set("".join(texts))))
