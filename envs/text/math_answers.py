"""Mathematical answers in LaTeX or plain text, judged by math-verify."""

from __future__ import annotations

import re
import threading
from typing import Any

from msrl_accel.envs.text.answers import final_answer, to_number
from msrl_accel.envs.text.base import Problem, Reward
from msrl_accel.envs.text.rewards import RewardFunction
from msrl_accel.errors import EnvError

_MARKED = re.compile(r"\$|\\\(|\\\[|\\boxed|\\begin")


class MathReward(RewardFunction):
    """1 where the answer equals the right one as mathematics: 1/2, 0.5 and \\frac{1}{2} are equal.

    math-verify ends its own work by SIGALRM, which needs the main thread of a process: scoring in
    worker processes gives it that. Whatever fails in there is raised, never judged as wrong.

    Args:
        seconds: limit for each of parsing and comparing, at least 1.
    """

    def __init__(self, seconds: int = 3) -> None:
        if isinstance(seconds, bool) or not isinstance(seconds, int) or seconds < 1:
            raise EnvError(f"reward math: seconds is {seconds!r}; it must be an integer from 1 up")
        try:
            import math_verify
        except ImportError as error:
            raise EnvError(
                f"reward math needs math-verify: pip install 'msrl_accel[lm]' ({error})"
            ) from error
        self._library: Any = math_verify
        self._seconds = seconds

    def __call__(self, problem: Problem, completion: str) -> Reward:
        expected = self._gold(problem.answer, self._seconds)
        answer = final_answer(completion)
        found = self._parse(answer, answer != completion.strip(), self._seconds)
        if not found:
            return Reward(0.0, "no mathematical answer found")
        right = self._library.verify(
            expected, found, timeout_seconds=self._seconds, raise_on_error=True
        )
        return Reward(1.0, "right") if right else Reward(0.0, f"expected {problem.answer}")

    def check(self, problem: Problem) -> None:
        if to_number(problem.answer) is None:  # parsing is slow, and a number always parses
            main = threading.current_thread() is threading.main_thread()
            self._gold(problem.answer, self._seconds if main else None)

    def _gold(self, answer: str, seconds: int | None) -> list[Any]:
        expected = self._parse(answer, True, seconds)
        if not expected:
            raise ValueError(f"the answer {answer!r} cannot be read as mathematics")
        return expected

    def _parse(self, text: str, bare: bool, seconds: int | None) -> list[Any]:
        """Expressions in a text; with `bare`, LaTeX need not stand between dollar signs."""
        candidates = [text]
        if bare and not _MARKED.search(text):
            candidates.insert(0, f"${text}$")
        for candidate in candidates:
            found: list[Any] = self._library.parse(
                candidate,
                fallback_mode="no_fallback",
                parsing_timeout=seconds,
                raise_on_error=True,
            )
            if found:
                return found
        return []
