"""Conversion of raw configuration values to declared types, and what errors say about them.

Types: bool, int, float, str, Optional, Literal, tuple[T, ...], list[T], dict[str, Any].
"""

from __future__ import annotations

import difflib
import numbers
import os
import re
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union

from msrl_accel.errors import ConfigError

_NONE = type(None)
# Numbers that YAML 1.1 reads as text: no dot before, or no sign after, the "e".
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


class Mismatch(Exception):
    """A value is not of the type; the text says what was expected."""


def convert(kind: Any, raw: Any) -> Any:
    """`raw` as the type `kind`, or `Mismatch`; a second conversion changes nothing."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind in (bool, str, int, float):
        value = _SCALARS[kind](raw)
    elif origin is Union:
        value = _convert_union(kind, args, raw)
    elif origin is Literal:
        if not any(raw == choice and type(raw) is type(choice) for choice in args):
            raise Mismatch(one_of(args, raw))
        value = raw
    elif origin in (tuple, list):
        if not isinstance(raw, (tuple, list)):
            raise Mismatch(f"expected {describe(kind)}")
        try:
            value = origin(convert(args[0], item) for item in raw)
        except Mismatch:
            raise Mismatch(f"expected {describe(kind)}") from None
    elif origin is dict or kind is dict:
        value = _free_mapping(raw)
    else:
        raise TypeError(f"configuration fields cannot have the type {kind}")
    return value


def _to_bool(raw: Any) -> bool:
    if not isinstance(raw, bool):
        raise Mismatch("expected true or false")
    return raw


def _to_str(raw: Any) -> str:
    if isinstance(raw, os.PathLike):
        raw = os.fspath(raw)
    if not isinstance(raw, str):
        raise Mismatch("expected text (in YAML, put it in quotes)")
    return raw


def _to_int(raw: Any) -> int:
    if isinstance(raw, str) and _EXPONENT.fullmatch(raw):
        raw = float(raw)
    if isinstance(raw, bool) or not isinstance(raw, numbers.Real):
        raise Mismatch("expected an integer")
    if not isinstance(raw, numbers.Integral) and not float(raw).is_integer():
        raise Mismatch("expected an integer")
    return int(typing.cast(typing.SupportsInt, raw))


def _to_float(raw: Any) -> float:
    if isinstance(raw, str) and _EXPONENT.fullmatch(raw):
        raw = float(raw)
    if isinstance(raw, bool) or not isinstance(raw, numbers.Real):
        raise Mismatch("expected a number")
    try:
        return float(raw)
    except OverflowError:
        raise Mismatch("expected a number that fits 64-bit floating point") from None


_SCALARS: dict[Any, Any] = {bool: _to_bool, str: _to_str, int: _to_int, float: _to_float}


def _convert_union(kind: Any, args: tuple[Any, ...], raw: Any) -> Any:
    if raw is None and _NONE in args:
        return None
    options = [option for option in args if option is not _NONE]
    for option in options:
        try:
            return convert(option, raw)
        except Mismatch as mismatch:
            reason = str(mismatch)
    # With one type the mismatch says more (which choice is nearest) than the union would.
    raise Mismatch(f"{reason}, or null" if len(options) == 1 else f"expected {describe(kind)}")


def _free_mapping(raw: Any) -> dict[str, Any]:
    """A mapping with text keys and values that YAML can hold."""
    if not isinstance(raw, Mapping) or not all(isinstance(key, str) for key in raw):
        raise Mismatch("expected a mapping with text keys")
    return {key: _free_value(value) for key, value in raw.items()}


def _free_value(raw: Any) -> Any:
    if raw is None or isinstance(raw, (bool, str)):
        return raw
    if isinstance(raw, numbers.Integral):
        return int(raw)
    if isinstance(raw, numbers.Real):
        return float(raw)
    if isinstance(raw, (tuple, list)):
        return [_free_value(item) for item in raw]
    if isinstance(raw, Mapping):
        return _free_mapping(raw)
    raise Mismatch(f"{type(raw).__name__} values cannot be saved; use numbers, text, lists, dicts")


def describe(kind: Any) -> str:
    """A type in words, as in "expected a list of integers"."""
    names = {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "text",
        _NONE: "null",
    }
    plurals = {int: "integers", float: "numbers", str: "texts", bool: "true or false"}
    if kind in names:
        return names[kind]
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Union:
        return " or ".join(describe(option) for option in args)
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin in (tuple, list):
        return f"a list of {plurals.get(args[0], describe(args[0]))}"
    return "a mapping"


def one_of(choices: tuple[Any, ...], raw: Any) -> str:
    """What was expected instead of `raw`, with the nearest choice."""
    near = difflib.get_close_matches(str(raw), [str(choice) for choice in choices], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"expected one of {', '.join(map(str, choices))}{hint}"


def show(value: Any) -> str:
    """A value in an error message: its repr on one line of at most 60 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def bad_value(key: str, value: Any, reason: str) -> ConfigError:
    """The error for a value of the wrong type or outside of its bounds."""
    return ConfigError(f"{key} = {show(value)}: {reason}")
