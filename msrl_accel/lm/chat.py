"""Chat templates: Jinja programs that come with a model, run in Jinja's sandbox.

They see what Hugging Face transformers gives them: messages, tools, the special tokens, and the
helpers `raise_exception`, `strftime_now` and `tojson`.
"""

from __future__ import annotations

import datetime
import functools
import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msrl_accel.errors import LMError
from msrl_accel.lm.sources import EXTRA

if TYPE_CHECKING:
    import jinja2

# A template is code from a stranger: what it may produce, and for how long, is bounded.
MAX_CHARACTERS = 10_000_000
MAX_SECONDS = 10.0


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """The text of a conversation as the model was trained to read it.

    Args:
        template: a Jinja template as in tokenizer_config.json.
        messages: each with at least `role` and `content`.
        add_generation_prompt: end with the words that open an answer.
        variables: what else the template may read: special tokens, `tools`, `enable_thinking`.

    Raises:
        LMError: the template is not valid, refuses the messages, tries to leave the sandbox, or
            produces too much.
    """
    jinja2 = _import_jinja()
    compiled = _compile(template)
    environment = compiled.environment
    environment.deadline = time.monotonic() + MAX_SECONDS  # type: ignore[attr-defined]
    pieces, size = [], 0
    try:
        for piece in compiled.generate(
            messages=messages, add_generation_prompt=add_generation_prompt, **variables
        ):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_CHARACTERS:
                raise LMError(f"the chat template writes more than {MAX_CHARACTERS} characters")
    except jinja2.TemplateError as error:
        raise LMError(f"the chat template refuses the messages: {error.message}") from error
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise LMError(f"the chat template fails on the messages: {error}") from error
    except (RecursionError, MemoryError) as error:
        raise LMError("the chat template takes too much memory") from error
    return "".join(pieces)


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    jinja2 = _import_jinja()
    try:
        return _environment().from_string(template)
    except (jinja2.TemplateError, RecursionError) as error:
        raise LMError(f"the chat template is not valid: {error}") from error


def _environment() -> jinja2.Environment:
    """One for each template, as it carries the deadline."""
    jinja2 = _import_jinja()
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """`{% generation %}` marks what an assistant says; the text is that of its body."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    class Bounded(ImmutableSandboxedEnvironment):
        """The sandbox, with limits on products and on time, which it looks at in every call."""

        intercepted_binops = frozenset(["*", "**"])
        deadline = 0.0

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**" or _product_size(left, right) > MAX_CHARACTERS:
                raise jinja2.exceptions.SecurityError(f"the operator {operator} is limited here")
            return super().call_binop(context, operator, left, right)

        # Names that no keyword of a template can collide with, as in Jinja itself.
        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
            if time.monotonic() > __self.deadline:
                raise jinja2.exceptions.SecurityError(f"it runs for more than {MAX_SECONDS} s")
            return super().call(__context, __obj, *args, **kwargs)

    class SafeNamespace(Namespace):
        """`namespace()` without the underscored attributes that Python itself would look at."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            self, *values = args
            attributes = dict(*values, **kwargs)
            for name in attributes:
                _check_attribute(name)
            Namespace.__init__(self, attributes)

        def __setitem__(self, name: Any, value: Any) -> None:
            _check_attribute(name)
            super().__setitem__(name, value)

    environment = Bounded(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = SafeNamespace
    return environment


def _product_size(left: Any, right: Any) -> int:
    """Length of a repeated text or list; 0 for a product of numbers."""
    for sequence, times in ((left, right), (right, left)):
        if hasattr(sequence, "__len__") and isinstance(times, int):
            return len(sequence) * times
    return 0


def _check_attribute(name: Any) -> None:
    if str(name).startswith("_"):
        raise _import_jinja().exceptions.SecurityError(f"namespaces cannot hold {name}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter escapes characters of HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise _import_jinja().TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _import_jinja() -> Any:
    try:
        import jinja2
        import jinja2.exceptions
        import jinja2.nodes
    except ImportError as error:
        raise LMError(f"chat templates need the package jinja2; {EXTRA}") from error
    return jinja2
