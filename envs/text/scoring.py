"""Scoring completions: in this process where that is safe, else in worker processes."""

from __future__ import annotations

import math
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from msrl_accel.envs.text.base import Problem, Reward, TextTask
from msrl_accel.envs.text.jsonl import check_answers
from msrl_accel.envs.text.pool import Answer, Job, WorkerPool
from msrl_accel.envs.text.rewards import (
    BUILT_IN,
    Formula,
    RewardFunction,
    RewardSpec,
    build_reward,
    parse_rewards,
)
from msrl_accel.envs.text.worker import judge
from msrl_accel.errors import EnvError

DEFAULT_TIMEOUT = 10.0
DEFAULT_MEMORY_MB = 4096


@dataclass(frozen=True)
class Score:
    """What a completion is worth.

    `value` is the weighted sum, or None where a verifier failed: then the completion has no reward,
    which is not a reward of 0. `parts` holds the unweighted value of each reward, None for the
    failed ones; `reason` says why, and `traceback` where a verifier failed.
    """

    value: float | None
    parts: Mapping[str, float | None] = field(default_factory=dict)
    reason: str = ""
    traceback: str = ""

    @property
    def failed(self) -> bool:
        """Whether a verifier failed, so that there is no reward."""
        return self.value is None


class Scorer:
    """Scores completions of a task by one reward or several weighted ones.

    Rewards that can neither hang nor crash (the built-in tasks, exact, numeric and the default
    format) are computed here: a trip to another process costs more than they do, and without any
    other no process is started. The rest runs in worker processes, in their main thread; one that
    hangs or dies is killed and replaced, and its item reported. A job whose worker died is tried
    twice. `score` may be called from any thread. After an exception of `score` the scorer is
    closed.

    Args:
        task: the task, made by `make_task`.
        rewards: formula such as "task + 0.2*format", or a list as for `parse_rewards`.
        workers: processes; None for as many as there are cores, at most 4. 0 computes everything
            in this process, where nothing limits time and memory.
        timeout: seconds one reward of one completion may take.
        memory_mb: memory a worker may allocate, in MiB; None for no limit.

    Raises EnvError for unsuitable arguments, a reward that cannot be made (with the worker's
    traceback), or answers of a data set that a reward cannot judge by.
    """

    def __init__(
        self,
        task: TextTask,
        rewards: Formula = "task",
        *,
        workers: int | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        memory_mb: int | None = DEFAULT_MEMORY_MB,
    ) -> None:
        _check_settings(workers, timeout, memory_mb)
        self.task = task
        self.rewards = parse_rewards(rewards)
        self._functions = [self._inline(spec, workers == 0) for spec in self.rewards]
        for spec in self.rewards:
            if spec.name in BUILT_IN:  # a data set has checked by its own reward
                check_answers(f"{task.name}, reward {spec.name}", build_reward(spec), task.problems)
        self._lock = threading.Lock()
        self._pool: WorkerPool | None = None
        if None in self._functions:
            plan = {
                "rewards": [
                    self._plan(spec) if function is None else None
                    for spec, function in zip(self.rewards, self._functions)
                ],
                "timeout": timeout,
                "memory_mb": memory_mb,
            }
            count = workers or min(4, len(os.sched_getaffinity(0)))
            self._pool = WorkerPool(plan, count, timeout)

    @property
    def inline(self) -> bool:
        """Whether everything is computed in this process."""
        return None not in self._functions

    @property
    def restarts(self) -> int:
        """How many worker processes were replaced so far."""
        return self._pool.restarts if self._pool is not None else 0

    def score(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Score]:
        """The score of each completion; `problems[i]` is what `completions[i]` answers.

        Raises EnvError where worker after worker is lost, which no training survives.
        """
        if len(problems) != len(completions):
            raise EnvError(
                f"{len(completions)} completions for {len(problems)} problems; repeat a problem "
                "for each of its completions"
            )
        answers: list[list[Answer]] = [[{}] * len(self.rewards) for _ in problems]
        places: list[tuple[int, int]] = []
        jobs: list[Job] = []
        for row, (problem, completion) in enumerate(zip(problems, completions)):
            for column, function in enumerate(self._functions):
                if function is not None:
                    answers[row][column] = judge(function, problem, completion)
                else:
                    places.append((row, column))
                    jobs.append(_job(column, self.rewards[column].name, problem, completion))
        if self._pool is not None:
            with self._lock:
                for (row, column), answer in zip(places, self._pool.run(jobs)):
                    answers[row][column] = answer
        return [self._combine(row) for row in answers]

    def close(self) -> None:
        """End the worker processes; closing twice is allowed."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _inline(self, spec: RewardSpec, force: bool) -> RewardFunction | None:
        """The function where it may run in this process, else None."""
        if spec.name == "task":
            if self.task.reward != "task":
                return self._inline(RewardSpec(self.task.reward, kwargs=spec.kwargs), force)
            return _TaskScore(self.task) if self.task.inline or force else None
        if ":" in spec.name and not force:
            return None  # not even imported here
        function = build_reward(spec)
        return function if function.inline or force else None

    def _plan(self, spec: RewardSpec) -> dict[str, Any]:
        if spec.name != "task":
            return {"spec": spec.to_dict()}
        if self.task.reward != "task":
            return {"spec": RewardSpec(self.task.reward, kwargs=spec.kwargs).to_dict()}
        if self.task.origin is None:
            raise EnvError(
                f"worker processes cannot make {type(self.task).__name__}; get the task from "
                "make_task('module:Class'), or use workers=0"
            )
        return {"task": self.task.origin}

    def _combine(self, answers: Sequence[Answer]) -> Score:
        parts: dict[str, float | None] = {}
        reasons, tracebacks = [], []
        total = 0.0
        for spec, answer in zip(self.rewards, answers):
            parts[spec.name] = value = answer.get("value")
            text = answer["error"] if value is None else answer["reason"]
            if text:
                reasons.append(
                    f"{spec.name}: {text}" if len(answers) > 1 or value is None else text
                )
            if value is None:
                tracebacks.append(answer["traceback"])
            else:
                total += spec.weight * value
        failed = any(value is None for value in parts.values())
        return Score(
            None if failed else total, parts, "; ".join(reasons), "\n".join(tracebacks).strip()
        )


def usable_groups(scores: Sequence[Score], group_size: int) -> np.ndarray:
    """Which groups of `group_size` consecutive completions have a reward for each; bool [groups].

    A group with a failed verifier is left out as a whole, because its advantages compare its
    members. Raises EnvError where the scores are no whole number of groups.
    """
    if group_size < 1 or len(scores) % group_size:
        raise EnvError(f"{len(scores)} completions are no whole number of groups of {group_size}")
    failed = np.array([score.failed for score in scores], bool).reshape(-1, group_size)
    return np.asarray(~failed.any(axis=1))


def describe_failures(scores: Sequence[Score]) -> str:
    """How many verifiers failed, the most frequent reason and its traceback; empty for none."""
    failed = [score for score in scores if score.failed]
    if not failed:
        return ""
    reason, count = Counter(score.reason for score in failed).most_common(1)[0]
    example = next(score for score in failed if score.reason == reason)
    text = f"{len(failed)} of {len(scores)} completions could not be scored; {count} times {reason}"
    return f"{text}\n{example.traceback}".rstrip()


class _TaskScore(RewardFunction):
    def __init__(self, task: TextTask) -> None:
        self._task = task

    def __call__(self, problem: Problem, completion: str) -> Reward:
        return self._task.score(problem, completion)


def _job(column: int, name: str, problem: Problem, completion: str) -> Job:
    fields = [problem.prompt, problem.answer, dict(problem.meta)]
    return {"reward": column, "name": name, "problem": fields, "completion": completion}


def _check_settings(workers: int | None, timeout: float, memory_mb: int | None) -> None:
    if workers is not None and (isinstance(workers, bool) or workers < 0):
        raise EnvError(f"scoring: workers is {workers!r}; it must be 0 or more")
    if not (math.isfinite(timeout) and timeout > 0):
        raise EnvError(f"scoring: timeout is {timeout!r}; it must be a positive number of seconds")
    if memory_mb is not None and memory_mb < 256:
        raise EnvError(f"scoring: memory_mb is {memory_mb!r}; it must be at least 256, or None")
