"""What `--help` says of the keys of a configuration."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping

from msrl_accel.config_schema import FieldSpec, Section, docs_of, fields_of
from msrl_accel.config_types import describe
from msrl_accel.config_yaml import one_line


def help_keys(root: type[Section], parts: Mapping[str, type[Section]]) -> str:
    """Every key of the sections `parts` of `root` with type, default, bounds and meaning."""
    lines = ["keys, for --set KEY=VALUE or a YAML file:", ""]
    lines += _section("", root)
    for name, section in parts.items():
        lines += ["", f"{name}: {docs_of(section)[0].partition(chr(10))[0]}".rstrip()]
        lines += _section(f"{name}.", section)
    return "\n".join(lines) + "\n"


def _section(prefix: str, section: type[Section]) -> list[str]:
    width = max(40, shutil.get_terminal_size().columns - 2)
    lines = []
    for name, spec in fields_of(section).items():
        if spec.section is None:
            lines.append(f"  {prefix}{name}: {_values(spec)}")
            lines += textwrap.wrap(
                spec.doc, width, initial_indent=" " * 6, subsequent_indent=" " * 6
            )
    return lines


def _values(spec: FieldSpec) -> str:
    choices = ", ".join(map(str, spec.rule.choices))
    kind = f"one of {choices}" if choices else describe(spec.kind)
    limits = ", ".join([kind, *spec.rule.bounds()])
    if spec.required:
        return f"{limits}; required"
    return f"{limits}; default {one_line(spec.default())}"
