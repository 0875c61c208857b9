"""Tasks of reasoning-gym."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from msrl_accel.envs.text import Scorer, make_task
from msrl_accel.envs.text.reasoning import is_plain
from msrl_accel.errors import EnvError

NAMES = ["chain_sum", "countdown", "string_insertion", "leg_counting"]


@pytest.fixture(autouse=True)
def installed() -> None:
    pytest.importorskip("reasoning_gym")


@pytest.mark.parametrize("name", NAMES)
def test_problems_are_split_and_right_answers_earn_everything(name: str) -> None:
    task = make_task(f"reasoning_gym/{name}")
    held = task.held_out(5)
    assert len({problem.prompt for problem in held}) == 5
    assert held[:2] == task.held_out(2)
    sampled = task.sample(np.random.default_rng(0), 10)
    assert not {p.prompt for p in held} & {p.prompt for p in sampled}
    for problem in sampled:
        assert task.score(problem, task.demonstrate(problem)).value == 1.0
        assert task.score(problem, f"hm. <answer>{problem.answer}</answer>").value == 1.0
        assert task.score(problem, "no idea").value < 1.0


def test_worker_processes_judge_the_same_problems() -> None:
    task = make_task("reasoning_gym/leg_counting", seed=5, max_animals=4)
    problems = task.sample(np.random.default_rng(1), 6)
    with Scorer(task, workers=2) as pair:
        scores = pair.score(problems, [p.answer if i % 2 else "-1" for i, p in enumerate(problems)])
    assert [score.value for score in scores] == [0.0, 1.0] * 3


def test_another_seed_is_noticed() -> None:
    problem = make_task("reasoning_gym/chain_sum", seed=1).held_out(1)[0]
    with pytest.raises(ValueError, match="another problem of the same index"):
        make_task("reasoning_gym/chain_sum", seed=2).score(problem, "1")


def test_answers_with_code_in_them_are_not_evaluated(tmp_path: object) -> None:
    task = make_task("reasoning_gym/countdown")
    problem = task.held_out(1)[0]
    mark = f"{tmp_path}/mark"
    result = task.score(problem, f"open('{mark}', 'w').write('x')")
    assert result.value == 0.0
    assert "must not see" in result.reason
    assert not __import__("os").path.exists(mark)


@pytest.mark.parametrize(
    ("answer", "plain"),
    [
        ("94*4 - 61 - 6", True),
        ("-3*exp(x)*sin(x)/2 + C", True),
        ("AABCD", True),
        ("['A', 'B']", True),
        ("[[0, 1], [2, 3]]", True),
        ("open('x')", False),
        ("().__class__", False),
        ("f'{open(1)}'", False),
        ("x'{y}'", False),
        ("eval(x)", False),
        ("lambda: 1", False),
        ("[y for y in x]", False),
        ("'unclosed", False),
    ],
)
def test_plain_answers(answer: str, plain: bool) -> None:
    assert is_plain(answer) == plain


def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvError, match="did you mean countdown"):
        make_task("reasoning_gym/countdwn")
    with pytest.raises(EnvError, match="unexpected keyword argument 'difficulty'"):
        make_task("reasoning_gym/countdown", difficulty=3)
    graph = make_task("reasoning_gym/graph_color")
    with pytest.raises(EnvError, match="cannot be demonstrated"):
        graph.demonstrate(graph.held_out(1)[0])
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(EnvError, match=r"pip install 'msrl_accel\[reasoning\]'"):
        make_task("reasoning_gym/countdown")
