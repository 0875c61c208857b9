"""How rollout, training and publishing are scheduled."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msrl_accel.config import TrainConfig
    from msrl_accel.pipeline.loop import TrainingLoop


def trainer_class(config: TrainConfig) -> type[TrainingLoop]:
    """The training loop that a configuration asks for; imports MindSpore."""
    from msrl_accel.algorithms import algorithm_class
    from msrl_accel.algorithms.base import OffPolicyAlgorithm

    algorithm = algorithm_class(config.algo)
    if algorithm.trainer:
        asynchronous = config.pipeline.mode == "async" and algorithm.async_trainer
        if asynchronous:
            from msrl_accel.envs.workers import stop_if_importing_main

            stop_if_importing_main()
        module, name = (asynchronous or algorithm.trainer).split(":")
        found: type[TrainingLoop] = getattr(import_module(module), name)
        return found
    if config.pipeline.mode == "async":
        from msrl_accel.envs.workers import stop_if_importing_main

        stop_if_importing_main()
        if config.pipeline.engine == "ray":
            from msrl_accel.pipeline.ray_ import RayTrainer

            return RayTrainer
        from msrl_accel.pipeline.async_ import AsyncTrainer

        return AsyncTrainer
    if issubclass(algorithm, OffPolicyAlgorithm):
        from msrl_accel.pipeline.off_policy import OffPolicyTrainer

        return OffPolicyTrainer
    from msrl_accel.pipeline.sync import SyncTrainer

    return SyncTrainer
