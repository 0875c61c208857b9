"""Finding the answer in a completion, and numbers in an answer."""

from __future__ import annotations

import re
from fractions import Fraction

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NUMBER = re.compile(
    r"(?:(?<![\w)])[-+])?"  # a sign, but not the operator of 5-3
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<!\w)\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?(?:/[0-9]+)?"
)
_LONGEST_NUMBER = 400  # digits; longer ones cost time that grows with their square


def final_answer(completion: str) -> str:
    """The text of the last <answer>...</answer>, else what follows ####, else everything."""
    tagged = _TAGGED.findall(completion)
    answer: str = tagged[-1] if tagged else completion.rsplit("####", 1)[-1]
    return answer.strip()


def last_number(text: str) -> Fraction | None:
    """The last number in a text, exactly; None where there is none of reasonable length.

    Reads signs, decimals, exponents of up to three digits, fractions such as 3/4, and commas
    between groups of three digits.
    """
    matches = _NUMBER.findall(text)
    return to_number(matches[-1]) if matches else None


def to_number(text: str) -> Fraction | None:
    """The number a whole text stands for, or None."""
    digits = text.strip().replace(",", "")
    if len(digits) > _LONGEST_NUMBER or not _NUMBER.fullmatch(text.strip()):
        return None
    numerator, _, denominator = digits.partition("/")
    if denominator and int(denominator) == 0:
        return None
    return Fraction(numerator) / int(denominator or 1)
