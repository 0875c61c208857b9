"""What every vector environment of this library offers, and how observations are laid out.

Observations are a tuple of arrays: a Box space gives one array, a Dict space one array a key in
sorted key order, each of shape [N, ...] with N environments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from msrl_accel.envs.checks import check_finite
from msrl_accel.errors import SpaceError

Observations = tuple[np.ndarray, ...]
Space = gymnasium.Space[Any]


@dataclass
class StepResult:
    """One step of N environments.

    When no episode ended, `observations` and `next_observations` may be the same arrays: treat
    them as read-only.
    """

    observations: Observations
    """What the policy acts on next, after an automatic reset: [N, ...] an entry."""
    next_observations: Observations
    """True successor of the step just taken: the final observation where an episode ended."""
    rewards: np.ndarray
    """Raw environment reward, float64 [N]."""
    terminated: np.ndarray
    """The task itself ended, bool [N]."""
    truncated: np.ndarray
    """A time limit cut the episode, bool [N]."""
    valid: np.ndarray
    """bool [N]; False marks the fake transition of a next-step automatic reset, to be masked."""


class VectorEnv(ABC):
    """N environments of one kind that step together and reset themselves when an episode ends."""

    env_id: str
    num_envs: int
    observation_space: Space
    """Space of one environment."""
    action_space: Space
    """Space of one environment."""
    _steps: int = 0

    @abstractmethod
    def reset(self, seed: int | None = None) -> Observations:
        """Start N new episodes; `seed` fixes all their randomness, None continues it."""

    @abstractmethod
    def step(self, actions: np.ndarray) -> StepResult:
        """Apply actions [N, ...], in the units and dtype of `action_space`.

        Raises EnvError when an environment fails or gives a non-finite observation or reward.
        """

    def state(self) -> dict[str, Any] | None:
        """Everything needed to continue bit for bit (JSON values and arrays), or None."""
        return None

    def restore(self, state: Mapping[str, Any]) -> Observations:
        """Return to what `state` gave; the result is the current observations."""
        raise NotImplementedError(f"{type(self).__name__} cannot restore a state")

    @abstractmethod
    def close(self) -> None:
        """Release processes and windows. Closing twice is allowed."""

    def __enter__(self) -> VectorEnv:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_observations(
        self, observations: Observations, indices: np.ndarray | None = None
    ) -> None:
        for name, array in zip(observation_names(self.observation_space), observations):
            check_finite(self.env_id, self._steps, name, array, indices)

    def _checked(self, result: StepResult, indices: np.ndarray | None = None) -> StepResult:
        """Count the step and refuse non-finite numbers before they reach a learner.

        `indices` are the environments of the rows, where those are not all.
        """
        self._steps += 1
        self._check_observations(result.next_observations, indices)
        if result.observations is not result.next_observations:
            self._check_observations(result.observations, indices)
        check_finite(self.env_id, self._steps, "reward", result.rewards, indices)
        return result


def observation_names(space: Space) -> tuple[str, ...]:
    """("observation",) of a Box, the sorted keys of a one-level Dict of Boxes.

    Raises SpaceError for any other space.
    """
    if isinstance(space, spaces.Box):
        return ("observation",)
    if isinstance(space, spaces.Dict):
        for key, entry in space.spaces.items():
            if not isinstance(entry, spaces.Box):
                raise SpaceError(
                    f"observation key {key!r} has the unsupported space {entry}; only Box entries "
                    "of a one-level Dict are supported, so flatten it with a Gymnasium wrapper"
                )
        return tuple(sorted(space.spaces))
    raise SpaceError(
        f"the observation space {space} is not supported; use a Box or a one-level Dict of Boxes "
        "(gymnasium.wrappers.FlattenObservation turns most spaces into a Box)"
    )


def split_observation(space: Space, observation: Any) -> Observations:
    """Copy an observation of `space` (or a batch of them) into the tuple layout."""
    if isinstance(space, spaces.Dict):
        return tuple(
            np.array(observation[key], dtype=space[key].dtype) for key in observation_names(space)
        )
    return (np.array(observation, dtype=space.dtype),)


def stack_observations(space: Space, observations: Sequence[Any]) -> Observations:
    """Stack observations of single environments: one array [len(observations), ...] an entry."""
    split = [split_observation(space, observation) for observation in observations]
    return tuple(np.stack(entry) for entry in zip(*split))
