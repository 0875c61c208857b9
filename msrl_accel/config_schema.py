"""Typed, bounded configuration sections: fields, their help texts, suggestions for unknown keys.

A section is a class whose fields state type, default, bounds and, in the literal below, meaning:

    class PPOConfig(Section):
        clip_range: float = Field(0.2, gt=0)
        \"\"\"Half-width of the trust interval of the ratio pi/pi_old.\"\"\"
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import math
import sys
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Callable, ClassVar, TypeVar, Union, cast

from msrl_accel.config_types import Mismatch, bad_value, convert, one_of, show
from msrl_accel.errors import ConfigError

_Self = TypeVar("_Self", bound="Section")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_MISSING: Any = dataclasses.MISSING


def memoized(function: _Function) -> _Function:
    """`functools.cache` that keeps the signature for type checkers."""
    return cast(_Function, cache(function))


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a value must satisfy besides its type; in lists, what each item must satisfy."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    choices: tuple[Any, ...] = ()
    finite: bool = True

    def bounds(self) -> list[str]:
        """Bounds as text, such as ``["> 0", "<= 1"]``."""
        signs = {">": self.gt, ">=": self.ge, "<": self.lt, "<=": self.le}
        return [f"{sign} {bound}" for sign, bound in signs.items() if bound is not None]

    def broken(self, value: Any) -> str | None:
        """What is wrong with a value of the right type, or None."""
        if self.choices and value not in self.choices:
            return one_of(self.choices, value)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        if self.finite and not math.isfinite(value):
            return "must be finite"
        # Written as "not (inside)", so that NaN is outside of every bound.
        outside = (
            (self.gt is not None and not value > self.gt)
            or (self.ge is not None and not value >= self.ge)
            or (self.lt is not None and not value < self.lt)
            or (self.le is not None and not value <= self.le)
        )
        return f"must be {' and '.join(self.bounds())}" if outside else None


def Field(
    default: Any = _MISSING,
    *,
    default_factory: Any = _MISSING,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
    choices: tuple[Any, ...] = (),
    finite: bool = True,
) -> Any:
    """A field of a section. Without a default it must be given.

    Args:
        default: value when nothing else is given.
        default_factory: called without arguments for the default; for dicts and nested sections.
        gt, ge, lt, le: bounds of a number, or of each number of a list.
        choices: the only values accepted; ``Literal`` types state the same.
        finite: False accepts NaN and infinities.
    """
    rule = Rule(gt, ge, lt, le, tuple(choices), finite)
    return dataclasses.field(
        default=default, default_factory=default_factory, metadata={"rule": rule}
    )


class Section:
    """Base of configuration sections: subclasses become frozen dataclasses, checked when built.

    Keyword arguments are converted and checked as in a file; a wrong one raises `ConfigError`.
    """

    run_defaults: ClassVar[Mapping[str, Any]] = {}
    """Of an algorithm's section: its own defaults for the rest of the configuration."""
    fixed: ClassVar[tuple[str, ...]] = ()
    """Of an algorithm's section: fields that a resumed run must leave as they are."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True, init=False)(cls)

    def __init__(self, **values: Any) -> None:
        specs = fields_of(type(self))
        for name, value in values.items():
            if name not in specs:
                raise unknown_key(type(self), name, value)
        for name, spec in specs.items():
            raw = values[name] if name in values else spec.default()
            object.__setattr__(self, name, spec.convert(raw, name))

    def to_dict(self) -> dict[str, Any]:
        """Nested dict in field order, of values YAML can hold: tuples become lists."""
        return {name: _plain(getattr(self, name)) for name in fields_of(type(self))}

    def replace(self: _Self, **changes: Any) -> _Self:
        """A checked copy with the given fields changed."""
        values = {name: getattr(self, name) for name in fields_of(type(self))}
        return type(self)(**{**values, **changes})


@dataclasses.dataclass(frozen=True)
class FieldSpec:
    """One field of a section as `Field` and its annotation declare it."""

    name: str
    kind: Any
    rule: Rule
    declared: Any
    doc: str

    @property
    def section(self) -> type[Section] | None:
        """Class of the nested section, None for a value."""
        nested = isinstance(self.kind, type) and issubclass(self.kind, Section)
        return self.kind if nested else None

    @property
    def required(self) -> bool:
        """Whether there is no default."""
        return self.declared.default is _MISSING and self.declared.default_factory is _MISSING

    def default(self) -> Any:
        """A fresh default, or a `ConfigError` that asks for the value."""
        if self.required:
            flag = self.name.replace("_", "-")
            raise ConfigError(f"{self.name} is required: give --{flag}, or {self.name} in the file")
        if self.declared.default is not _MISSING:
            return self.declared.default
        return self.declared.default_factory()

    def convert(self, raw: Any, key: str) -> Any:
        """The value of the declared type; `key` is its dotted name in error messages."""
        if self.section is not None:
            if isinstance(raw, self.section):
                return raw
            if isinstance(raw, Mapping):
                return self.section(**raw)
            raise bad_value(key, raw, f"expected a section with {', '.join(fields_of(self.kind))}")
        try:
            value = convert(self.kind, raw)
        except Mismatch as mismatch:
            raise bad_value(key, raw, str(mismatch)) from None
        for item in value if isinstance(value, (tuple, list)) else (value,):
            problem = self.rule.broken(item)
            if problem:
                each = "each item " if item is not value else ""
                raise bad_value(key, raw, each + problem)
        return value


@memoized
def fields_of(cls: type[Section]) -> dict[str, FieldSpec]:
    """The fields of a section class by name, in order of declaration."""
    docs: dict[str, str] = {}
    kinds: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        docs.update(docs_of(base)[1] if issubclass(base, Section) else {})
        for name, annotation in vars(base).get("__annotations__", {}).items():
            kinds[name] = _resolve_annotation(annotation, base)
    declared: Any = cls
    return {
        f.name: FieldSpec(
            f.name, kinds[f.name], f.metadata.get("rule", Rule()), f, docs.get(f.name, "")
        )
        for f in dataclasses.fields(declared)
    }


@memoized
def docs_of(cls: type) -> tuple[str, dict[str, str]]:
    """Docstring of a class and the string literals under its own fields, from its source.

    Empty where the source is not available, as for classes typed into an interpreter.
    """
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError, SyntaxError):
        return "", {}
    if not isinstance(node, ast.ClassDef):
        return "", {}
    docs = {}
    for statement, after in zip(node.body, node.body[1:]):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        ):
            docs[statement.target.id] = inspect.cleandoc(after.value.value)
    return ast.get_docstring(node) or "", docs


class _UnionSyntax(ast.NodeTransformer):
    """Rewrites ``X | Y`` to ``Union[X, Y]``, which Python 3.9 can evaluate."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        left, right = self.visit(node.left), self.visit(node.right)
        items = ast.Tuple(elts=[left, right], ctx=ast.Load())
        return ast.Subscript(value=ast.Name("Union", ast.Load()), slice=items, ctx=ast.Load())


