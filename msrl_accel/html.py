"""Pieces of HTML for what notebooks show; every text is escaped."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

_CELL = "padding:3px 10px;text-align:left;border-bottom:1px solid #ddd"
_GOOD, _BAD = "#2e7d4f", "#b3261e"


class Markup(str):
    """HTML that is ready: it is not escaped again."""

    __slots__ = ()


def render(value: object) -> Markup:
    """A value as HTML; `Markup` stays as it is."""
    return value if isinstance(value, Markup) else Markup(escape(str(value)))


def table(rows: Iterable[Sequence[object]], header: Sequence[object] = ()) -> Markup:
    """A table; cells are texts or `Markup`."""
    lines = [_row("th", header)] if header else []
    lines += [_row("td", row) for row in rows]
    style = "border-collapse:collapse;margin-top:6px"
    return Markup(f"<table style='{style}'>{''.join(lines)}</table>")


def bullets(items: Sequence[object]) -> Markup:
    """A list; nothing where it is empty."""
    inner = "".join(f"<li>{render(item)}</li>" for item in items)
    return Markup(f"<ul>{inner}</ul>" if items else "")


def verdict(text: str, good: bool) -> Markup:
    """Bold, green or red."""
    return Markup(f"<b style='color:{_GOOD if good else _BAD}'>{escape(text)}</b>")


def link(path: Path) -> Markup:
    """A link to a file or folder, relative where the path is."""
    return Markup(f"<a href='{quote(path.as_posix())}'>{escape(path.name)}</a>")


def png(data: bytes, alt: str) -> Markup:
    """A PNG image inside the page."""
    encoded = base64.b64encode(data).decode("ascii")
    source = f"data:image/png;base64,{encoded}"
    return Markup(f"<img style='max-width:100%' alt='{escape(alt)}' src='{source}'>")


def _row(tag: str, cells: Sequence[object]) -> str:
    return "<tr>" + "".join(f"<{tag} style='{_CELL}'>{render(c)}</{tag}>" for c in cells) + "</tr>"
