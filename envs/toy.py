"""Tiny tasks whose best return is known, for tests and examples.

Importing this module registers them: `msrl_accel.envs.toy:IdentityDiscrete-v0` and so on. The
observation shows a target; the reward of a step is 1 when the action equals it, less the further
it is off. An episode has 8 steps, so its best return is 8.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

EPISODE_STEPS = 8
IMAGE_SIZE = 8


class _IdentityEnv(gymnasium.Env[Any, Any]):
    """Draws a target, shows it, scores the action against it."""

    action_space: spaces.Space[Any]

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self._elapsed = 0
        self._target: Any = None

    def _draw(self) -> Any:
        """A new target, in the units of the action space."""
        raise NotImplementedError

    def _show(self) -> Any:
        """The observation of the current target."""
        raise NotImplementedError

    def _score(self, action: Any) -> float:
        return float(np.mean(np.equal(action, self._target)))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._elapsed = 0
        self._target = self._draw()
        return self._show(), {}

    def step(self, action: Any) -> Any:
        if not self.action_space.contains(action):
            raise ValueError(f"action {action!r} is not in {self.action_space}")
        reward = self._score(action)
        self._elapsed += 1
        self._target = self._draw()
        return self._show(), reward, self._elapsed >= EPISODE_STEPS, False, {}


class IdentityDiscrete(_IdentityEnv):
    """Actions 2, 3, 4; the observation is the target one-hot."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.action_space = spaces.Discrete(3, start=2)
        self.observation_space = spaces.Box(0.0, 1.0, (3,), np.float32)

    def _draw(self) -> int:
        return 2 + int(self.np_random.integers(3))

    def _show(self) -> Any:
        return np.eye(3, dtype=np.float32)[self._target - 2]


class IdentityMultiDiscrete(_IdentityEnv):
    """One action of 3 and one of 2; the observation is the two targets, scaled to [0, 1]."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.action_space = spaces.MultiDiscrete([3, 2])
        self.observation_space = spaces.Box(0.0, 1.0, (2,), np.float32)

    def _draw(self) -> np.ndarray:
        return self.np_random.integers([3, 2])

    def _show(self) -> Any:
        return (self._target / [2, 1]).astype(np.float32)


class IdentityMultiBinary(_IdentityEnv):
    """Three bits, shown as they are."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.action_space = spaces.MultiBinary(3)
        self.observation_space = spaces.Box(0.0, 1.0, (3,), np.float32)

    def _draw(self) -> np.ndarray:
        return self.np_random.integers(2, size=3)

    def _show(self) -> Any:
        return self._target.astype(np.float32)


class IdentityBox(_IdentityEnv):
    """Two numbers with asymmetric bounds; the reward is minus the mean distance, at best 0."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        low, high = np.array([-1.0, 0.0], np.float32), np.array([3.0, 0.5], np.float32)
        self._low, self._high = low, high
        self.action_space = spaces.Box(low, high)
        self.observation_space = spaces.Box(low, high)

    def _draw(self) -> np.ndarray:
        return np.asarray(self.np_random.uniform(self._low, self._high), np.float32)

    def _show(self) -> Any:
        return self._target.copy()

    def _score(self, action: Any) -> float:
        return -float(np.abs(action - self._target).mean())


class IdentityImage(_IdentityEnv):
    """Four actions; the quadrant of a uint8 image that is lit says which."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.action_space = spaces.Discrete(4)
        self.observation_space = spaces.Box(0, 255, (IMAGE_SIZE, IMAGE_SIZE, 1), np.uint8)

    def _draw(self) -> int:
        return int(self.np_random.integers(4))

    def _show(self) -> Any:
        return _quadrant(self._target)


class IdentityDict(_IdentityEnv):
    """Six actions 3 * half + digit: the image shows which half, the vector which digit."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.action_space = spaces.Discrete(6)
        self.observation_space = spaces.Dict(
            {
                "vector": spaces.Box(0.0, 1.0, (3,), np.float32),
                "image": spaces.Box(0, 255, (IMAGE_SIZE, IMAGE_SIZE, 1), np.uint8),
            }
        )

    def _draw(self) -> int:
        return int(self.np_random.integers(6))

    def _show(self) -> dict[str, np.ndarray]:
        half, digit = divmod(self._target, 3)
        return {"image": _quadrant(half), "vector": np.eye(3, dtype=np.float32)[digit]}


def _quadrant(which: int) -> np.ndarray:
    """Image [IMAGE_SIZE, IMAGE_SIZE, 1], black but for one quadrant."""
    image = np.zeros((IMAGE_SIZE, IMAGE_SIZE, 1), np.uint8)
    half = IMAGE_SIZE // 2
    row, column = divmod(which, 2)
    image[row * half : (row + 1) * half, column * half : (column + 1) * half] = 255
    return image


for _cls in (
    IdentityDiscrete,
    IdentityMultiDiscrete,
    IdentityMultiBinary,
    IdentityBox,
    IdentityImage,
    IdentityDict,
):
    gymnasium.register(id=f"{_cls.__name__}-v0", entry_point=f"{__name__}:{_cls.__name__}")
