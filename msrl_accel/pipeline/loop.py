"""The loop of a run, whatever is trained: metrics, progress, evaluation, checkpoints, resuming."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import Any

import numpy as np

from msrl_accel.checkpoint import flatten_state, unflatten_state
from msrl_accel.config import TrainConfig
from msrl_accel.device import set_up
from msrl_accel.evaluation import Evaluation
from msrl_accel.metrics import MetricsLogger
from msrl_accel.progress import Progress
from msrl_accel.run import POLICY_PREFIX, Run, policy_arrays
from msrl_accel.signals import GracefulStop

logger = logging.getLogger("msrl_accel")


class TrainingLoop(ABC):
    """One run, from its first iteration or its last checkpoint to its end.

    Args:
        config: resolved.
        run: its directory.
    """

    def __init__(self, config: TrainConfig, run: Run) -> None:
        set_up(config.runtime)
        self.config = config
        self.run = run
        self.step = 0
        self.saved_step = 0
        self.iteration = 0
        self.seconds = 0.0
        self.next_evaluation = config.evaluation.interval_steps
        self.resumed = False
        self._stop: GracefulStop | None = None

    @property
    def stopping(self) -> bool:
        """Whether a signal has asked the run to end."""
        return self._stop is not None and self._stop.requested is not None

    @abstractmethod
    def iterate(self) -> dict[str, float]:
        """Move the run on by one iteration, counting `step` and `iteration`; returns metrics.

        One that may take long gives up when `stopping`, and returns none.
        """

    @abstractmethod
    def evaluate(self, deterministic: bool) -> Evaluation:
        """Separate episodes."""

    result_name = "return"
    """What an evaluation tells."""

    def facts(self) -> dict[str, Any]:
        """What the summary holds besides the closing evaluation, as JSON."""
        return {}

    def next_steps(self) -> dict[str, str]:
        """What can be done with the result, for the text that closes a run."""
        return {}

    def evaluation_metrics(self) -> dict[str, float]:
        """What an evaluation during training finds."""
        result = self.evaluate(deterministic=True)
        return {"eval/return": result.mean, "eval/return_std": result.std}

    @property
    @abstractmethod
    def score(self) -> float:
        """By which checkpoints are ranked; NaN is never the best."""

    @abstractmethod
    def weights(self) -> dict[str, np.ndarray]:
        """What is trained, for checkpoints."""

    @abstractmethod
    def load_weights(self, arrays: dict[str, np.ndarray]) -> None:
        """Inverse of `weights`."""

    @abstractmethod
    def meta(self) -> dict[str, Any]:
        """What describes the trained weights, as JSON."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Everything else a checkpoint must hold: a tree of dicts, ndarrays and JSON values."""

    @abstractmethod
    def restore_state(self, state: dict[str, Any]) -> None:
        """Inverse of `state`, after `load_weights`."""

    @abstractmethod
    def close(self) -> None:
        """End what the run has started; closing twice is allowed."""

    def train(self) -> str | None:
        """Run to the end; returns the name of the signal that stopped it early, or None."""
        started = time.monotonic() - self.seconds
        last_checkpoint = time.monotonic()
        c = self.config
        with ExitStack() as stack:
            stop = self._stop = stack.enter_context(GracefulStop())
            log = stack.enter_context(
                MetricsLogger(
                    self.run.path,
                    tensorboard=c.logging.tensorboard,
                    resume_step=self.step if self.resumed else None,
                )
            )
            progress = stack.enter_context(
                Progress(c.total_steps, initial=self.step, quiet=c.quiet)
            )
            while self.step < c.total_steps and not self.stopping:
                metrics = self.iterate()
                if not metrics:  # interrupted before it was complete
                    continue
                self.seconds = time.monotonic() - started
                metrics.update(self._evaluate_when_due())
                complete = self.step >= c.total_steps
                if complete or self.iteration % c.logging.interval_iterations == 0:
                    log.log(self.step, metrics)
                progress.update(self.step, metrics.get("episode/return", np.nan))
                if time.monotonic() - last_checkpoint >= c.checkpoint.interval_seconds:
                    self.save()
                    last_checkpoint = time.monotonic()
            if self.step != self.saved_step:
                self.save()
            return stop.requested

    def _evaluate_when_due(self) -> dict[str, float]:
        interval = self.config.evaluation.interval_steps
        if not interval or self.step < self.next_evaluation:
            return {}
        self.next_evaluation = self.step - self.step % interval + interval
        return self.evaluation_metrics()

    def save(self) -> None:
        """Write a checkpoint of everything the run needs to continue."""
        state = {
            "iteration": self.iteration,
            "seconds": self.seconds,
            "next_evaluation": self.next_evaluation,
            **self.state(),
        }
        arrays, tree = flatten_state({"trainer": state})
        arrays.update({POLICY_PREFIX + name: value for name, value in self.weights().items()})
        meta = {"algo": self.config.algo, "env": self.config.env, **self.meta(), "state": tree}
        self.run.checkpoints.save(self.step, arrays, meta, score=self.score)
        self.saved_step = self.step

    def restore(self) -> None:
        """Continue from the newest intact checkpoint, or from the start where none was written.

        Raises:
            CheckpointError: there are checkpoints, and all are damaged.
        """
        self.resumed = True
        checkpoint = self.run.checkpoints.latest()
        if checkpoint is None:
            logger.warning(
                "%s was stopped before its first checkpoint: starting it anew", self.run.path
            )
            return
        # Left in place, a damaged one would count among the newest that are kept.
        self.run.checkpoints.discard_after(checkpoint.step)
        self.load_weights(policy_arrays(checkpoint))
        state: dict[str, Any] = unflatten_state(checkpoint.arrays, checkpoint.meta["state"])[
            "trainer"
        ]
        self.step = self.saved_step = checkpoint.step
        self.iteration = int(state["iteration"])
        self.seconds = float(state["seconds"])
        self.next_evaluation = int(state["next_evaluation"])
        self.restore_state(state)
