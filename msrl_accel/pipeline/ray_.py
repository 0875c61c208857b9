"""Asynchronous training whose workers are Ray actors (docs/scale-out.md)."""

from __future__ import annotations

from typing import Any

import numpy as np

from msrl_accel.config import TrainConfig
from msrl_accel.errors import ConfigError
from msrl_accel.pipeline.async_ import AsyncTrainer
from msrl_accel.pipeline.placement import Place
from msrl_accel.pipeline.ray_workers import RayOptions, RayWorkers, connect, import_ray
from msrl_accel.pipeline.slots import slot_layout
from msrl_accel.pipeline.worker import WorkerTask
from msrl_accel.run import Run


class RayTrainer(AsyncTrainer):
    """`AsyncTrainer` with its workers in a Ray cluster, on this host or others."""

    queue: Any
    store: Any
    pool: Any

    def __init__(self, config: TrainConfig, run: Run) -> None:
        if config.pipeline.inference != "local":
            raise ConfigError(
                "pipeline.inference = 'server': workers of pipeline.engine ray may be on other "
                "hosts, which the server does not reach; use inference local or engine local"
            )
        self.ray = import_ray()
        super().__init__(config, run)

    def _connect(self, arrays: dict[str, np.ndarray]) -> None:
        config, options, layout = self.config, self.options, self.layout
        if connect(self.ray, options.ray_address, options.workers):
            self.stack.callback(self.ray.shutdown)
        ray_options = RayOptions(
            count=options.workers,
            layout=slot_layout(self.spec, self.algorithm.n_steps, layout.columns),
            slots=layout.slots(self.queue_size),
            per_worker=layout.envs_per_worker if layout.apart else 1,
            env_id=config.env,
            hang_seconds=options.hang_seconds,
            max_restarts=options.max_restarts,
        )
        self.workers = RayWorkers(
            self.ray, ray_options, self._ray_task, self.staleness, self._worker_ended
        )
        self.queue = self.store = self.workers
        self.stack.callback(self.workers.close)

    def _make_pool(self) -> Any:
        return self.workers

    def _worker_ended(self, index: int) -> None:
        self.timeline.mark(f"worker {index}", "replaced")

    def _ray_task(self, index: int, attempt: int) -> WorkerTask:
        return self._make_task(index, attempt, Place())
