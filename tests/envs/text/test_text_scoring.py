"""Scoring with verifiers that work, raise, hang, die or return what is no reward."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from msrl_accel.envs.text import (
    Problem,
    Score,
    Scorer,
    describe_failures,
    make_task,
    usable_groups,
)
from msrl_accel.errors import EnvError

PROBLEM = Problem("2+3=", "5", {"numbers": [2, 3]})


Children = Callable[[], set[psutil.Process]]


@pytest.fixture(autouse=True)
def new_children() -> Iterator[Children]:
    """Processes the test has started that are there still: none at its end."""
    before = set(psutil.Process().children(recursive=True))

    def new() -> set[psutil.Process]:
        return set(psutil.Process().children(recursive=True)) - before

    yield new
    assert not new()


def scorer(rewards: Any = "faulty_rewards:obey", **settings: Any) -> Scorer:
    return Scorer(
        make_task("text/addition"), rewards, **{"workers": 1, "timeout": 20.0, **settings}
    )


def score(with_scorer: Scorer, *completions: str) -> list[Score]:
    return with_scorer.score([PROBLEM] * len(completions), completions)


@pytest.fixture
def obey() -> Iterator[Any]:
    """Scores by `faulty_rewards:obey` in one worker."""
    with scorer() as mine:
        yield lambda *completions: score(mine, *completions)


def test_values_of_several_kinds_become_floats(obey: Any) -> None:
    scores = obey("numpy", "bool", "reward", "else")
    assert [s.value for s in scores] == [0.5, 1.0, 0.25, 1.0]
    assert scores[2].reason == "a quarter"


def test_exceptions_are_reported_with_the_childs_traceback_and_never_as_0(obey: Any) -> None:
    good, raised, exited, after = obey("fine", "raise", "exit", "fine")
    assert (good.value, after.value) == (1.0, 1.0)
    assert raised.value is None and raised.failed
    assert raised.parts == {"faulty_rewards:obey": None}
    assert raised.reason == "faulty_rewards:obey: LocalError: local error 1 2"
    assert "in deep_inside" in raised.traceback
    assert exited.value is None and "SystemExit" in exited.reason


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("nan", "the reward is nan"),
        ("nan in a reward", "the reward is nan"),
        ("inf", "the reward is inf"),
        ("none", "the reward is a NoneType, not a number"),
        ("text", "the reward is a str, not a number"),
        ("list", "the reward is a list, not a number"),
        ("complex", "the reward is a complex, not a number"),
    ],
)
def test_what_is_no_number_is_no_reward(completion: str, reason: str) -> None:
    with scorer(workers=0) as here:
        (result,) = score(here, completion)
    assert result.value is None
    assert reason in result.reason


def test_what_is_no_number_is_reported_by_a_worker_too(obey: Any) -> None:
    nan, none, after = obey("nan", "none", "fine")
    assert nan.value is None and "the reward is nan" in nan.reason
    assert none.value is None and "NoneType" in none.reason
    assert after.value == 1.0


def test_memory_is_limited() -> None:
    with scorer(memory_mb=512) as limited:
        eaten, after = score(limited, "memory", "fine")
        assert limited.restarts == 0
    assert eaten.value is None and "MemoryError" in eaten.reason
    assert after.value == 1.0


@pytest.mark.parametrize(
    ("completion", "how"),
    [("die", "exit code 7"), ("kill", "signal SIGKILL"), ("segfault", "signal SIGSEGV")],
)
def test_a_dead_worker_is_replaced_and_nothing_else_is_lost(completion: str, how: str) -> None:
    with scorer(workers=2) as pair:
        scores = score(pair, "fine", completion, *["fine"] * 6)
        assert pair.restarts == 2  # tried twice
    assert scores[1].value is None
    assert f"its worker process died ({how})" in scores[1].reason
    assert [s.value for s in scores[:1] + scores[2:]] == [1.0] * 7
    if completion == "segfault":
        assert "string_at" in scores[1].traceback


def test_an_item_whose_worker_died_by_accident_is_scored_by_the_next(tmp_path: Path) -> None:
    with scorer("faulty_rewards:dies_once") as one:
        (result,) = score(one, str(tmp_path / "mark"))
        assert one.restarts == 1
    assert result.value == 1.0


@pytest.mark.parametrize("completion", ["hang", "compute"])
def test_a_hanging_verifier_is_killed_and_its_place_shown(completion: str) -> None:
    with scorer(timeout=2.0) as one:
        hung, after = score(one, completion, "fine")
        assert one.restarts == 1
    assert hung.value is None
    assert "no answer within 2 s (timeout)" in hung.reason
    place = {"hang": "sleep_for_ever", "compute": "compute_for_ever"}[completion]
    assert place in hung.traceback
    assert after.value == 1.0


def test_what_a_verifier_started_ends_with_it(tmp_path: Path) -> None:
    with scorer("faulty_rewards:spawns", timeout=3.0) as one:
        score(one, str(tmp_path / "pid"))
    pid = int((tmp_path / "pid").read_text())
    gone = not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert gone


def test_verifiers_that_lose_every_worker_stop_the_run() -> None:
    one = scorer("faulty_rewards:obey", workers=2)
    with pytest.raises(EnvError, match=r"12 scoring workers.*faulty_rewards:obey.*exit code 7"):
        score(one, *["die"] * 20)
    with pytest.raises(EnvError, match="closed"):
        score(one, "fine")


def test_an_alarm_left_behind_does_not_end_the_next_item(obey: Any) -> None:
    first, _ = obey("late alarm", "fine")
    assert first.value == 1.0
    time.sleep(1.1)
    assert obey("fine")[0].value == 1.0


def test_verifiers_run_in_a_main_thread_whatever_thread_scores() -> None:
    results: list[Score] = []
    with scorer("faulty_rewards:main_thread") as one:
        thread = threading.Thread(target=lambda: results.extend(score(one, "x")))
        thread.start()
        thread.join()
    assert results[0].value == 1.0


def test_two_threads_may_score_at_once() -> None:
    results: dict[int, list[Score]] = {}
    with scorer("faulty_rewards:slow", workers=2) as pair:

        def work(number: int) -> None:
            results[number] = score(pair, *[str(10 * number + i) for i in range(5)])

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number in range(3):
        assert [s.value for s in results[number]] == [10 * number + i for i in range(5)]


def test_a_worker_killed_while_idle_is_replaced(new_children: Children) -> None:
    with scorer() as one:
        assert score(one, "fine")[0].value == 1.0
        (worker,) = new_children()
        worker.send_signal(signal.SIGKILL)
        while worker.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert score(one, "fine")[0].value == 1.0


def test_weights_and_parts() -> None:
    rewards = [
        "task",
        "0.5*exact",
        {"name": "faulty_rewards:length", "weight": -0.1, "kwargs": {"per": 2}},
    ]
    with scorer(rewards) as three:
        right, wrong = score(three, "5", "4444")
    assert right.value == pytest.approx(1 + 0.5 - 0.1 * 0.5)
    assert right.parts == {"task": 1.0, "exact": 1.0, "faulty_rewards:length": 0.5}
    assert wrong.value == pytest.approx(-0.1 * 2)
    assert wrong.reason == "task: expected 5; exact: expected 5"


def test_one_failed_part_leaves_no_value() -> None:
    with scorer("task + 0.1*faulty_rewards:obey") as two:
        (result,) = score(two, "raise")
    assert result.value is None
    assert result.parts == {"task": 0.0, "faulty_rewards:obey": None}


def test_a_users_task_is_scored_in_workers() -> None:
    task = make_task("faulty_rewards:Mine", bonus=0.5)
    with Scorer(task, workers=1) as one:
        assert not one.inline
        right, wrong, died = one.score([Problem("p", "a")] * 3, ["a", "b", "die"])
    assert (right.value, wrong.value, died.value) == (1.5, 0.5, None)


def test_a_task_workers_cannot_make_is_refused() -> None:
    import faulty_rewards

    with pytest.raises(EnvError, match="worker processes cannot make Mine"):
        Scorer(faulty_rewards.Mine())
    with Scorer(faulty_rewards.Mine(), workers=0) as here:
        assert here.score([Problem("p", "a")], ["a"])[0].value == 1.0


def test_built_in_rewards_need_no_process(new_children: Children) -> None:
    with scorer("task + exact + numeric + 0.1*format") as here:
        assert here.inline
        assert not new_children()
        (result,) = score(here, "5")
    assert result.value == 3.0


def test_a_pattern_of_the_user_is_matched_in_a_worker() -> None:
    hopeless = {"name": "format", "kwargs": {"pattern": "(a+)+b"}}
    with scorer([hopeless], timeout=2.0) as one:
        slow, fast = score(one, "a" * 40, "aab")
    assert slow.value is None and "timeout" in slow.reason
    assert fast.value == 1.0


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ("faulty_rewards:nothing", "faulty_rewards has no nothing"),
        ("no_such_module:f", "cannot import the module 'no_such_module'"),
        ("faulty_rewards:not_callable", "is a int, not a function"),
    ],
)
def test_a_reward_that_cannot_be_made_fails_at_the_start(rewards: str, message: str) -> None:
    with pytest.raises(EnvError) as caught:
        scorer(rewards)
    assert message in str(caught.value)
    assert "Traceback of the worker process" in str(caught.value)


@pytest.mark.parametrize(
    "settings", [{"workers": -1}, {"timeout": 0}, {"timeout": float("nan")}, {"memory_mb": 10}]
)
def test_unsuitable_settings_are_named(settings: dict[str, Any]) -> None:
    with pytest.raises(EnvError, match=f"{next(iter(settings))} is"):
        scorer(**settings)


def test_lengths_must_agree() -> None:
    with scorer("task") as here, pytest.raises(EnvError, match="2 completions for 1 problems"):
        here.score([PROBLEM], ["5", "6"])


def test_nothing_to_score() -> None:
    with scorer() as one:
        assert one.score([], []) == []


def test_groups_with_a_failure_are_left_out() -> None:
    scores = [
        Score(1.0),
        Score(0.0),
        Score(None, reason="boom"),
        Score(1.0),
        Score(0.5),
        Score(0.0),
    ]
    np.testing.assert_array_equal(usable_groups(scores, 2), [True, False, True])
    assert not usable_groups(scores[:4], 4).any()
    for size in (0, 4):
        with pytest.raises(EnvError, match="no whole number of groups"):
            usable_groups(scores, size)


def test_failures_are_summed_up() -> None:
    scores = [
        Score(1.0),
        *[Score(None, reason="a", traceback="trace a")] * 2,
        Score(None, reason="b"),
    ]
    text = describe_failures(scores)
    assert text == "3 of 4 completions could not be scored; 2 times a\ntrace a"
    assert describe_failures([Score(0.0)]) == ""


def test_an_interrupt_while_scoring_leaves_no_process() -> None:
    # MindSpore, where an earlier test has loaded it, has put a handler of its own there.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    one = scorer(timeout=30.0)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        score(one, "hang")
    timer.join()
    one.close()
    one.close()


def test_workers_end_when_their_parent_is_killed_or_forgets_them(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            from msrl_accel.envs.text import Problem, Scorer, make_task
            # No main guard is needed, and what is forgotten here is ended at exit.
            task = make_task("text/addition")
            scorer = Scorer(task, "faulty_rewards:obey", workers=2, timeout=60)
            print(scorer.score([Problem("", "")], ["fine"])[0].value, flush=True)
            if sys.argv[1] == "hang":
                scorer.score([Problem("", "")], ["hang"])
            """
        )
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    for order in ("hang", "leave"):
        parent = subprocess.Popen(
            [sys.executable, str(script), order],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert parent.stdout is not None and parent.stderr is not None
        with parent.stdout, parent.stderr:
            assert parent.stdout.readline() == "1.0\n"
            workers = psutil.Process(parent.pid).children(recursive=True)
            if order == "hang":
                time.sleep(0.3)
                parent.kill()
            else:
                assert parent.stderr.read() == ""
            parent.wait(20)
        _, alive = psutil.wait_procs(workers, timeout=15)
        assert not alive
