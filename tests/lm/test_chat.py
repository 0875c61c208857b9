"""Chat templates: what published ones need, and what hostile ones try."""

from __future__ import annotations

import datetime

import pytest

from msrl_accel.errors import LMError
from msrl_accel.lm import chat
from msrl_accel.lm.chat import render_chat

pytest.importorskip("jinja2")

USER = [{"role": "user", "content": "Is 1 < 2?"}]
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_conversation():
    messages = [{"role": "system", "content": "Be brief."}, *USER]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nIs 1 < 2?<|im_end|>\n"
    assert render_chat(CHATML, messages, add_generation_prompt=False) == text
    assert render_chat(CHATML, messages) == text + "<|im_start|>assistant\n"


def test_helpers_that_templates_expect():
    template = (
        "{%- set ns = namespace(last=0) -%}\n"
        "{%- for m in messages -%}\n"
        "    {%- if loop.index0 == 1 %}{% break %}{% endif -%}\n"
        "    {%- set ns.last = loop.index -%}\n"
        "    {% generation %}{{ m.content | trim }}{% endgeneration %}\n"
        "{%- endfor %}\n"
        "{{ tools | tojson }}{{ tools | tojson(indent=1) }}{{ ns.last }}{{ bos_token }}"
        "{{ strftime_now('%Y') }}"
    )
    text = render_chat(template, USER * 2, tools=[{"a": "é<&'"}], bos_token="<s>")
    year = datetime.datetime.now().year
    expected = 'Is 1 < 2?[{"a": "é<&\'"}][\n {\n  "a": "é<&\'"\n }\n]1<s>'
    assert text in (f"{expected}{year}", f"{expected}{year + 1}")


def test_blocks_leave_no_lines_behind():
    template = "{% if true %}\nA\n    {% endif %}\nB\n"
    assert render_chat(template, USER) == "A\nB"


def test_a_template_may_refuse():
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(LMError, match="roles must alternate"):
        render_chat(template, USER)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% if", "not valid"),
        ("{{ 1 + }}", "not valid"),
        ("{{ messages[5].content.more }}", "no element 5"),
        ("{{ messages[0].content + 3 }}", "str"),
        ("{{ 1 / 0 }}", "zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "memory"),
    ],
)
def test_mistakes_of_a_template(template, words):
    with pytest.raises(LMError, match=words):
        render_chat(template, USER)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ (messages | attr('__class__')).mro() }}",
        "{{ '{0.__class__.__mro__}'.format(messages) | length // 0 }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__html__ = 1 %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_nothing_leaves_the_sandbox(template):
    messages = [dict(m) for m in USER]
    with pytest.raises(LMError):
        render_chat(template, messages)
    assert messages == USER


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 1000000000 }}",
        "{{ 1000000000 * [1] }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
    ],
)
def test_size_is_bounded(template):
    with pytest.raises(LMError):
        render_chat(template, USER)


def test_time_is_bounded(monkeypatch):
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.1)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(LMError, match="runs for more than"):
        render_chat(loops, USER)


def test_products_of_numbers_are_free():
    assert render_chat("{{ 6 * 7 }}{{ '-' * 3 }}{{ 2 * 0.5 }}", USER) == "42---1.0"
