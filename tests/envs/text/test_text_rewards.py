"""Built-in reward functions and formulas of several."""

from __future__ import annotations

from typing import Any

import pytest

from msrl_accel.envs.text import Problem, RewardSpec, parse_rewards
from msrl_accel.envs.text.rewards import build_reward
from msrl_accel.errors import EnvError


def value(name: str, answer: str, completion: str, **kwargs: Any) -> float:
    return build_reward(RewardSpec(name, kwargs=kwargs))(Problem("", answer), completion).value


def test_exact() -> None:
    assert value("exact", "Paris", " Paris\n") == 1.0
    assert value("exact", "Paris", "I think so. <answer>Paris</answer>") == 1.0
    assert value("exact", "Paris", "paris") == 0.0
    assert value("exact", "Paris", "paris", ignore_case=True) == 1.0
    assert value("exact", "Paris", "It is Paris") == 0.0


def test_numeric() -> None:
    assert value("numeric", "1,000", "So 1000.0") == 1.0
    assert value("numeric", "0.1", "1/10") == 1.0
    assert value("numeric", "3", "3 or 4") == 0.0
    assert value("numeric", "3", "#### 3") == 1.0
    assert value("numeric", "100", "101", tolerance=0.01) == 1.0
    assert value("numeric", "100", "102", tolerance=0.01) == 0.0
    assert value("numeric", "3", "three") == 0.0


def test_format() -> None:
    good = "<think>2 + 3\nis 5</think>\n<answer>5</answer>"
    assert value("format", "5", good) == 1.0
    assert value("format", "5", "<answer>5</answer>") == 0.0
    assert value("format", "5", good + " and more") == 0.0
    assert value("format", "5", "[5]", pattern=r"\[.*\]") == 1.0


MATH = [
    ("1/2", r"The answer is \boxed{\frac{1}{2}}.", 1.0),
    (r"\frac{1}{2}", "The answer is 0.5", 1.0),
    (r"\frac{1}{2}", r"<answer>\frac12</answer>", 1.0),
    ("42", "#### 42", 1.0),
    ("x+1", "$1+x$", 1.0),
    (r"\sqrt{8}", r"$2\sqrt{2}$", 1.0),
    ("42", "$43$", 0.0),
    ("42", "no idea", 0.0),
]


@pytest.mark.parametrize(("answer", "completion", "expected"), MATH)
def test_math(answer: str, completion: str, expected: float) -> None:
    pytest.importorskip("math_verify")
    assert value("math", answer, completion) == expected


def test_a_right_answer_math_cannot_read_is_a_failure_and_no_0() -> None:
    pytest.importorskip("math_verify")
    with pytest.raises(ValueError, match="cannot be read as mathematics"):
        value("math", r"\frac{", "42")
    with pytest.raises(ValueError, match="'three' is not a number"):
        value("numeric", "three", "3")


def test_a_missing_math_verify_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(EnvError, match=r"pip install 'msrl_accel\[lm\]'"):
        build_reward(RewardSpec("math"))


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("task", [("task", 1.0)]),
        ("task+format", [("task", 1.0), ("format", 1.0)]),
        ("0.5*math + 2 * my.module:f", [("math", 0.5), ("my.module:f", 2.0)]),
        ("1e+2*exact + -0.1*m:f.g", [("exact", 100.0), ("m:f.g", -0.1)]),
        (["task", {"name": "format", "weight": 0.2}], [("task", 1.0), ("format", 0.2)]),
        ([RewardSpec("exact", 3.0)], [("exact", 3.0)]),
    ],
)
def test_formulas(formula: Any, expected: list[tuple[str, float]]) -> None:
    assert [(spec.name, spec.weight) for spec in parse_rewards(formula)] == expected


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        ("", "'' is not understood"),
        ([], "rewards is empty"),
        ("task - exact", "not understood; write NAME or WEIGHT"),
        ("tsk", "reward 'tsk' is not known; use task, exact, numeric, math, format or module:fun"),
        ("task + task", "'task' is named twice"),
        ("0*task", "must be a finite number other than 0"),
        ("1.2.3*task", "the weight of"),
        ([{"name": "exact", "weight": float("nan")}], "the weight of 'exact'"),
        ([{"nme": "exact"}], "must have the keys name"),
    ],
)
def test_wrong_formulas(formula: Any, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        parse_rewards(formula)


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("exact", {"case": True}, "unexpected keyword argument 'case'"),
        ("numeric", {"tolerance": -1}, "tolerance is -1"),
        ("format", {"pattern": "("}, "pattern '\\('"),
        ("math", {"seconds": 0}, "seconds is 0"),
    ],
)
def test_wrong_arguments(name: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvError, match=message):
        build_reward(RewardSpec(name, kwargs=kwargs))
