"""The numbers game: reach a target with given numbers."""

from __future__ import annotations

import operator
from collections import Counter

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
from msrl_accel.envs.text.expressions import evaluate_expression
from msrl_accel.errors import EnvError

_DIGITS = "0123456789"
_OPERATORS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,  # where it leaves no rest
}
_MAX_ATTEMPTS = 20_000


class Countdown(ProceduralTask):
    """`3,7,12:48=` -> `(7-3)*12`: any expression of that value that uses no number twice.

    Args:
        numbers: how many numbers are given.
        limit: numbers are from 1 to this.
        max_target: targets are from 1 to this.
        operators: those a solution needs, of "+-*/"; completions may use all four.
        style: "plain" as above, or "instruction" in English.
    """

    name = "text/countdown"
    inline = True

    def __init__(
        self,
        numbers: int = 3,
        limit: int = 20,
        max_target: int = 100,
        operators: str = "+-*",
        style: str = "plain",
    ) -> None:
        self.numbers = check_integer(self.name, "numbers", numbers, 2, 8)
        self.limit = check_integer(self.name, "limit", limit, 2, 10_000)
        self.max_target = check_integer(self.name, "max_target", max_target, 3, 1_000_000)
        if not isinstance(operators, str) or not operators or set(operators) - set("+-*/"):
            raise EnvError(f"{self.name}: operators is {operators!r}; use some of + - * /")
        self.operators = operators
        self.style = check_style(self.name, style)
        self.characters = sorted_characters(_DIGITS, "+-*/()", self._prompt([0, 0], 0))

    def score(self, problem: Problem, completion: str) -> Reward:
        """1 for an expression of the target's value that uses each given number at most once."""
        answer = final_answer(completion)
        if self.style == "instruction":
            answer = answer.split("=")[0]  # `3 * 8 = 24` is how people write it
        try:
            value, used = evaluate_expression(answer)
        except ValueError as error:
            return Reward(0.0, f"not an expression: {error}")
        extra = Counter(used) - Counter(problem.meta["numbers"])
        if extra:
            return Reward(0.0, f"{min(extra)} is used more often than it is given")
        if value != problem.meta["target"]:
            return Reward(0.0, f"the value is {value}, not {problem.meta['target']}")
        return Reward(1.0, "right")

    def draw(self, rng: np.random.Generator) -> Problem:
        for _ in range(_MAX_ATTEMPTS):
            numbers = rng.integers(1, self.limit + 1, self.numbers).tolist()
            found = self._combine(rng, numbers)
            if found is not None:
                expression, target = found
                given = rng.permutation(numbers).tolist()
                meta = {"numbers": given, "target": target}
                return Problem(self._prompt(given, target), expression, meta)
        raise EnvError(
            f"{self.name}: {self.operators!r} hardly ever make a target up to {self.max_target} of "
            f"{self.numbers} numbers up to {self.limit}; change operators, limit or max_target"
        )

    def _combine(self, rng: np.random.Generator, numbers: list[int]) -> tuple[str, int] | None:
        """An expression of all the numbers with random operators, and its value if it will do."""
        value, text, is_sum = numbers[0], str(numbers[0]), False
        for number in numbers[1:]:
            sign = self.operators[int(rng.integers(len(self.operators)))]
            if sign in "*/" and is_sum:
                text = f"({text})"
            text += f"{sign}{number}"
            is_sum = sign in "+-"
            if sign == "/" and value % number:
                return None
            value = _OPERATORS[sign](value, number)
            if value < 1:
                return None
        fits = value <= self.max_target and value not in numbers  # else it is a copy of a number
        return (text, value) if fits else None

    def key(self, problem: Problem) -> str:
        return f"{sorted(problem.meta['numbers'])}:{problem.meta['target']}"

    def _prompt(self, numbers: list[int], target: int) -> str:
        if self.style == "plain":
            return f"{','.join(map(str, numbers))}:{target}="
        return (
            f"Make {target} from the numbers {', '.join(map(str, numbers))}, each used at most "
            "once, with +, -, *, / and parentheses. Reply with the expression only."
        )
