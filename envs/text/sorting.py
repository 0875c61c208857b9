"""Sorting numbers."""

from __future__ import annotations

import re

import numpy as np

from msrl_accel.envs.text.answers import final_answer
from msrl_accel.envs.text.base import (
    Problem,
    ProceduralTask,
    Reward,
    check_integer,
    check_style,
    sorted_characters,
)


class Sorting(ProceduralTask):
    """`31,4,15>` -> `4,15,31`.

    Args:
        length: how many numbers.
        digits: each has at most this many digits.
        style: "plain" as above, or "instruction" in English.
    """

    name = "text/sorting"
    inline = True

    def __init__(self, length: int = 4, digits: int = 2, style: str = "plain") -> None:
        self.length = check_integer(self.name, "length", length, 2, 100)
        self.digits = check_integer(self.name, "digits", digits, 1, 15)
        self.style = check_style(self.name, style)
        self.characters = sorted_characters("0123456789,", self._prompt([0, 0]))

    def score(self, problem: Problem, completion: str) -> Reward:
        """1 for the sorted numbers; in style instruction the last numbers of the text count."""
        if self.style == "plain":
            right = completion.strip() == problem.answer
        else:
            found = re.findall(r"[0-9]+", final_answer(completion))
            right = found[-self.length :] == problem.answer.split(",")
        return Reward(1.0, "right") if right else Reward(0.0, f"expected {problem.answer}")

    def draw(self, rng: np.random.Generator) -> Problem:
        numbers = rng.integers(0, 10**self.digits, self.length).tolist()
        answer = ",".join(map(str, sorted(numbers)))
        return Problem(self._prompt(numbers), answer, {"numbers": numbers})

    def key(self, problem: Problem) -> str:
        return problem.answer  # another order of the same numbers is no new problem

    def _prompt(self, numbers: list[int]) -> str:
        if self.style == "plain":
            return f"{','.join(map(str, numbers))}>"
        return (
            f"Sort these numbers from smallest to largest: {', '.join(map(str, numbers))}. Reply "
            "with the numbers only, separated by commas."
        )
