"""Built-in tasks: valid problems, right answers by independent means, no leak between splits."""

from __future__ import annotations

import json
import re
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrl_accel.envs.text import (
    Problem,
    Reward,
    TextTask,
    built_in_characters,
    is_text_id,
    make_task,
)
from msrl_accel.envs.text.answers import final_answer, last_number, to_number
from msrl_accel.envs.text.expressions import evaluate_expression
from msrl_accel.errors import EnvError

STYLES = st.sampled_from(["plain", "instruction"])
TASKS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "text/addition": {"digits": st.integers(1, 9), "terms": st.integers(2, 5)},
    "text/multiplication": {"digits": st.integers(1, 5), "terms": st.integers(2, 3)},
    "text/countdown": {"numbers": st.integers(2, 5), "limit": st.integers(5, 100)},
    "text/sorting": {"length": st.integers(2, 9), "digits": st.integers(1, 6)},
    "text/format": {"letters": st.integers(2, 9), "rules": st.integers(1, 6)},
}


@st.composite
def tasks(draw: st.DrawFn) -> TextTask:
    env_id = draw(st.sampled_from(sorted(TASKS)))
    kwargs = {name: draw(values) for name, values in TASKS[env_id].items()}
    return make_task(env_id, style=draw(STYLES), **kwargs)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@settings(max_examples=60, deadline=None)
@given(tasks(), st.integers(0, 2**32))
def test_problems_are_valid_and_demonstrations_earn_everything(task: TextTask, seed: int) -> None:
    problems = task.sample(rng(seed), 20)
    assert len(problems) == 20
    assert problems == task.sample(rng(seed), 20)
    assert task.characters == "".join(sorted(set(task.characters)))
    for problem in problems:
        shown = task.demonstrate(problem)
        assert task.score(problem, shown).value == 1.0
        assert task.score(problem, shown + "\n").value == 1.0
        assert set(problem.prompt + shown) <= set(task.characters)
        assert json.loads(json.dumps(problem.meta)) == problem.meta
        assert task.score(problem, "").value == 0.0


@settings(max_examples=30, deadline=None)
@given(tasks())
def test_held_out_problems_are_distinct_fixed_and_never_sampled(task: TextTask) -> None:
    held = task.held_out(30)
    assert held
    assert held[:7] == task.held_out(7)
    keys = [canonical(task.name, problem) for problem in held]
    assert len(set(keys)) == len(keys)
    sampled = {canonical(task.name, problem) for problem in task.sample(rng(), 300)}
    assert not sampled & set(keys)


def canonical(name: str, problem: Problem) -> Any:
    """What makes two problems the same for a person: not the order of 3+5 and 5+3."""
    meta = problem.meta
    if name == "text/format":
        return meta["word"], meta["rules"]
    return tuple(sorted(meta["numbers"])), meta.get("target")


def test_styles_and_difficulties_share_the_split() -> None:
    plain, words = (make_task("text/addition", digits=1, style=s) for s in ("plain", "instruction"))
    longer = make_task("text/addition", digits=2)
    held = {canonical("text/addition", problem) for problem in plain.held_out(100)}
    assert held == {canonical("text/addition", problem) for problem in words.held_out(100)}
    assert not held & {canonical("text/addition", p) for p in longer.sample(rng(), 3000)}


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(2, 4), st.sampled_from(["addition", "multiplication"]))
def test_arithmetic_is_right(digits: int, terms: int, kind: str) -> None:
    task = make_task(f"text/{kind}", digits=digits, terms=terms)
    for problem in task.sample(rng(digits), 10):
        assert problem.prompt[-1] == "="
        expected = eval(problem.prompt[:-1])
        assert problem.answer == str(expected)
        assert problem.prompt.count("+" if kind == "addition" else "*") == terms - 1
        assert max(map(int, problem.prompt[:-1].replace("*", "+").split("+"))) < 10**digits
        for wrong in (str(expected + 1), f"{expected}0", f"{expected} {expected}", f"0{expected}"):
            assert task.score(problem, wrong).value == 0.0


