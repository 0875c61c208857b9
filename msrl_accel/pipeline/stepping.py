"""How the environments of an asynchronous run are divided among workers and slots."""

from __future__ import annotations

import logging
import resource
import time
from dataclasses import dataclass

import numpy as np

from msrl_accel.algorithms import algorithm_class
from msrl_accel.algorithms.base import OnPolicyAlgorithm
from msrl_accel.config import TrainConfig
from msrl_accel.envs import is_batched
from msrl_accel.envs.base import VectorEnv
from msrl_accel.errors import ConfigError

logger = logging.getLogger("msrl_accel")

LONGEST_QUEUE = 16
"""Updates' worth of trajectories beyond which learning curves oscillate."""
_PROBE_STEPS = 7
_WAIT_SECONDS = 1e-3


@dataclass(frozen=True)
class Layout:
    """Who steps what, and what a slot of the queue holds."""

    apart: bool
    """Whether each environment goes at its own pace; a slot then holds its trajectory alone."""
    workers: int
    envs_per_worker: int
    n_envs: int
    """Trajectories of one update."""
    quota: int | None
    """Trajectories that each worker may start in one version; None: as many as there is room."""

    @property
    def columns(self) -> int:
        """Trajectories of a slot."""
        return 1 if self.apart else self.envs_per_worker

    @property
    def slots_per_update(self) -> float:
        return self.n_envs / self.columns

    def slots(self, queue_size: int) -> int:
        """Slots with which every worker can fill its own while `queue_size` updates' wait."""
        filling = self.workers * (self.envs_per_worker if self.apart else 1)
        return filling + queue_size * -(-self.n_envs // self.columns)


def check_config(config: TrainConfig) -> None:
    """Refuse what asynchronous training cannot do, warn of what does not do well.

    Raises:
        ConfigError: names the value and the remedy.
    """
    options = config.pipeline
    if not issubclass(algorithm_class(config.algo), OnPolicyAlgorithm):
        raise ConfigError(
            f"pipeline.mode = 'async': {config.algo} learns from a replay, which has no versions "
            "to bound; use pipeline.mode sync, or an on-policy algorithm (ppo, impala)"
        )
    if config.runtime.rollout == "lite":
        raise ConfigError(
            "runtime.rollout = 'lite': workers roll out with onnx or graph; use one of these, or "
            "pipeline.mode sync"
        )
    if options.publish_interval > options.max_staleness + 1:
        raise ConfigError(
            f"pipeline.publish_interval = {options.publish_interval}: samples would be up to "
            f"{options.publish_interval - 1} versions old when they are made, and "
            f"pipeline.max_staleness = {options.max_staleness} drops them; raise the latter"
        )
    if options.queue_size > LONGEST_QUEUE:
        logger.warning(
            "pipeline.queue_size = %d: from queues longer than %d learning oscillates, because "
            "samples get old in them",
            options.queue_size,
            LONGEST_QUEUE,
        )


def lay_out(config: TrainConfig, env: VectorEnv) -> Layout:
    """Divide the environments; `env` is one of them.

    Raises:
        ConfigError: max_staleness 0 and environments that cannot be divided evenly.
    """
    options = config.pipeline
    apart = _go_apart(config, env)
    # A slot holds no more trajectories than an update takes.
    per_worker = options.envs_per_worker if apart else min(options.envs_per_worker, config.n_envs)
    everyone = options.workers * per_worker
    quota = None
    if options.max_staleness == 0:
        if config.n_envs % everyone:
            raise ConfigError(
                f"n_envs = {config.n_envs}: with pipeline.max_staleness = 0 it must be a multiple "
                f"of the {everyone} environments of all workers ({options.workers} * "
                f"{per_worker}), or some would always wait for others; change "
                "pipeline.envs_per_worker, pipeline.workers or n_envs"
            )
        quota = config.n_envs // options.workers
    at_once = (options.max_staleness + 1) * config.n_envs
    if at_once < everyone:
        logger.warning(
            "only %d of %d environments can be at work at once: raise n_envs = %d (trajectories "
            "of an update) or pipeline.max_staleness = %d, or use fewer environments",
            at_once,
            everyone,
            config.n_envs,
            options.max_staleness,
        )
    return Layout(apart, options.workers, per_worker, config.n_envs, quota)


def _go_apart(config: TrainConfig, env: VectorEnv) -> bool:
    options = config.pipeline
    if options.stepping != "auto":
        return options.stepping == "apart"
    if options.max_staleness == 0:  # in time, the order of steps is that of synchronous training
        return False
    if config.vectorization not in ("auto", "threads"):
        return False
    if config.vectorization == "auto" and is_batched(config.env, config.env_kwargs):
        return False
    return waits(env)


def waits(env: VectorEnv) -> bool:
    """Whether most steps wait, for a simulator or a network, rather than compute."""
    env.reset(0)
    env.action_space.seed(0)
    waiting = 0
    for _ in range(_PROBE_STEPS):
        actions = np.stack([env.action_space.sample() for _ in range(env.num_envs)])
        start, cpu, switches = time.perf_counter(), time.thread_time(), _voluntary_switches()
        env.step(actions)
        wall, cpu = time.perf_counter() - start, time.thread_time() - cpu
        # Another process that took the core is no wait: this thread did not give it up.
        gave_up = _voluntary_switches() > switches
        waiting += gave_up and wall > _WAIT_SECONDS and cpu < wall / 2
    return waiting > _PROBE_STEPS / 2


def _voluntary_switches() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
