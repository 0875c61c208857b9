"""NumPy-batched classic control, bit-compatible with Gymnasium's environments."""

from __future__ import annotations

from msrl_accel.envs.classic.acrobot import Acrobot
from msrl_accel.envs.classic.batched import BatchedEnv
from msrl_accel.envs.classic.cartpole import CartPole
from msrl_accel.envs.classic.mountain_car import MountainCar, MountainCarContinuous
from msrl_accel.envs.classic.pendulum import Pendulum

__all__ = [
    "Acrobot",
    "BatchedEnv",
    "CartPole",
    "MountainCar",
    "MountainCarContinuous",
    "Pendulum",
]
