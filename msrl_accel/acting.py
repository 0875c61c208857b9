"""A policy as its user holds it: observations in, actions in environment units out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from msrl_accel.runtime.base import PolicyRuntime
from msrl_accel.spaces import Observations


class ActingPolicy:
    """Acts through any runtime on one observation or a batch.

    Args:
        runtime: the engine.
        seed: of the noise of sampled actions.
    """

    def __init__(self, runtime: PolicyRuntime, seed: int = 0) -> None:
        self.runtime = runtime
        self.spec = runtime.spec
        self.rng = np.random.default_rng(seed)
        # Some engines compute an action faster than all the outputs.
        self._action: Callable[[Observations, np.ndarray], np.ndarray] = getattr(
            runtime, "action", lambda observations, noise: runtime.act(observations, noise).action
        )
        # What a call on one observation needs, made once: such a call takes microseconds.
        self._dimensions = len(self.spec.observations[0].shape)
        self._zero_noise = self.spec.zero_noise((1,))
        self._zero_noise.flags.writeable = False

    def act(self, observation: Any, deterministic: bool = True) -> np.ndarray:
        """Action for an observation, or actions for a batch of them.

        Args:
            observation: as the environment gives it (array, or dict of arrays), with or without a
                leading batch dimension.
            deterministic: the mode of the distribution; otherwise a sample.

        Returns:
            Action(s) with the environment's shape and dtype.

        Raises:
            PolicyError: a shape, dtype or key does not fit the policy.
        """
        tensors = self.spec.as_tuple(observation)
        single = tensors[0].ndim == self._dimensions
        if single:
            tensors = tuple([x[None] for x in tensors])
        if deterministic and single:
            noise = self._zero_noise
        else:
            noise = self.noise(len(tensors[0]), deterministic)
        actions = self.spec.to_environment(self._action(tensors, noise))
        return actions[0] if single else actions

    def noise(self, batch: int, deterministic: bool) -> np.ndarray:
        """Noise [batch, noise_size] of one call."""
        if deterministic:
            return self.spec.zero_noise((batch,))
        return self.spec.draw_noise(self.rng, (batch,))
