"""Reward functions, and several of them weighted.

A formula names rewards and weights: `task`, `math + 0.2*format`, `task + 0.1*my_rewards:brevity`.
"""

from __future__ import annotations

import math
import numbers
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Union

from msrl_accel.envs.text.answers import final_answer, last_number, to_number
from msrl_accel.envs.text.base import Problem, Reward
from msrl_accel.envs.text.imports import import_object
from msrl_accel.errors import EnvError

THINK_FORMAT = r"<think>.*?</think>\s*<answer>.*?</answer>"
_TERM = re.compile(r"(?:(?P<weight>[-+0-9.eE]+)\s*\*\s*)?(?P<name>[A-Za-z_][\w.]*(?::[\w.]+)?)")


class RewardFunction(ABC):
    """Judges a completion. Raise when that is impossible: never answer 0 for a failure."""

    inline: bool = False
    """True where it can neither hang nor crash, so that it may run in the training process."""

    @abstractmethod
    def __call__(self, problem: Problem, completion: str) -> Reward:
        """What the completion is worth."""

    def check(self, problem: Problem) -> None:  # noqa: B027  most can judge by any answer
        """Raise ValueError where the right answer itself cannot be judged by."""


class ExactReward(RewardFunction):
    """1 where the final answer is the right one, spaces at its ends aside.

    Args:
        ignore_case: whether capitals do not matter.
    """

    inline = True

    def __init__(self, ignore_case: bool = False) -> None:
        self.ignore_case = ignore_case

    def __call__(self, problem: Problem, completion: str) -> Reward:
        answer, expected = final_answer(completion), problem.answer.strip()
        if self.ignore_case:
            answer, expected = answer.casefold(), expected.casefold()
        return _binary(answer == expected, problem.answer)

    def check(self, problem: Problem) -> None:
        if not problem.answer.strip():
            raise ValueError("the answer is empty")


class NumericReward(RewardFunction):
    """1 where the last number of the final answer is the right one.

    Args:
        tolerance: largest relative difference that still counts as right.
    """

    inline = True

    def __init__(self, tolerance: float = 0.0) -> None:
        if not 0 <= tolerance < 1:
            raise EnvError(f"reward numeric: tolerance is {tolerance!r}; it must be in [0, 1)")
        self.tolerance = tolerance

    def __call__(self, problem: Problem, completion: str) -> Reward:
        expected = self._expected(problem)
        found = last_number(final_answer(completion))
        if found is None:
            return Reward(0.0, "no number in the answer")
        return _binary(abs(found - expected) <= self.tolerance * abs(expected), problem.answer)

    def check(self, problem: Problem) -> None:
        self._expected(problem)

    def _expected(self, problem: Problem) -> Any:
        expected = to_number(problem.answer)
        if expected is None:
            raise ValueError(f"the answer {problem.answer!r} is not a number")
        return expected


class FormatReward(RewardFunction):
    """1 where the whole completion matches a regular expression.

    Args:
        pattern: `.` matches line ends; default <think>...</think><answer>...</answer>.
    """

    def __init__(self, pattern: str = THINK_FORMAT) -> None:
        try:
            self.pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise EnvError(f"reward format: pattern {pattern!r}: {error}") from error
        self.inline = pattern == THINK_FORMAT  # another may take exponential time

    def __call__(self, problem: Problem, completion: str) -> Reward:
        matches = self.pattern.fullmatch(completion.strip()) is not None
        return Reward(float(matches), "as asked" if matches else "not in the format asked for")


class UserReward(RewardFunction):
    """`module:function`, called with (problem, completion); it returns a number or a Reward."""

    def __init__(self, name: str, **kwargs: Any) -> None:
        self.name = name
        self.kwargs = kwargs
        self.function: Callable[..., Any] = import_object(name, "reward")
        if not callable(self.function):
            raise EnvError(f"reward {name!r} is a {type(self.function).__name__}, not a function")

    def __call__(self, problem: Problem, completion: str) -> Reward:
        result = self.function(problem, completion, **self.kwargs)
        return result if isinstance(result, Reward) else Reward(result)


