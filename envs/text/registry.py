"""From an id to a text task."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from msrl_accel.envs.text.arithmetic import Addition, Multiplication
from msrl_accel.envs.text.base import TextTask
from msrl_accel.envs.text.countdown import Countdown
from msrl_accel.envs.text.formatting import Format
from msrl_accel.envs.text.imports import import_object
from msrl_accel.envs.text.jsonl import JsonlTask
from msrl_accel.envs.text.sorting import Sorting
from msrl_accel.errors import EnvError, MsrlError

TASKS: dict[str, type[TextTask]] = {
    cls.name: cls for cls in (Addition, Multiplication, Countdown, Sorting, Format, JsonlTask)
}
_JSONL = "jsonl:"
_REASONING_GYM = "reasoning_gym/"


def is_text_id(env_id: str) -> bool:
    """Whether the id is one of a built-in text task, a data set or a reasoning-gym task.

    A task of the user, `module:Class`, looks like an environment of the user's: ask `make_task`.
    """
    return env_id.startswith(("text/", _JSONL, _REASONING_GYM))


def make_task(env_id: str, **kwargs: Any) -> TextTask:
    """The task of an id.

    Args:
        env_id: `text/addition` and the other keys of `TASKS`, `jsonl:PATH`, `reasoning_gym/NAME`,
            or `module:Class` of a TextTask of your own.
        kwargs: arguments of the task, such as digits.

    Raises EnvError for an unknown id, unsuitable arguments, a missing package, or a data set that
    cannot be used.
    """
    task = _construct(env_id, kwargs)
    task.origin = (env_id, kwargs)
    return task


def built_in_characters() -> str:
    """Every character of the built-in tasks in style plain, at any difficulty, sorted."""
    texts = [cls().characters for name, cls in TASKS.items() if cls is not JsonlTask]
    return "".join(sorted(set("".join(texts))))


def _construct(env_id: str, kwargs: dict[str, Any]) -> TextTask:
    if env_id.startswith(_JSONL):
        return _call(env_id, JsonlTask, {"path": env_id[len(_JSONL) :], **kwargs})
    if env_id.startswith(_REASONING_GYM):
        from msrl_accel.envs.text.reasoning import ReasoningGymTask  # an extra

        return ReasoningGymTask(env_id[len(_REASONING_GYM) :], **kwargs)
    if env_id in TASKS:
        return _call(env_id, TASKS[env_id], kwargs)
    if ":" in env_id:
        return _call(env_id, import_object(env_id, "text task"), kwargs)
    close = difflib.get_close_matches(env_id, TASKS, n=2)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    raise EnvError(
        f"text task {env_id!r} is not known.{hint} There are {', '.join(TASKS)}, jsonl:PATH, "
        "reasoning_gym/NAME, and module:Class for one of your own"
    )


def _call(env_id: str, factory: Callable[..., Any], kwargs: dict[str, Any]) -> TextTask:
    try:
        parameters = inspect.signature(factory).parameters
        any_name = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    except (TypeError, ValueError) as error:
        raise EnvError(f"{env_id} is no TextTask and makes none: {error}") from error
    for name in kwargs:
        if name not in parameters and not any_name:
            close = difflib.get_close_matches(name, parameters, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            known = ", ".join(parameters) or "none"
            raise EnvError(f"{env_id} has no argument {name!r}; it takes {known}.{hint}")
    try:
        task = factory(**kwargs)
    except MsrlError:
        raise
    except Exception as error:
        raise EnvError(
            f"{env_id} cannot be made with {kwargs}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(task, TextTask):
        raise EnvError(f"{env_id} makes a {type(task).__name__}; it must be a TextTask")
    return task