def test_arithmetic_in_english_takes_the_last_number() -> None:
    task = make_task("text/multiplication", style="instruction")
    problem = Problem("What is 12 * 100?", "1200", {"numbers": [12, 100]})
    for right in ("1200", "12 * 100 = 1,200.", "<answer>1200</answer> or 7", "It is 1200.0"):
        assert task.score(problem, right).value == 1.0, right
    for wrong in ("1200 - 1", "-1200", "1201", "none"):
        assert task.score(problem, wrong).value == 0.0, wrong


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 5), st.integers(5, 50), st.sampled_from(["+-*", "+-", "+-*/", "*+"]))
def test_countdown_solutions_are_right(numbers: int, limit: int, operators: str) -> None:
    task = make_task("text/countdown", numbers=numbers, limit=limit, operators=operators)
    for problem in task.sample(rng(limit), 5):
        given_text, target = problem.prompt[:-1].split(":")
        given_numbers = [int(text) for text in given_text.split(",")]
        assert len(given_numbers) == numbers
        assert max(given_numbers) <= limit
        used = [int(t) for t in "".join(c if c.isdigit() else " " for c in problem.answer).split()]
        assert not Counter(used) - Counter(given_numbers)
        assert int(target) not in given_numbers
        assert Fraction(eval(problem.answer)) == int(target)


def test_countdown_judges_any_expression() -> None:
    task = make_task("text/countdown")
    problem = Problem("", "", {"numbers": [2, 3, 7, 7, 12], "target": 24})
    for right in ("12*2", " 12 * (3 - 7/7) ", "-(7-7-12)*2", "<answer>2*12</answer>"):
        assert task.score(problem, right).value == 1.0, right
    for wrong, reason in {
        "24": "24 is used more often than it is given",
        "12*(7+7)/7": "7 is used more often than it is given",
        "12+7": "the value is 19, not 24",
        "12/(7-7)": "not an expression: division by zero",
        "12*2=24": "not an expression: unexpected '='",
    }.items():
        assert task.score(problem, wrong) == Reward(0.0, reason)
    english = make_task("text/countdown", style="instruction")
    assert english.score(problem, "12 * (3 - 7 / 7) = 24").value == 1.0


EXPRESSIONS = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner).map("".join),
        inner.map(lambda text: f"({text})"),
        inner.map(lambda text: f"-({text})"),
    ),
    max_leaves=12,
)


@given(EXPRESSIONS)
def test_expressions_evaluate_as_in_exact_arithmetic(text: str) -> None:
    exact = re.sub(r"\d+", r"Fraction(\g<0>)", text)
    try:
        expected = eval(exact, {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="division by zero"):
            evaluate_expression(text)
        return
    assert evaluate_expression(text) == (expected, [int(t) for t in re.findall(r"\d+", text)])


@pytest.mark.parametrize(
    "text",
    ["", "(", ")", "1+", "*2", "1 2", "2**3", "(1", "1)", "1.5", "x", "__import__('os')", "2^3"],
)
def test_what_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"unexpected|ends too early|not closed"):
        evaluate_expression(text)


@pytest.mark.parametrize("text", ["9" * 31, "+".join("1" * 200), "(" * 5000, "-" * 5000 + "1"])
def test_expressions_of_unreasonable_length_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="too long"):
        evaluate_expression(text)


def test_sorting_is_right() -> None:
    task = make_task("text/sorting", length=5, digits=3)
    for problem in task.sample(rng(), 20):
        numbers = json.loads(f"[{problem.prompt[:-1]}]")
        assert json.loads(f"[{problem.answer}]") == sorted(numbers)
        assert task.score(problem, ",".join(map(str, sorted(numbers)[::-1]))).value == float(
            sorted(numbers) == sorted(numbers)[::-1]
        )
    english = make_task("text/sorting", length=3, style="instruction")
    problem = Problem("", "3,20,100")
    assert english.score(problem, "Of 20, 3, 100: 3, 20 and 100.").value == 1.0
    assert english.score(problem, "3, 20, 100, 100").value == 0.0


def test_format_follows_its_rules() -> None:
    task = make_task("text/format", letters=3, rules=6)
    (problem,) = task.sample(rng(), 1)
    word = problem.meta["word"]
    a, b, c = word.upper()
    assert problem.prompt == f"{word}|rU-2[!="
    assert problem.answer == f"[{c}-{b}-{a} {c}-{b}-{a}]!"
    assert task.score(problem, problem.answer[:-1]).value == pytest.approx(0.5 * 3 / 4)
    assert task.score(problem, (word[::-1] * 2)).value == 0.0
    assert task.score(problem, f"[{a}-{b}-{c} {a}-{b}-{c}]!").value == float(a == c)