def _math(**kwargs: Any) -> RewardFunction:
    from msrl_accel.envs.text.math_answers import MathReward  # an extra

    return MathReward(**kwargs)


BUILT_IN: dict[str, Callable[..., RewardFunction]] = {
    "exact": ExactReward,
    "numeric": NumericReward,
    "math": _math,
    "format": FormatReward,
}


@dataclass(frozen=True)
class RewardSpec:
    """A reward by name, so that a worker process can make it: "task", a built-in, or
    `module:function`."""

    name: str
    weight: float = 1.0
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


Formula = Union[str, Sequence[Union[str, Mapping[str, Any], RewardSpec]]]


def parse_rewards(formula: Formula) -> list[RewardSpec]:
    """The rewards of `0.5*NAME + NAME`, or of a list of such terms and of mappings with the keys
    name, weight and kwargs. EnvError for what is neither, and for a reward named twice."""
    terms = _split(formula) if isinstance(formula, str) else list(formula)
    specs = [_parse_term(term) for term in terms]
    if not specs:
        raise EnvError("rewards is empty; name at least one, such as task")
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise EnvError(f"reward {name!r} is named twice; add the weights instead")
    return specs


def _split(formula: str) -> list[str]:
    return re.split(r"(?<![0-9.][eE])\+", formula)  # a plus, but not that of 1e+2


def _parse_term(term: str | Mapping[str, Any] | RewardSpec) -> RewardSpec:
    if isinstance(term, RewardSpec):
        return _checked(term)
    if isinstance(term, str):
        match = _TERM.fullmatch(term.strip())
        if match is None:
            raise EnvError(f"rewards: {term!r} is not understood; write NAME or WEIGHT*NAME")
        return _checked(RewardSpec(match["name"], _weight(match["weight"] or "1", term)))
    unknown = set(term) - {"name", "weight", "kwargs"}
    if unknown or "name" not in term:
        raise EnvError(
            f"rewards: {dict(term)} must have the keys name, and weight and kwargs or not"
        )
    weight = _weight(term.get("weight", 1.0), str(term["name"]))
    return _checked(RewardSpec(str(term["name"]), weight, dict(term.get("kwargs") or {})))


def _weight(value: object, term: str) -> float:
    try:
        weight = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        weight = math.nan
    if not math.isfinite(weight) or weight == 0:
        raise EnvError(f"rewards: the weight of {term!r} must be a finite number other than 0")
    return weight


def _checked(spec: RewardSpec) -> RewardSpec:
    if spec.name != "task" and spec.name not in BUILT_IN and ":" not in spec.name:
        known = ", ".join(["task", *BUILT_IN])
        raise EnvError(f"reward {spec.name!r} is not known; use {known} or module:function")
    return spec


def build_reward(spec: RewardSpec) -> RewardFunction:
    """The function of a spec other than "task". EnvError for unsuitable arguments or imports."""
    factory = BUILT_IN.get(spec.name)
    if factory is None:
        return UserReward(spec.name, **spec.kwargs)
    try:
        return factory(**spec.kwargs)
    except TypeError as error:
        raise EnvError(f"reward {spec.name} with {dict(spec.kwargs)}: {error}") from error


def validated(reward: object) -> Reward:
    """The reward with a float value; TypeError or ValueError unless it is a finite number."""
    if not isinstance(reward, Reward):
        raise TypeError(f"a {type(reward).__name__} was returned, not a Reward")
    value = reward.value
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()  # a NumPy or framework scalar
    if not isinstance(value, numbers.Real):
        raise TypeError(f"the reward is a {type(reward.value).__name__}, not a number")
    if not math.isfinite(value):
        raise ValueError(f"the reward is {float(value)}")
    return Reward(float(value), str(reward.reason))


def _binary(right: bool, answer: str) -> Reward:
    return Reward(1.0, "right") if right else Reward(0.0, f"expected {answer}")
