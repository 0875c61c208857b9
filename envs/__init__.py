"""Environments: any Gymnasium id as a vector environment, classic control batched in NumPy."""

from __future__ import annotations

from msrl_accel.envs.base import (
    Observations,
    StepResult,
    VectorEnv,
    observation_names,
    split_observation,
    stack_observations,
)
from msrl_accel.envs.registry import is_batched, make_single, make_vector
from msrl_accel.envs.vector import GymnasiumVectorEnv

__all__ = [
    "GymnasiumVectorEnv",
    "Observations",
    "StepResult",
    "VectorEnv",
    "is_batched",
    "make_single",
    "make_vector",
    "observation_names",
    "split_observation",
    "stack_observations",
]
