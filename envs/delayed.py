"""Any environment with a set latency, to measure what slow environments cost a pipeline.

Importing this module registers `msrl_accel.envs.delayed:Delayed-v0`:
``--env msrl_accel.envs.delayed:Delayed-v0 --set 'env_kwargs={env: CartPole-v1, mean_ms: 15}'``.
"""

from __future__ import annotations

import math
import time
from typing import Any

import gymnasium
import numpy as np

from msrl_accel.envs.factory import find_spec, make_env
from msrl_accel.errors import EnvError


class DelayedEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Sleeps before each step; the task itself is unchanged.

    Args:
        env: id of the environment.
        mean_ms: mean latency of a step in milliseconds.
        spread: sigma of a log-normal latency of that mean; 0 is constant, 1 has a heavy tail (one
            step in a hundred takes over 6 times the mean).
    """

    def __init__(
        self,
        env: str = "CartPole-v1",
        mean_ms: float = 15.0,
        spread: float = 0.0,
        render_mode: str | None = None,
    ) -> None:
        if mean_ms < 0 or spread < 0:
            raise EnvError(f"mean_ms = {mean_ms}, spread = {spread}: both must be at least 0")
        super().__init__(make_env(find_spec(env), render_mode=render_mode))
        self._mean = mean_ms / 1000
        self._spread = spread
        self._latency_rng = np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            self._latency_rng = np.random.default_rng(seed)
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        if self._mean:
            time.sleep(self.latency())
        return self.env.step(action)

    def latency(self) -> float:
        """Seconds of the next step: log-normal, exp(mu + sigma z) with mean exp(mu + sigma^2/2)."""
        mu = math.log(self._mean) - self._spread**2 / 2
        return float(np.exp(mu + self._spread * self._latency_rng.standard_normal()))


gymnasium.register("Delayed-v0", entry_point=f"{__name__}:DelayedEnv")
