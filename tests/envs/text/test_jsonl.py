"""Data sets on disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrl_accel.envs.text import Scorer, TextTask, make_task
from msrl_accel.envs.text.base import Problem
from msrl_accel.envs.text.jsonl import split_problems
from msrl_accel.errors import EnvError


def write(folder: Path, rows: Sequence[Any]) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{i}+1", "answer": str(i + 1), "source": "made"} for i in range(count)]


def load(folder: Path, lines: Sequence[Any], **kwargs: Any) -> TextTask:
    return make_task(f"jsonl:{write(folder, lines)}", **kwargs)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_a_data_set_is_split_and_scored(tmp_path: Path) -> None:
    task = load(tmp_path, rows(100))
    held = {problem.prompt for problem in task.held_out(1000)}
    train = task.sample(rng(), 100 - len(held))
    assert 1 <= len(held) <= 30
    assert held | {problem.prompt for problem in train} == {row["prompt"] for row in rows(100)}
    assert train[0].meta["source"] == "made"
    assert len(task.sample(rng(), 250)) == 250  # it never runs out
    assert task.score(Problem("", "7"), " 7\n").value == 1.0
    same = make_task("text/jsonl", path=tmp_path / "data.jsonl")
    assert same.held_out(5) == task.held_out(5)
    assert set(task.characters) == set("0123456789+")


PROMPTS = st.lists(st.text(min_size=1).filter(str.strip), min_size=2, max_size=40)


@settings(deadline=None)
@given(PROMPTS, st.floats(0.01, 0.95))
def test_a_prompt_is_never_on_both_sides(prompts: list[str], fraction: float) -> None:
    problems = [Problem(prompt, "x") for prompt in [*prompts, *prompts[:3]]]
    if len({prompt.strip() for prompt in prompts}) < 2:
        return
    training, held = (
        [p.prompt.strip() for p in side] for side in split_problems(problems, fraction)
    )
    assert training and held
    assert not set(training) & set(held)
    assert len(set(held)) == len(held)


def test_a_prompt_keeps_its_side_when_the_data_set_grows(tmp_path: Path) -> None:
    small = {problem.prompt for problem in load(tmp_path, rows(200)).held_out(1000)}
    large = {problem.prompt for problem in load(tmp_path, rows(400)).held_out(1000)}
    assert small == {prompt for prompt in large if int(prompt[:-2]) < 200}


def test_keys_marks_and_numbers_of_other_data_sets(tmp_path: Path) -> None:
    lines = [{"question": f"q{i}", "solution": f"so\n#### {i}"} for i in range(5)]
    keys = {"prompt_key": "question", "answer_key": "solution", "answer_after": "####"}
    task = load(tmp_path, lines, reward="numeric", **keys)
    assert sorted(problem.answer for problem in task.problems) == ["0", "1", "2", "3", "4"]
    numbers = load(tmp_path, [{"prompt": "a", "answer": 3}, {"prompt": "b", "answer": 0.5}])
    assert [problem.answer for problem in numbers.problems] == ["3", "0.5"]


def test_marks_of_editors_are_no_content(tmp_path: Path) -> None:
    path = tmp_path / "bom.jsonl"
    text = (
        '\ufeff{"prompt": "a", "answer": "1"}\r\n\r\n  \n{"prompt": "b\u2028", "answer": "2"}\r\n'
    )
    path.write_bytes(text.encode("utf-8"))
    task = make_task(f"jsonl:{path}")
    assert [problem.prompt for problem in task.problems] == ["a", "b\u2028"]
    assert [problem.meta["line"] for problem in task.problems] == [1, 4]


def test_every_bad_line_is_named(tmp_path: Path) -> None:
    lines: list[Any] = [
        *rows(2),
        "{not json",
        [1, 2],
        {"prompt": "a"},
        {"prompt": "", "answer": "1"},
        {"prompt": ["a"], "answer": "1"},
        {"prompt": "a", "answer": None},
        {"prompt": "a", "answer": True},
        '{"prompt": "\\ud800", "answer": "1"}',
        {"prompt": "a", "answer": "many"},
    ]
    with pytest.raises(EnvError) as caught:
        load(tmp_path, lines, reward="numeric")
    message = str(caught.value)
    assert "9 bad lines" in message
    for number, reason in {
        3: "not JSON",
        4: "a JSON object is needed, not a list",
        5: "no key 'answer'; it has prompt",
        6: "'prompt' is empty",
        7: "'prompt' is a list; a text is needed",
        8: "'answer' is a NoneType",
        9: "'answer' is a bool",
        10: "surrogates not allowed",
        11: "the answer 'many' is not a number",
    }.items():
        assert any(
            line.startswith(f"  line {number}: ") and reason in line
            for line in message.splitlines()
        ), (number, message)


def test_many_bad_lines_are_all_numbered(tmp_path: Path) -> None:
    with pytest.raises(EnvError) as caught:
        load(tmp_path, ["x"] * 30 + [rows(1)[0]] + ["x"] * 2 + [rows(1)[0]] + ["x"])
    assert str(caught.value).splitlines()[-1] == "  and lines 21-30, 32-33, 35"


def test_answers_mathematics_cannot_read_fail_at_load(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    lines = [*rows(3), {"prompt": "p", "answer": "\\frac{"}, {"prompt": "q", "answer": "?!"}]
    with pytest.raises(EnvError, match="2 bad lines") as caught:
        load(tmp_path, lines, reward="math")
    assert "line 4: the answer '\\\\frac{' cannot be read as mathematics" in str(caught.value)
    with pytest.raises(EnvError, match="reward math: 2 bad lines"):
        Scorer(load(tmp_path, lines), "task + math")


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_data_set_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(EnvError, match="is empty"):
        load(tmp_path, [content])


def test_other_things_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match="No such file"):
        make_task(f"jsonl:{tmp_path}/none.jsonl")
    with pytest.raises(EnvError, match="Is a directory"):
        make_task(f"jsonl:{tmp_path}")
    with pytest.raises(EnvError, match="one prompt has none to hold out"):
        load(tmp_path, rows(1))
    assert load(tmp_path, rows(1), held_out_fraction=0).held_out(5) == []
    with pytest.raises(EnvError, match="held_out_fraction is 1"):
        load(tmp_path, rows(1), held_out_fraction=1)
    for reward in ("task", "exact + numeric", "0.5*exact"):
        with pytest.raises(EnvError, match="it must be one of exact, numeric, math"):
            load(tmp_path, rows(2), reward=reward)


def test_the_reward_of_a_data_set_is_its_task_reward(tmp_path: Path) -> None:
    task = load(tmp_path, rows(5), reward="faulty_rewards:length")
    with Scorer(task, workers=1) as one:
        (result,) = one.score(task.held_out(1), ["four"])
    assert result.value == 4.0
    assert result.parts == {"task": 4.0}
    assert task.score(Problem("", ""), "four").value == 4.0
    assert Scorer(load(tmp_path, rows(5), reward="numeric")).inline
