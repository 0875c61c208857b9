"""CartPole-v1 with a latency, that raises when a file asks for it.

Importing this module registers `chaos_env:Chaos-v0`.
"""

from __future__ import annotations

import os
from typing import Any

import gymnasium

from msrl_accel.envs.delayed import DelayedEnv


class ChaosEnv(DelayedEnv):
    """The environment that finds the file takes it away and raises.

    Args:
        order: the file.
        mean_ms: mean latency of a step.
    """

    def __init__(self, order: str, mean_ms: float = 0.0, render_mode: str | None = None) -> None:
        super().__init__("CartPole-v1", mean_ms, 1.0 if mean_ms else 0.0, render_mode)
        self._order = order
        self._count = 0

    def step(self, action: Any) -> Any:
        self._count += 1
        if self._count % 16 == 0:
            try:
                os.unlink(self._order)
            except FileNotFoundError:
                pass
            else:
                raise RuntimeError("made to raise")
        return super().step(action)


gymnasium.register("Chaos-v0", entry_point=ChaosEnv, max_episode_steps=None)
