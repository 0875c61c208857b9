"""Public bug reports of neighbouring projects about language models, by kind of fault."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from msrl_accel.envs.text import Problem, RewardSpec, Scorer, make_task, usable_groups
from msrl_accel.envs.text.rewards import build_reward

T = TypeVar("T")


def in_thread(call: Callable[[], T]) -> T:
    """The result of `call` in another thread than the main one, or its exception."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


# verl PR 5635: off the main thread math_verify's alarm fails, and every score is 0


def test_mathematics_is_judged_right_whatever_thread_scores() -> None:
    pytest.importorskip("math_verify")
    problems = [Problem("half?", "1/2")] * 3
    completions = [r"\boxed{\frac{1}{2}}", "It is 0.5", "It is 0.4"]
    with Scorer(make_task("text/addition"), "math", workers=2) as scorer:
        scores = in_thread(lambda: scorer.score(problems, completions))
    assert [score.value for score in scores] == [1.0, 1.0, 0.0]


def test_a_verifier_that_needs_the_main_thread_never_answers_0_outside_of_it() -> None:
    pytest.importorskip("math_verify")
    reward = build_reward(RewardSpec("math"))
    with pytest.raises(ValueError, match="thread"):
        in_thread(lambda: reward(Problem("half?", "1/2"), "0.5"))
    with Scorer(make_task("text/addition"), "math", workers=0) as scorer:
        (score,) = in_thread(lambda: scorer.score([Problem("half?", "1/2")], ["0.5"]))
    assert score.value is None
    assert "thread" in score.reason


def test_a_verifier_that_runs_out_of_time_has_failed_and_its_group_is_left_out() -> None:
    pytest.importorskip("math_verify")
    problems = [Problem("three?", "3")] * 4
    completions = ["3", "4", "3", "$9^{9^{9^{9}}}$"]
    rewards = [{"name": "math", "kwargs": {"seconds": 1}}]
    with Scorer(make_task("text/addition"), rewards, workers=2) as scorer:
        scores = scorer.score(problems, completions)
        assert scorer.restarts == 0
    assert [score.value for score in scores] == [1.0, 0.0, 1.0, None]
    assert "TimeoutException" in scores[3].reason
    assert usable_groups(scores, 2).tolist() == [True, False]


@pytest.mark.parametrize(
    "function",
    [
        "operator:truediv",  # raises: a Problem cannot be divided
        "builtins:print",  # returns None
        "os:abort",  # raises: it takes no arguments
        "builtins:isinstance",  # raises
    ],
)
def test_a_reward_function_that_fails_is_no_reward_of_0(function: str) -> None:
    problem = Problem("2+3=", "5")
    with Scorer(make_task("text/addition"), f"task + {function}", workers=1) as scorer:
        (score,) = scorer.score([problem], ["5"])
    assert score.value is None
    assert score.parts == {"task": 1.0, function: None}
    assert function in score.reason
