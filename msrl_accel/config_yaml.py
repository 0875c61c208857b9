"""Reading and writing YAML without its surprises.

Scalars are read by the YAML 1.2 core rules where 1.1 differs: ``1e-3`` is a number, ``on`` and
``2024-01-01`` are text, ``010`` is ten. Duplicate keys are refused. What is written reads the same
with any YAML reader.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Union

import yaml

from msrl_accel.errors import ConfigError

PathLike = Union[str, "os.PathLike[str]"]

_TAG = "tag:yaml.org,2002:"
_FLOAT = re.compile(
    r"^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_INT = re.compile(r"^[-+]?[0-9][0-9_]*$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")


class _Loader(yaml.SafeLoader):
    """Safe loader with the scalar rules above."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (declared by the base)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == _TAG + "merge":
                continue
            key = self.construct_object(key_node, deep=True)
            try:
                duplicate = key in seen
                seen.add(key)
            except TypeError:
                continue  # not hashable: the base class says so
            if duplicate:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key} is given twice", key_node.start_mark
                )
        # Deep, so that a value that contains itself is refused.
        return super().construct_mapping(node, deep=True)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        # The base class reads 010 as octal.
        return int(str(self.construct_scalar(node)).replace("_", ""))


class _Dumper(yaml.SafeDumper):
    """Safe dumper: lists on one line, no aliases, quotes where either rule set needs them."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _resolver(cls: Any, tag: str, pattern: re.Pattern[str], first: str) -> None:
    cls.add_implicit_resolver(_TAG + tag, pattern, list(first) or None)


_resolver(_Loader, "bool", _BOOL, "tTfF")
_resolver(_Loader, "null", _NULL, "~nN")
_Loader.yaml_implicit_resolvers.setdefault("", []).append((_TAG + "null", _NULL))
_resolver(_Loader, "int", _INT, "-+0123456789")
_resolver(_Loader, "float", _FLOAT, "-+0123456789.")
_resolver(_Loader, "merge", re.compile(r"^<<$"), "<")
_Loader.add_constructor(_TAG + "int", _Loader.construct_yaml_int)
_resolver(_Dumper, "int", _INT, "-+0123456789")
_resolver(_Dumper, "float", _FLOAT, "-+0123456789.")
_Dumper.add_representer(
    list,
    lambda dumper, data: dumper.represent_sequence(_TAG + "seq", data, flow_style=True),
)


def read_mapping(path: PathLike) -> dict[Any, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping.

    Raises `ConfigError` naming the file and, for a mistake inside it, the line.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"cannot read {path}, line {line}: not UTF-8 text") from None
    try:
        tree = yaml.load(text, _Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"cannot read {path}{_where(error, text)}: {_reason(error)}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"cannot read {path}, line 1: expected lines of the form key: value")
    return tree


def parse_value(text: str) -> Any:
    """The value of a YAML text on the command line: ``3e-4``, ``true``, ``[64, 64]``, ``null``."""
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError) as error:
        reason = _reason(error)
        raise ConfigError(f"{text!r} is not a YAML value: {reason}") from None


def _where(error: Exception, text: str) -> str:
    if isinstance(error, yaml.reader.ReaderError):  # a character that YAML does not allow
        return f", line {text.count(chr(10), 0, error.position) + 1}"
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    return f", line {mark.line + 1}" if mark else ""


def _reason(error: Exception) -> str:
    text = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    return " ".join(str(text).split())


def dump(tree: dict[str, Any]) -> str:
    """YAML text of a nested dict in its own order, with an empty line around each section."""
    blocks: list[str] = []
    previous_nested = False
    for key, value in tree.items():
        nested = isinstance(value, dict) and bool(value)
        if nested or previous_nested:
            blocks.append("\n")
        blocks.append(yaml.dump({key: value}, Dumper=_Dumper, sort_keys=False, width=100))
        previous_nested = nested
    return "".join(blocks).lstrip("\n")


def one_line(value: Any) -> str:
    """A value as it is typed after ``--set KEY=``."""
    plain = list(value) if isinstance(value, tuple) else value
    text: str = yaml.dump(plain, Dumper=_Dumper, default_flow_style=True, width=1000)
    return text.replace("\n...", "").strip()


def write_text(path: PathLike, text: str) -> None:
    """Replace a file by `text` so that a reader finds the old or the new one, never a part."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None