def _resolve_annotation(annotation: Any, owner: type) -> Any:
    """The type an annotation in the source of `owner` stands for."""
    if not isinstance(annotation, str):
        return annotation
    tree = ast.fix_missing_locations(_UnionSyntax().visit(ast.parse(annotation, mode="eval")))
    scope = {"Union": Union, **vars(sys.modules[owner.__module__])}
    return eval(compile(tree, f"<annotation in {owner.__qualname__}>", "eval"), scope)


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def leaf_keys(cls: type[Section], prefix: str = "") -> Iterator[str]:
    """Dotted keys of every value in a section and the sections inside it."""
    for name, spec in fields_of(cls).items():
        if spec.section is None:
            yield prefix + name
        else:
            yield from leaf_keys(spec.section, f"{prefix}{name}.")


def unknown_key(root: type[Section], key: str, value: Any) -> ConfigError:
    """The error for a dotted key that does not exist, naming the nearest ones that do."""
    near = nearest_keys(root, key)
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    else:
        section = key.rpartition(".")[0]
        siblings = [k for k in leaf_keys(root) if k.rpartition(".")[0] == section]
        hint = f"valid keys: {', '.join(siblings or fields_of(root))}"
    return ConfigError(f"unknown key {key} = {show(value)}: {hint}")


def nearest_keys(root: type[Section], key: str) -> list[str]:
    """Up to three keys that `key` may have meant.

    Similar names in the same section come first, then the same name in other sections; failing
    both, similar names anywhere, then a similar section.
    """
    section, _, name = key.rpartition(".")
    names = {k: k.rpartition(".")[2] for k in leaf_keys(root)}
    siblings = {n: k for k, n in names.items() if k.rpartition(".")[0] == section}
    longer = [n for n in siblings if len(name) > 2 and n.startswith(name)]
    similar = difflib.get_close_matches(name, siblings, n=1) or longer
    found = [siblings[n] for n in similar] + [k for k in names if names[k] == name]
    if not found:
        close = difflib.get_close_matches(name, names.values(), n=1, cutoff=0.75)
        found = [k for k in names if names[k] in close]
    if not found:
        top = difflib.get_close_matches(key.partition(".")[0], fields_of(root), n=1)
        found = [t for t in top if t != key.partition(".")[0]]
    return found[:3]


def flatten(
    root: type[Section], tree: Mapping[Any, Any], prefix: str = "", top: type[Section] | None = None
) -> Iterator[tuple[str, Any]]:
    """Dotted keys and raw values of a nested mapping whose own keys may be dotted.

    Raises `ConfigError` for keys that do not exist in `top` (default `root`).
    """
    top = top or root
    for key, value in tree.items():
        head, _, rest = str(key).partition(".")
        spec = fields_of(root).get(head)
        path = prefix + head
        if spec is None:
            full = f"{prefix}{key}"
            while isinstance(value, Mapping) and value:
                inner, value = next(iter(value.items()))
                full = f"{full}.{inner}"
            raise unknown_key(top, full, value)
        if spec.section is None:
            # Further parts of the key name entries of a free mapping (env_kwargs.gravity).
            for part in reversed(rest.split(".") if rest else []):
                value = {part: value}
            yield path, value
            continue
        if rest:
            value = {rest: value}
        elif isinstance(value, Section):
            value = value.to_dict()
        elif value is None:  # a heading in YAML with nothing under it
            value = {}
        if not isinstance(value, Mapping):
            names = ", ".join(fields_of(spec.section))
            raise bad_value(path, value, f"expected a section with keys {names}")
        yield from flatten(spec.section, value, f"{path}.", top)
