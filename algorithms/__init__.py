"""Registry of algorithms. Adding one is a file here and a line in `ALGORITHMS`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msrl_accel.algorithms.base import Algorithm
    from msrl_accel.config import Section

# Imported on use: an algorithm's module imports MindSpore.
ALGORITHMS = {
    "dqn": "msrl_accel.algorithms.dqn:DQN",
    "grpo": "msrl_accel.algorithms.grpo:GRPO",
    "impala": "msrl_accel.algorithms.impala:Impala",
    "ppo": "msrl_accel.algorithms.ppo:PPO",
    "sac": "msrl_accel.algorithms.sac:SAC",
    "sft": "msrl_accel.algorithms.sft:SFT",
}


def names() -> tuple[str, ...]:
    return tuple(ALGORITHMS)


def algorithm_class(name: str) -> type[Algorithm]:
    module, attribute = ALGORITHMS[name].split(":")
    found: type[Algorithm] = getattr(import_module(module), attribute)
    return found


def config_class(name: str) -> type[Section]:
    return algorithm_class(name).Config
