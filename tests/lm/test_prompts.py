"""Problems as tokens."""

from __future__ import annotations

import numpy as np
import pytest

from msrl_accel.envs.text import Problem, make_task
from msrl_accel.errors import LMError
from msrl_accel.lm.opening import load_description, open_model, save_description
from msrl_accel.lm.prompts import PromptEncoder
from msrl_accel.lm.tokenizer import CharTokenizer

pytest.importorskip("jinja2")
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def chatting():
    tokenizer = CharTokenizer.for_tasks()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_a_prompt_is_its_text_or_a_message():
    problem = Problem("1+2=", "3")
    plain, chat = CharTokenizer.for_tasks(), chatting()
    assert plain.decode(PromptEncoder(plain).prompt(problem)) == "1+2="
    assert chat.decode(PromptEncoder(chat).prompt(problem)) == "u:1+2=\na:"
    assert chat.decode(PromptEncoder(chat, "plain").prompt(problem)) == "1+2="
    told = PromptEncoder(chat, system_prompt="Be brief.").prompt(problem)
    assert chat.decode(told) == "s:Be brief.\nu:1+2=\na:"


def test_what_cannot_be_is_refused():
    with pytest.raises(LMError, match="no chat template"):
        PromptEncoder(CharTokenizer.for_tasks(), "chat")
    with pytest.raises(LMError, match="system_prompt = 'x'"):
        PromptEncoder(CharTokenizer.for_tasks(), system_prompt="x")
    endless = CharTokenizer.for_tasks()
    endless.eos_ids = ()
    with pytest.raises(LMError, match="no end token"):
        PromptEncoder(endless)


def test_demonstrations_are_right_answers_with_an_end():
    task, tokenizer = make_task("text/addition"), CharTokenizer.for_tasks()
    problems = task.sample(np.random.default_rng(0), 20)
    examples = PromptEncoder(tokenizer).demonstrations(task, problems)
    for n, problem in enumerate(problems):
        tokens = examples.tokens[n, : examples.lengths[n]]
        assert tokens[-1] == tokenizer.eos_ids[0]
        assert tokenizer.decode(tokens) == problem.answer
        assert tokenizer.decode(examples.prompts[n]) == problem.prompt
    np.testing.assert_array_equal(examples.mask.sum(axis=1), examples.lengths)


def test_a_new_model_knows_the_characters_of_its_task(tmp_path):
    opened = open_model(None, positions=100, characters="aé+")
    assert opened.arrays is None
    assert opened.config.max_positions >= 100
    assert opened.tokenizer.decode(opened.tokenizer.encode("é~ 3")) == "é~ 3"
    save_description(tmp_path / "tokenizer", opened)
    again = load_description(tmp_path / "tokenizer")
    assert again.config == opened.config
    assert again.tokenizer.encode("é~ 3") == opened.tokenizer.encode("é~ 3")
    assert again.tokenizer.eos_ids == opened.tokenizer.eos_ids
