"""Where a run's time goes, what holds it up, and which setting changes that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from msrl_accel.config import TrainConfig
from msrl_accel.errors import MsrlError

STARVED = 0.2
"""Share of its time from which a learner, or a trajectory, waits too much."""
LONG_PUBLISH = 0.1
"""Share of the learner's time from which publishing is too frequent."""
MUCH_INFERENCE = 0.5
"""Share of a worker's time from which inference, not the environments, is what it does."""
MANY_DROPPED = 0.05
"""Share of samples too old from which collecting them was a waste."""
FAR_OFF = 0.1
"""KL between the policy that acted and the one that trains from which samples are stale."""
JUMPS = 50.0
"""Slowest inference call, in means, from which latency jumps."""
LONG_QUEUE = 1.5
"""Updates' worth of waiting samples from which more of them make nothing faster."""
_SETTLED = 0.2  # rows at the beginning, with start and compilation, are left out


@dataclass(frozen=True)
class Finding:
    """One row of the diagnosis table."""

    symptom: str
    cause: str
    remedy: str


@dataclass
class Diagnosis:
    """What `diagnose` found."""

    learner: dict[str, float]
    """Share of the learner's time by stage; they sum to 1."""
    workers: dict[str, float]
    """Share of the workers' time by what they do; none for synchronous runs."""
    bottleneck: str
    """The stage that limits the run."""
    remedy: str
    """Which setting to change for it."""
    steps_per_second: float
    findings: list[Finding] = field(default_factory=list)
    """What else is wrong."""


class Settled:
    """Metrics of a run from when it has started."""

    def __init__(self, metrics: Mapping[str, np.ndarray]) -> None:
        self._metrics = metrics
        self._first = max(1, int(_SETTLED * len(metrics["step"])))

    def __contains__(self, name: str) -> bool:
        return len(self.values(name)) > 0

    def values(self, name: str) -> np.ndarray:
        """Finite values of a metric."""
        values = self._metrics.get(name, np.empty(0))[self._first :]
        finite: np.ndarray = values[np.isfinite(values)]
        return finite

    def mean(self, name: str, default: float = 0.0) -> float:
        values = self.values(name)
        return float(values.mean()) if len(values) else default

    def total(self, name: str) -> float:
        return float(self.values(name).sum())


def diagnose(metrics: Mapping[str, np.ndarray], config: TrainConfig) -> Diagnosis:
    """Judge a run by its metrics.

    Raises:
        MsrlError: there are too few.
    """
    m = Settled(metrics)
    if "time/update_seconds" not in m:
        raise MsrlError("too few metrics to judge by: let the run make at least two updates")
    stages = {
        "waits for samples": m.total("time/wait_seconds") + m.total("time/rollout_seconds"),
        "copies them": m.total("time/take_seconds"),
        "updates": m.total("time/update_seconds"),
        "publishes": m.total("time/publish_seconds"),
    }
    total = sum(stages.values())
    learner = {stage: seconds / total for stage, seconds in stages.items() if seconds}
    rate = m.mean("time/steps_per_second")
    if config.pipeline.mode != "async":
        rollout = learner.get("waits for samples", 0.0)
        learner = {
            "collects" if stage == "waits for samples" else stage: share
            for stage, share in learner.items()
        }
        return Diagnosis(learner, {}, *_synchronous(rollout), rate)
    workers = _worker_shares(m)
    bottleneck, remedy = _bottleneck(m, learner, workers, config)
    findings = [finding for rule in RULES for finding in rule(m, learner, config)]
    return Diagnosis(learner, workers, bottleneck, remedy, rate, findings)


def _worker_shares(m: Settled) -> dict[str, float]:
    idle, inference = m.mean("pipeline/worker_idle_share"), m.mean("pipeline/inference_share")
    return {
        "inference": inference,
        "environments": max(1 - idle - inference, 0.0),
        "wait for the learner": idle,
    }


def _synchronous(rollout: float) -> tuple[str, str]:
    if rollout > STARVED:
        return (
            f"collecting: training waits {rollout:.0%} of the time",
            "pipeline.mode = async lets both overlap; environments that compute gain by as many "
            "workers as there are free cores",
        )
    return (
        f"updates: collecting is {rollout:.0%} of the time",
        "little can be gained by pipeline.mode = async",
    )


