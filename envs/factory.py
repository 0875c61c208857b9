"""Make one environment, in this process or in a worker, and say what went wrong when it fails."""

from __future__ import annotations

import difflib
import importlib
import multiprocessing
import signal
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from msrl_accel.errors import EnvError, MsrlError

_EXTRAS = ("box2d", "mujoco")


def find_spec(env_id: str) -> EnvSpec:
    """Specification of a registered id, or of `module:EnvId` after importing the module."""
    module, _, name = env_id.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise EnvError(
                f"environment {env_id!r}: cannot import the module {module!r} ({error}); install "
                "it or add its folder to PYTHONPATH"
            ) from error
        except Exception as error:
            raise EnvError(
                f"environment {env_id!r}: importing {module!r} failed: {error}"
            ) from error
    if name in gymnasium.registry:
        return gymnasium.registry[name]
    versions = [spec for spec in gymnasium.registry.values() if spec.name == name]
    if versions:
        return max(versions, key=lambda spec: spec.version or 0)
    raise EnvError(_unknown_id(name))


def _unknown_id(name: str) -> str:
    try:
        gymnasium.spec(name)
        reason = "it is not registered"
    except gymnasium.error.Error as error:
        reason = str(error).split(" Did you mean")[0].rstrip(".?")
    except (TypeError, ValueError) as error:
        reason = str(error)
    message = f"unknown environment {name!r}: {reason}"
    close = difflib.get_close_matches(name, list(gymnasium.registry), n=3, cutoff=0.6)
    if close:
        message += f". Closest registered ids: {', '.join(close)}"
    return message + ". An id that a package registers is written module:EnvId."


def make_env(
    spec: EnvSpec, kwargs: Mapping[str, Any] | None = None, render_mode: str | None = None
) -> gymnasium.Env[Any, Any]:
    """`gymnasium.make` with every failure turned into an EnvError."""
    arguments = dict(kwargs or {})
    if render_mode is not None:
        arguments["render_mode"] = render_mode
    try:
        return gymnasium.make(spec, **arguments)
    except gymnasium.error.DependencyNotInstalled as error:
        raise EnvError(
            f"{spec.id} needs a package that is missing: {_remedy(spec, error)}"
        ) from error
    except MsrlError:
        raise
    except Exception as error:
        given = f" with {arguments}" if arguments else ""
        raise EnvError(
            f"{spec.id} cannot be made{given}: {type(error).__name__}: {error}"
        ) from error


def _remedy(spec: EnvSpec, error: Exception) -> str:
    for extra in _EXTRAS:
        if extra in str(spec.entry_point):
            return f"pip install 'msrl_accel[{extra}]' ({error})"
    return str(error)


class EnvFactory:
    """Picklable maker of environment number `index` of a vector environment.

    It carries the specification itself, so that a worker process need not have registered it.

    Args:
        own_process: whether the environment gets a process of its own, whose start must not fail:
            what went wrong is raised by its reset.
    """

    def __init__(
        self,
        env_id: str,
        spec: EnvSpec,
        kwargs: Mapping[str, Any] | None,
        index: int,
        own_process: bool = False,
    ) -> None:
        self.label = f"{env_id}: environment {index}"
        self.spec = spec
        self.kwargs = dict(kwargs or {})
        self.own_process = own_process

    def __call__(self) -> gymnasium.Env[Any, Any]:
        if not self.own_process or multiprocessing.parent_process() is None:
            return NamedEnv(make_env(self.spec, self.kwargs), self.label)
        # Ctrl-C, and a scheduler's SIGTERM, reach the whole process group; the parent finishes its
        # iteration with the workers and then ends them.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        try:
            return NamedEnv(make_env(self.spec, self.kwargs), self.label)
        except Exception as error:
            return BrokenEnv(self.label, error)


class NamedEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Says which environment failed. An EnvError can be pickled where a user's error may not."""

    def __init__(self, env: gymnasium.Env[Any, Any], label: str) -> None:
        super().__init__(env)
        self._label = label

    def reset(self, **kwargs: Any) -> Any:
        return self._named("reset", self.env.reset, **kwargs)

    def step(self, action: Any) -> Any:
        return self._named("step", self.env.step, action)

    def _named(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            raise EnvError(
                f"{self._label} raised {type(error).__name__} in {name}: {error}"
            ) from error


class BrokenEnv(gymnasium.Env[Any, Any]):
    """Stands for an environment that could not be made in a worker; reset tells why."""

    observation_space = spaces.Discrete(1)
    action_space = spaces.Discrete(1)

    def __init__(self, label: str, error: Exception) -> None:
        self._label = label
        self._error = error

    def reset(self, **kwargs: Any) -> Any:
        raise EnvError(
            f"{self._label} works in the main process but not in its worker process: {self._error}"
        ) from self._error
