"""Arithmetic expressions, read by a parser of their own: nothing is ever evaluated as code."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

_TOKEN = re.compile(r"\s*([0-9]+|[-+*/()])")
_MAX_TOKENS = 200
_MAX_DIGITS = 30
_OPERATORS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}


def evaluate_expression(text: str) -> tuple[Fraction, list[int]]:
    """Exact value of an expression of whole numbers, + - * / and parentheses, and its numbers.

    A leading minus is allowed before a number or parenthesis. Raises ValueError for anything
    else, for a division by zero, and for expressions of unreasonable length.
    """
    parser = _Parser(_tokens(text))
    value = parser.sum()
    if parser.peek() is not None:
        raise ValueError(f"unexpected {parser.peek()!r}")
    return value, parser.numbers


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    position, text = 0, text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError(f"unexpected {text[position:].lstrip()[0]!r}")
        tokens.append(match[1])
        position = match.end()
        if len(tokens) > _MAX_TOKENS or len(match[1]) > _MAX_DIGITS:
            raise ValueError("too long")
    return tokens


class _Parser:
    """Recursive descent: sum = product {+- product}; product = unit {*/ unit}."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._position = 0
        self.numbers: list[int] = []

    def peek(self) -> str | None:
        return self._tokens[self._position] if self._position < len(self._tokens) else None

    def sum(self) -> Fraction:
        return self._chain("+-", self._product)

    def _product(self) -> Fraction:
        return self._chain("*/", self._unit)

    def _chain(self, operators: str, operand: Callable[[], Fraction]) -> Fraction:
        value = operand()
        while (operator := self.peek()) is not None and operator in operators:
            self._position += 1
            try:
                value = _OPERATORS[operator](value, operand())
            except ZeroDivisionError:
                raise ValueError("division by zero") from None
        return value

    def _unit(self) -> Fraction:
        token = self.peek()
        self._position += 1
        if token is None:
            raise ValueError("it ends too early")
        if token == "-":
            return -self._unit()
        if token == "(":
            value = self.sum()
            if self.peek() != ")":
                raise ValueError("a parenthesis is not closed")
            self._position += 1
            return value
        if not token.isdigit():
            raise ValueError(f"unexpected {token!r}")
        self.numbers.append(int(token))
        return Fraction(int(token))
