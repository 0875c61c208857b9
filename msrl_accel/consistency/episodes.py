"""Whole episodes through two policies from equal seeds, and observations recorded in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from msrl_accel.runtime.base import ActResult, PolicyRuntime
from msrl_accel.spaces import Observations, PolicySpec

if TYPE_CHECKING:
    from msrl_accel.config import TrainConfig

RECORDING_ENVS = 32
"""Environments that observations are recorded from, at most."""


class RecordingRuntime:
    """Passes calls on to another runtime and keeps the actions."""

    def __init__(self, runtime: PolicyRuntime) -> None:
        self.runtime = runtime
        self.spec: PolicySpec = runtime.spec
        self.version = runtime.version
        self.actions: list[np.ndarray] = []

    def load_weights(self, version: int, arrays: Mapping[str, np.ndarray]) -> None:
        self.runtime.load_weights(version, arrays)
        self.version = version

    def act(self, observations: Observations, noise: np.ndarray) -> ActResult:
        result = self.runtime.act(observations, noise)
        self.actions.append(result.action)
        return result

    def close(self) -> None:
        self.runtime.close()


@dataclass
class Episodes:
    """What one policy did in whole episodes, deterministic and then sampled."""

    returns: dict[str, np.ndarray]
    """By mode, one entry an episode."""
    actions: dict[str, list[np.ndarray]]
    """By mode, one array [N, ...] a step."""


@dataclass
class EpisodeParity:
    """Episodes of a policy beside those of the baseline, in one mode."""

    mode: str
    """'deterministic' or 'sampled'."""
    episodes: int
    steps: int
    """Calls of the policy until the first of the two was done."""
    first_different_step: int | None
    """The first call whose actions are not equal; None where all are."""
    max_action_difference: float
    """Largest over the steps up to `first_different_step`."""
    equal_returns: bool
    max_return_difference: float
    mean_return: float
    baseline_mean_return: float

    @property
    def mean_difference(self) -> float:
        """Of the mean return, relative to the baseline's (to 1 where that is smaller)."""
        return abs(self.mean_return - self.baseline_mean_return) / max(
            1.0, abs(self.baseline_mean_return)
        )

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "mean_difference": self.mean_difference}


def play(runtime: PolicyRuntime, config: TrainConfig, episodes: int, seed: int) -> Episodes:
    """Whole episodes of a run's environment, `episodes` deterministic and as many sampled."""
    from msrl_accel.evaluation import evaluate_run_policy

    returns, actions = {}, {}
    for mode in ("deterministic", "sampled"):
        recording = RecordingRuntime(runtime)
        result = evaluate_run_policy(
            recording, config, episodes, deterministic=mode == "deterministic", seed=seed
        )
        returns[mode], actions[mode] = result.returns, recording.actions
    return Episodes(returns, actions)


def episode_parity(baseline: Episodes, other: Episodes) -> list[EpisodeParity]:
    """One comparison a mode."""
    return [_parity(mode, baseline, other) for mode in baseline.returns]


def _parity(mode: str, baseline: Episodes, other: Episodes) -> EpisodeParity:
    # Episodes end in the order they finish in, which a different action may change.
    ours, theirs = np.sort(baseline.returns[mode]), np.sort(other.returns[mode])
    pairs = list(zip(baseline.actions[mode], other.actions[mode]))
    first, largest = None, 0.0
    for step, (a, b) in enumerate(pairs):
        if not np.array_equal(a, b):
            first = step
            largest = float(np.abs(a.astype(np.float64) - b).max())
            break
    return EpisodeParity(
        mode=mode,
        episodes=len(ours),
        steps=len(pairs),
        first_different_step=first,
        max_action_difference=largest,
        equal_returns=bool(np.array_equal(baseline.returns[mode], other.returns[mode])),
        max_return_difference=float(np.abs(ours - theirs).max()),
        mean_return=float(theirs.mean()),
        baseline_mean_return=float(ours.mean()),
    )


def record_observations(
    runtime: PolicyRuntime, config: TrainConfig, rows: int, seed: int
) -> Observations:
    """Observations [rows, ...] of sampled episodes in a run's environment."""
    from msrl_accel import envs

    spec, rng = runtime.spec, np.random.default_rng([seed, 2])
    n = min(RECORDING_ENVS, config.n_envs, rows)
    kept: list[Observations] = []
    with envs.make_vector(
        config.env, n, kwargs=config.env_kwargs, backend=config.vectorization
    ) as env:
        observations = env.reset(seed)
        while len(kept) * n < rows:
            kept.append(tuple(np.array(x) for x in observations))
            action = runtime.act(observations, spec.draw_noise(rng, (n,))).action
            observations = env.step(spec.to_environment(action)).observations
    return tuple(np.concatenate(x)[:rows] for x in zip(*kept))
