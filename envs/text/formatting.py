"""Following instructions about form: a word to be written in a given way."""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from msrl_accel.envs.text.base import (
    Problem,
    ProceduralTask,
    Reward,
    check_integer,
    check_style,
    sorted_characters,
)


@dataclass(frozen=True)
class _Rule:
    code: str
    words: str
    apply: Callable[[str], str]
    obeyed: Callable[[str], bool] | None
    """Whether a completion with the right letters obeys it; None where the letters say it all."""


_TWO = re.compile(r"[a-zA-Z]{2}")
_RULES = (  # in the order they apply
    _Rule("r", "backwards", lambda text: text[::-1], None),
    _Rule("U", "in capital letters", str.upper, str.isupper),
    _Rule("-", "with dashes between the letters", "-".join, lambda text: not _TWO.search(text)),
    _Rule("2", "twice with a space between", lambda text: f"{text} {text}", None),
    _Rule(
        "[",
        "in square brackets",
        lambda text: f"[{text}]",
        lambda text: text.startswith("[") and text.rstrip("!").endswith("]"),
    ),
    _Rule(
        "!",
        "with an exclamation mark at the end",
        lambda text: text + "!",
        lambda text: text.endswith("!"),
    ),
)
_PARTIAL = 0.5


class Format(ProceduralTask):
    """`abc|U[=` -> `[ABC]`: a word, the codes of the rules, and the word written by them.

    The codes: r backwards, U in capitals, - with dashes between, 2 twice, [ in brackets, ! with an
    exclamation mark.

    Args:
        letters: length of the word.
        rules: how many of the six rules apply.
        style: "plain" as above, or "instruction" in English.
    """

    name = "text/format"
    inline = True

    def __init__(self, letters: int = 4, rules: int = 2, style: str = "plain") -> None:
        self.letters = check_integer(self.name, "letters", letters, 2, 20)
        self.rules = check_integer(self.name, "rules", rules, 1, len(_RULES))
        self.style = check_style(self.name, style)
        words = string.ascii_letters + "[]-! "
        self.characters = sorted_characters(words, self._prompt("ab", list(_RULES)))

    def score(self, problem: Problem, completion: str) -> Reward:
        """1 for the exact text; for the right letters at most 0.5, by the share of rules obeyed."""
        text = completion.strip()
        if text == problem.answer:
            return Reward(1.0, "right")
        if _letters(text) != _letters(problem.answer):
            return Reward(0.0, f"other letters than {problem.answer}")
        checks = [
            rule.obeyed(text)
            for rule in _RULES
            if rule.code in problem.meta["rules"] and rule.obeyed is not None
        ]
        share = sum(checks) / len(checks) if checks else 0.0
        return Reward(_PARTIAL * share, f"{sum(checks)} of {len(checks)} marks of {problem.answer}")

    def draw(self, rng: np.random.Generator) -> Problem:
        word = "".join(string.ascii_lowercase[i] for i in rng.integers(0, 26, self.letters))
        chosen = sorted(rng.permutation(len(_RULES))[: self.rules].tolist())
        rules = [_RULES[index] for index in chosen]
        text = word
        for rule in rules:
            text = rule.apply(text)
        codes = "".join(rule.code for rule in rules)
        return Problem(self._prompt(word, rules), text, {"word": word, "rules": codes})

    def key(self, problem: Problem) -> str:
        return f"{problem.meta['word']}|{problem.meta['rules']}"

    def _prompt(self, word: str, rules: list[_Rule]) -> str:
        if self.style == "plain":
            return f"{word}|{''.join(rule.code for rule in rules)}="
        wishes = ", ".join(rule.words for rule in rules)
        return f"Write the word {word} {wishes}. Reply with nothing else."


def _letters(text: str) -> str:
    return "".join(character for character in text.lower() if character.isalpha())
