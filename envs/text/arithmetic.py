"""Sums and products of random numbers."""

from __future__ import annotations

import math

import numpy as np

from msrl_accel.envs.text.answers import final_answer, last_number
from msrl_accel.envs.text.base import (
    Problem,
    ProceduralTask,
    Reward,
    check_integer,
    check_style,
    sorted_characters,
)

_DIGITS = "0123456789"


class _Arithmetic(ProceduralTask):
    operator = ""
    inline = True

    def __init__(self, digits: int, terms: int, style: str) -> None:
        self.digits = check_integer(self.name, "digits", digits, 1, 15)
        self.terms = check_integer(self.name, "terms", terms, 2, 8)
        self.style = check_style(self.name, style)
        self.characters = sorted_characters(_DIGITS, self._prompt([0, 0]))

    def score(self, problem: Problem, completion: str) -> Reward:
        """1 for the right number: the whole completion in style plain, its last number else."""
        if self.style == "plain":
            right = completion.strip() == problem.answer
        else:
            right = last_number(final_answer(completion)) == int(problem.answer)
        return Reward(1.0, "right") if right else Reward(0.0, f"expected {problem.answer}")

    def draw(self, rng: np.random.Generator) -> Problem:
        numbers = rng.integers(0, 10**self.digits, self.terms).tolist()
        return Problem(self._prompt(numbers), str(self._result(numbers)), {"numbers": numbers})

    def key(self, problem: Problem) -> str:
        # 3+5 and 5+3 are one problem, in any style
        return f"{self.operator}{sorted(problem.meta['numbers'])}"

    def _prompt(self, numbers: list[int]) -> str:
        if self.style == "plain":
            return self.operator.join(map(str, numbers)) + "="
        expression = f" {self.operator} ".join(map(str, numbers))
        return f"What is {expression}? Reply with the number only."

    def _result(self, numbers: list[int]) -> int:
        raise NotImplementedError


class Addition(_Arithmetic):
    """`12+34=` -> `46`.

    Args:
        digits: each number has at most this many digits.
        terms: how many numbers are added.
        style: "plain" as above, for a model trained from nothing; "instruction" asks in English.
    """

    name = "text/addition"
    operator = "+"

    def __init__(self, digits: int = 2, terms: int = 2, style: str = "plain") -> None:
        super().__init__(digits, terms, style)

    def _result(self, numbers: list[int]) -> int:
        return sum(numbers)


class Multiplication(_Arithmetic):
    """`12*34=` -> `408`; arguments as for Addition."""

    name = "text/multiplication"
    operator = "*"

    def __init__(self, digits: int = 2, terms: int = 2, style: str = "plain") -> None:
        super().__init__(digits, terms, style)

    def _result(self, numbers: list[int]) -> int:
        return math.prod(numbers)