def test_only_the_exact_text_earns_more_than_half() -> None:
    task = make_task("text/format", letters=3, rules=1)
    for problem in task.sample(rng(), 50):
        word = problem.meta["word"]
        everything = f"[{'-'.join(word.upper())}]!"
        assert task.score(problem, everything).value <= 0.5


@pytest.mark.parametrize(
    ("env_id", "kwargs", "message"),
    [
        ("text/additon", {}, r"'text/additon' is not known. Did you mean text/addition"),
        ("text/addition", {"digit": 2}, r"no argument 'digit'.*Did you mean digits\?"),
        ("text/addition", {"digits": 0}, "digits is 0; it must be an integer from 1 to 15"),
        ("text/addition", {"digits": "2"}, "digits is '2'"),
        ("text/addition", {"digits": True}, "digits is True"),
        ("text/sorting", {"style": "loud"}, "style is 'loud'; choose one of plain, instruction"),
        ("text/countdown", {"operators": "^"}, r"operators is '\^'"),
        ("text/jsonl", {}, "missing 1 required positional argument: 'path'"),
        ("no_such_module:Task", {}, "cannot import the module 'no_such_module'"),
        ("faulty_rewards:no_task", {}, "makes a int; it must be a TextTask"),
        ("faulty_rewards:not_callable", {}, "is no TextTask"),
        ("faulty_rewards:Mine", {"bonus": 1, "x": 2}, "no argument 'x'; it takes bonus"),
    ],
)
def test_wrong_ids_and_arguments(env_id: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvError, match=message):
        make_task(env_id, **kwargs)


def test_hopeless_difficulties_end_with_an_error() -> None:
    with pytest.raises(EnvError, match="hardly ever make a target"):
        make_task("text/countdown", numbers=8, limit=2, operators="/").sample(rng(), 1)


def test_ids() -> None:
    assert is_text_id("text/addition")
    assert is_text_id("jsonl:/data/x.jsonl")
    assert is_text_id("reasoning_gym/countdown")
    assert not is_text_id("CartPole-v1")
    assert make_task("text/addition", digits=3).origin == ("text/addition", {"digits": 3})


def test_built_in_characters_cover_every_task_at_any_difficulty() -> None:
    for env_id, name in {
        "text/addition": "digits",
        "text/multiplication": "digits",
        "text/countdown": "numbers",
        "text/sorting": "length",
        "text/format": "rules",
    }.items():
        for value in (2, 6):
            assert set(make_task(env_id, **{name: value}).characters) <= set(built_in_characters())


@given(st.fractions(max_denominator=1000))
def test_numbers_are_read_exactly(number: Fraction) -> None:
    assert to_number(str(number)) == number
    assert last_number(f"from 3 to 5 it is {number}, I think.") == number


@given(st.integers(-(10**12), 10**12))
def test_thousands_separators(number: int) -> None:
    assert last_number(f"${number:,}") == number


@given(st.decimals(-1000, 1000, allow_nan=False, places=4))
def test_decimals(number: Any) -> None:
    assert last_number(f"x = {number}") == Fraction(number)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5-3", 3),
        ("x=-3", -3),
        ("(-3)", -3),
        ("2 - 3", 3),
        ("1e3", 1000),
        (".5", Fraction(1, 2)),
        ("3, 1, 2", 2),
        ("1,23", 23),
        ("5.", 5),
        ("1/0", None),
        ("none", None),
        ("", None),
        ("9" * 1000, None),
    ],
)
def test_last_numbers(text: str, expected: Any) -> None:
    assert last_number(text) == expected


def test_a_huge_exponent_takes_no_time() -> None:
    assert last_number("1e999999999") == 999999999  # no exponent, so `1e` is some word


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("plain ", "plain"),
        ("so\n#### 42", "42"),
        ("<answer> 3 </answer>", "3"),
        ("<answer>1</answer> no <answer>2</answer>.", "2"),
        ("<answer>#### 5</answer>", "#### 5"),
        ("<answer>open", "<answer>open"),
    ],
)
def test_final_answers(text: str, answer: str) -> None:
    assert final_answer(text) == answer
