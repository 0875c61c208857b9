"""How rollout, training and publishing are scheduled."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msrl_accel.config import TrainConfig
    from msrl_accel.pipeline.trainer import Trainer


def trainer_class(config: TrainConfig) -> type[Trainer]:
    """The training loop that a configuration asks for; imports MindSpore."""
    from msrl_accel.algorithms import algorithm_class
    from msrl_accel.algorithms.base import OffPolicyAlgorithm

    if config.pipeline.mode == "async":
        from msrl_accel.envs.workers import stop_if_importing_main

        stop_if_importing_main()
        from msrl_accel.pipeline.async_ import AsyncTrainer

        return AsyncTrainer
    if issubclass(algorithm_class(config.algo), OffPolicyAlgorithm):
        from msrl_accel.pipeline.off_policy import OffPolicyTrainer

        return OffPolicyTrainer
    from msrl_accel.pipeline.sync import SyncTrainer

    return SyncTrainer
