"""Synchronous training by several processes, each with a part of the environments."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from msrl_accel.algorithms import algorithm_class
from msrl_accel.algorithms.base import OnPolicyAlgorithm
from msrl_accel.algorithms.on_policy import MinibatchUpdate
from msrl_accel.config import TrainConfig
from msrl_accel.errors import ConfigError
from msrl_accel.observation_statistics import ObservationStatistics
from msrl_accel.parallel.accumulate import AccumulatingGraph
from msrl_accel.parallel.beacon import Beacon
from msrl_accel.parallel.collectives import MindSporeWorld
from msrl_accel.pipeline.sync import SyncTrainer
from msrl_accel.run import Run
from msrl_accel.spaces import Observations


def share_of(config: TrainConfig, size: int, accumulate: int = 1) -> TrainConfig:
    """The configuration of one of `size` processes: its environments, its part of a minibatch.

    Args:
        accumulate: minibatches of one gradient step, and of one all-reduce.

    Raises:
        ConfigError: the algorithm or mode cannot be divided, or the numbers cannot.
    """
    if config.pipeline.mode != "sync" or not issubclass(
        algorithm_class(config.algo), OnPolicyAlgorithm
    ):
        raise ConfigError(
            f"algo = {config.algo!r}, pipeline.mode = {config.pipeline.mode!r}: data-parallel "
            "training knows on-policy algorithms (ppo, impala) in mode sync"
        )
    batch_size = getattr(config.algorithm, "batch_size", None)
    for key, value in (("n_envs", config.n_envs), (f"{config.algo}.batch_size", batch_size)):
        if value is not None and value % size:
            raise ConfigError(f"{key} = {value}: not divisible by the {size} processes; change it")
    changes: dict[str, Any] = {"n_envs": config.n_envs // size}
    if batch_size is not None:
        section = config.algorithm.replace(batch_size=accumulate * batch_size // size)
        changes[config.algo] = section
    return config.replace(**changes)


class GatheredStatistics(ObservationStatistics):
    """Statistics of the observations of all processes: the same in each."""

    def __init__(self, statistics: ObservationStatistics, processes: MindSporeWorld) -> None:
        super().__init__(statistics.policy)
        self.processes = processes

    def update(self, observations: Observations) -> None:
        names = [o.name for o in self.policy.spec.observations]
        super().update(
            tuple(
                self._of_all(x) if name in self.statistics else x
                for name, x in zip(names, observations)
            )
        )

    def _of_all(self, rows: np.ndarray) -> np.ndarray:
        return self.processes.gather(rows).reshape((-1, *rows.shape[1:]))


class DataParallelTrainer(SyncTrainer):
    """`SyncTrainer` in one of the processes of a world.

    Each process steps `n_envs / size` environments and computes the gradient of its part of every
    minibatch; the gradients are averaged within the compiled update, so all take the same steps.
    Rank 0 writes the checkpoints and its metrics are the run's, with steps and episodes of all.

    Args:
        config: of the whole run.
        run: where this process writes its metrics.
        processes: that train together.
        accumulate: minibatches of one gradient step.
        beacon: tells the launcher that this process is alive.
    """

    def __init__(
        self,
        config: TrainConfig,
        run: Run,
        processes: MindSporeWorld,
        *,
        accumulate: int = 1,
        beacon: Beacon | None = None,
    ) -> None:
        self.processes = processes
        self.accumulate = accumulate
        self.beacon = beacon or Beacon(None)
        self.agreed_to_stop = False
        local = share_of(config, processes.size, accumulate)
        super().__init__(local.replace(quiet=local.quiet or processes.rank > 0), run)

    def build(self) -> None:
        super().build()
        rank = self.processes.rank
        if rank:  # rank 0 has the streams of training alone
            own = np.random.SeedSequence([self.config.seed, rank])
            self.collector.rng = np.random.default_rng(own)
        if self.statistics is not None:
            self.statistics = GatheredStatistics(self.statistics, self.processes)
        self.minibatches: MinibatchUpdate = getattr(self.algorithm, "minibatches")  # noqa: B009
        if self.accumulate > 1:
            graph = AccumulatingGraph(self.minibatches.graph, self.accumulate)
            self.minibatches.graph = graph

    @property
    def stopping(self) -> bool:
        """Whether all have heard that any was asked to end: one alone would block the others."""
        return self.agreed_to_stop

    def train(self) -> str | None:
        self._share_state()
        stopped_by = super().train()
        return stopped_by if self.agreed_to_stop else None

    def _share_state(self) -> None:
        """Everybody starts from rank 0's weights and optimiser state."""
        optimizer = self.minibatches.graph.optimizer
        weights = list(self.algorithm.policy.weights)
        self.processes.broadcast([*weights, optimizer.moment1, optimizer.moment2])

    def iterate(self) -> dict[str, float]:
        before = self.step
        self.beacon.beat("collect or update", self.iteration)
        if not self.collector.observations and self.processes.rank:
            self.collector.reset(self._reset_seed(self.config.seed))
        metrics = super().iterate()
        self.beacon.beat("agree with the others", self.iteration)
        assert self._stop is not None
        stop = self._stop.requested is not None
        episodes = self.collector.episodes
        ours = [self.step - before, stop, metrics["time/steps_per_second"], episodes.episodes]
        steps, stops, speed, count = self.processes.sum(np.array(ours))
        self.step = before + int(steps)
        if stops and not self.agreed_to_stop:
            self.agreed_to_stop = True
            self._stop.requested = self._stop.requested or "SIGTERM"
        metrics.update(self._episode_means())
        return {
            **metrics,
            "episode/count": float(count),
            "time/steps_per_second": float(speed),
            "parallel/processes": float(self.processes.size),
        }

    def _episode_means(self) -> dict[str, float]:
        """Means over the processes in which an episode has ended."""
        episodes = self.collector.episodes
        both = self.processes.gather(np.array([episodes.return_mean, episodes.length_mean]))
        known = both[~np.isnan(both[:, 0])]
        if not len(known):
            return {}
        mean = known.mean(axis=0)
        return {"episode/return": float(mean[0]), "episode/length": float(mean[1])}

    def _reset_seed(self, seed: int) -> int:
        rank = self.processes.rank
        return int(np.random.SeedSequence([seed, rank]).generate_state(1)[0]) if rank else seed

    def evaluate(self, deterministic: bool) -> Any:
        self.beacon.beat("evaluation", math.inf)
        return super().evaluate(deterministic)

    def save(self) -> None:
        if self.processes.rank == 0:
            super().save()
        self.saved_step = self.step

    def restore(self) -> None:
        """Continue from the newest intact checkpoint; all environments start new episodes."""
        super().restore()
        self.processes.max(0)  # what was damaged is gone: the others may look

    def restore_from(self, leader: Run) -> None:
        """`restore` of a rank but the first, from rank 0's run."""
        self.processes.max(0)
        own, self.run = self.run, leader
        super().restore()
        self.run = own

    def parts_state(self) -> dict[str, Any]:
        return {"shuffle_rng": self.shuffle_rng.bit_generator.state}

    def restore_parts(self, state: dict[str, Any], reset_seed: int) -> bool:
        self.shuffle_rng.bit_generator.state = state["shuffle_rng"]
        # Streams that nobody has drawn from: what follows must not repeat what was.
        fresh = np.random.SeedSequence([reset_seed, self.processes.rank])
        self.collector.rng = np.random.default_rng(fresh)
        self.collector.reset(self._reset_seed(reset_seed))
        return False