def _bottleneck(
    m: Settled, learner: Mapping[str, float], workers: Mapping[str, float], config: TrainConfig
) -> tuple[str, str]:
    options = config.pipeline
    waits = learner.get("waits for samples", 0.0)
    blocked = m.mean("pipeline/worker_blocked_share")
    if waits > STARVED and blocked <= STARVED:
        what = f"rollout: the learner waits {waits:.0%} of the time for samples"
        if workers["inference"] > MUCH_INFERENCE:
            rows = m.mean("pipeline/inference_rows")
            return (
                f"{what}, and workers spend {workers['inference']:.0%} on inference (starved "
                f"inference: {rows:.1f} rows a call)",
                f"raise pipeline.envs_per_worker = {options.envs_per_worker}, so that a call has "
                "more rows, or pipeline.workers where cores are free",
            )
        return (
            f"{what}, and workers spend {workers['environments']:.0%} on the environments",
            f"raise pipeline.envs_per_worker = {options.envs_per_worker} where the environments "
            f"wait, pipeline.workers = {options.workers} where they compute and cores are free",
        )
    if waits > STARVED:
        return (
            f"the bounds on lag: the learner waits {waits:.0%} of the time while trajectories wait "
            f"{blocked:.0%} for permission to start",
            f"raise pipeline.max_staleness = {options.max_staleness}, or n_envs",
        )
    if blocked > STARVED:
        return (
            f"the learner: trajectories wait {blocked:.0%} of their time for it",
            "fewer epochs or larger minibatches, or runtime.threads for large networks; fewer "
            "workers would give as many steps/s",
        )
    return "none: workers and learner keep pace", "nothing has to change"


def _publishing(m: Settled, learner: Mapping[str, float], config: TrainConfig) -> list[Finding]:
    share = learner.get("publishes", 0.0)
    if share <= LONG_PUBLISH:
        return []
    interval = config.pipeline.publish_interval
    return [
        Finding(
            f"publishing takes {share:.0%} of the learner's time",
            "weights are published too often",
            f"raise pipeline.publish_interval = {interval}",
        )
    ]


def _stale(m: Settled, learner: Mapping[str, float], config: TrainConfig) -> list[Finding]:
    options = config.pipeline
    lag = m.mean("staleness/lag_mean")
    dropped = m.mean("staleness/dropped") + m.mean("staleness/down_weighted")
    kl = m.mean(f"{config.algo}/behaviour_kl")
    lower = (
        f"lower pipeline.queue_size = {options.queue_size}, pipeline.max_staleness = "
        f"{options.max_staleness} or pipeline.publish_interval = {options.publish_interval}"
    )
    found = []
    if dropped > MANY_DROPPED:
        symptom = f"{dropped:.0%} of the samples are too old to count fully (mean lag {lag:.1f})"
        if m.mean("pipeline/queue_depth") > LONG_QUEUE:
            cause = "they wait in the queue until then"
            remedy = f"lower pipeline.queue_size = {options.queue_size}"
        else:
            cause = "trajectories take longer than the versions they may lag"
            remedy = (
                f"raise pipeline.max_staleness = {options.max_staleness} or n_envs, or shorten "
                f"{config.algo}.n_steps"
            )
        found.append(Finding(symptom, cause, remedy))
    if kl > FAR_OFF:
        found.append(
            Finding(
                f"the policy that acted is {kl:.2f} nats from the one that trains (mean lag "
                f"{lag:.1f})",
                "stale samples: the loss can look well while the return stays flat",
                lower,
            )
        )
    return found


def _queue(m: Settled, learner: Mapping[str, float], config: TrainConfig) -> list[Finding]:
    depth, lag = m.mean("pipeline/queue_depth"), m.mean("staleness/lag_mean")
    if depth <= LONG_QUEUE or learner.get("waits for samples", 0.0) > STARVED / 2:
        return []
    return [
        Finding(
            f"{depth:.1f} updates' worth of samples wait in the queue (mean lag {lag:.1f})",
            "a queue that is too long: it makes samples older, and nothing faster",
            f"lower pipeline.queue_size = {config.pipeline.queue_size}, or "
            f"pipeline.max_staleness = {config.pipeline.max_staleness}",
        )
    ]


def _latency(m: Settled, learner: Mapping[str, float], config: TrainConfig) -> list[Finding]:
    mean, slowest = m.mean("pipeline/inference_ms"), m.mean("pipeline/inference_ms_max")
    if not mean or slowest <= JUMPS * mean:
        return []
    separate = config.pipeline.placement == "separate"
    return [
        Finding(
            f"the slowest inference call takes {slowest:.1f} ms, the mean {mean:.2f} ms",
            "training and inference slow each other, or other programs do",
            "fewer pipeline.workers" if separate else "pipeline.placement = separate",
        )
    ]


def _faults(m: Settled, learner: Mapping[str, float], config: TrainConfig) -> list[Finding]:
    found = []
    restarts = m.values("pipeline/restarts")
    if len(restarts) and restarts[-1]:
        found.append(
            Finding(
                f"{restarts[-1]:.0f} workers were replaced",
                "they died, raised or hung; the log says why",
                "mend the environment, or raise pipeline.hang_seconds = "
                f"{config.pipeline.hang_seconds:g} if steps take long",
            )
        )
    exploding = m.values(f"{config.algo}/grad_exploding")
    if len(exploding) and exploding[-1]:
        found.append(
            Finding(
                f"{exploding[-1]:.0f} gradients exploded",
                "importance weights or advantages get out of hand with lag",
                f"lower pipeline.max_staleness = {config.pipeline.max_staleness} or the learning "
                "rate, or set ppo.objective = decoupled and ppo.kl_coef",
            )
        )
    return found


RULES = (_publishing, _stale, _queue, _latency, _faults)
"""Each gives the findings of one kind; the diagnosis table of docs/async.md."""
