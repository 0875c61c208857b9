"""Tasks of the package reasoning-gym."""

from __future__ import annotations

import difflib
import functools
import re
from typing import Any

import numpy as np

from msrl_accel.envs.text.answers import final_answer
from msrl_accel.envs.text.base import Problem, Reward, TextTask, is_held_out
from msrl_accel.errors import EnvError

_SIZE = 10_000
_ATTEMPTS = 200
# These verifiers run `eval` or SymPy's parser, which evaluates, on the answer.
_EVALUATING = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
_HARMLESS = frozenset({"sin", "cos", "tan", "sinh", "cosh", "tanh", "exp", "log", "sqrt", "pi"})
_QUOTED = re.compile(r"(?<![A-Za-z0-9_])(?:'[^'\\\n]*'|\"[^\"\\\n]*\")")
_NAME = re.compile(r"[^\W\d]\w*")


class ReasoningGymTask(TextTask):
    """`reasoning_gym/NAME`: problems and verifier of that data set.

    The verifier gets the text between <answer> and </answer> where a completion has it, else all
    of it. Worker processes make the problem anew from its index.

    Args:
        dataset: name in reasoning-gym.
        seed, size: of the data set; problems are made when they are drawn.
        config: further arguments of the data set.
    """

    def __init__(self, dataset: str, seed: int = 0, size: int = _SIZE, **config: Any) -> None:
        self.name = f"reasoning_gym/{dataset}"
        try:
            import reasoning_gym
        except ImportError as error:
            raise EnvError(
                f"{self.name} needs reasoning-gym: pip install 'msrl_accel[reasoning]' ({error})"
            ) from error
        known = reasoning_gym.factory.DATASETS
        if dataset not in known:
            close = difflib.get_close_matches(dataset, known, n=3)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise EnvError(f"{self.name} is not a data set of reasoning-gym{hint}")
        try:
            self._dataset = reasoning_gym.create_dataset(dataset, seed=seed, size=size, **config)
        except Exception as error:
            raise EnvError(f"{self.name} cannot be made with {config}: {error}") from error
        self._evaluates = dataset in _EVALUATING
        self._entry = functools.lru_cache(maxsize=1024)(self._dataset.__getitem__)

    def sample(self, rng: np.random.Generator, n: int) -> list[Problem]:
        problems: list[Problem] = []
        for _ in range(_ATTEMPTS + 10 * n):
            if len(problems) >= n:
                return problems
            problem = self._problem(int(rng.integers(len(self._dataset))))
            if not is_held_out(problem.prompt):
                problems.append(problem)
        raise EnvError(f"{self.name}: almost no problem is left for training; make size larger")

    def held_out(self, n: int) -> list[Problem]:
        found: dict[str, Problem] = {}
        for index in range(min(len(self._dataset), _ATTEMPTS + 20 * n)):
            if len(found) >= n:
                break
            problem = self._problem(index)
            if is_held_out(problem.prompt):
                found.setdefault(problem.prompt, problem)
        return list(found.values())

    def score(self, problem: Problem, completion: str) -> Reward:
        entry = self._entry(int(problem.meta["index"]))
        if entry["question"] != problem.prompt:
            raise ValueError(f"{self.name} made another problem of the same index and seed")
        answer = final_answer(completion)
        if self._evaluates and not is_plain(answer):
            return Reward(0.0, "names or quotes that a verifier which evaluates must not see")
        value = self._dataset.score_answer(answer, entry)
        return Reward(value, f"expected {problem.answer}" if value < 1 else "right")

    def demonstrate(self, problem: Problem) -> str:
        if not problem.answer:
            raise EnvError(f"{self.name} gives no right answers, so it cannot be demonstrated")
        return problem.answer

    def _problem(self, index: int) -> Problem:
        entry = self._entry(index)
        # Its metadata may hold any object, so only the index travels to worker processes.
        return Problem(entry["question"], str(entry["answer"] or ""), {"index": index})


def is_plain(answer: str) -> bool:
    """Whether an answer is free of code: one word, or only quoted texts, numbers, one-letter names
    and mathematical functions."""
    if answer.isalpha():
        return True
    rest = _QUOTED.sub(" ", answer)
    if any(mark in rest for mark in "'\"\\`@;:=!"):
        return False
    return all(len(name) == 1 or name in _HARMLESS for name in _NAME.findall(rest))
