"""Evaluation by separate episodes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from msrl_accel import envs
from msrl_accel.acting import ActingPolicy
from msrl_accel.config import TrainConfig
from msrl_accel.config_sections import EvaluationConfig
from msrl_accel.envs.base import VectorEnv
from msrl_accel.runtime.base import PolicyRuntime, pad_rows

logger = logging.getLogger("msrl_accel")

MAX_EPISODE_STEPS = EvaluationConfig().max_episode_steps
"""Longest episode of an evaluation, unless configured."""


@dataclass
class Evaluation:
    """Returns and lengths of whole episodes, one entry each."""

    returns: np.ndarray
    lengths: np.ndarray
    deterministic: bool

    @property
    def mean(self) -> float:
        return float(self.returns.mean())

    @property
    def std(self) -> float:
        return float(self.returns.std())

    def to_dict(self) -> dict[str, Any]:
        return {
            "deterministic": self.deterministic,
            "episodes": len(self.returns),
            "return_mean": self.mean,
            "return_std": self.std,
            "return_min": float(self.returns.min()),
            "return_max": float(self.returns.max()),
            "length_mean": float(self.lengths.mean()),
            "returns": [float(r) for r in self.returns],
        }

    def __str__(self) -> str:
        kind = "deterministic" if self.deterministic else "sampled"
        return f"{self.mean:.1f} +- {self.std:.1f} over {len(self.returns)} episodes ({kind})"


def evaluate_policy(
    runtime: PolicyRuntime,
    env: VectorEnv,
    episodes: int,
    *,
    deterministic: bool = True,
    seed: int = 0,
    batch_size: int | None = None,
    max_episode_steps: int = MAX_EPISODE_STEPS,
) -> Evaluation:
    """Play whole episodes.

    Every environment plays the same number of episodes, give or take one: taking the first that end
    would favour short ones.

    Args:
        env: is reset, and left wherever the last episode ended.
        episodes: how many, over all environments.
        seed: of the environments and of sampled actions.
        batch_size: pad each call of the policy to this many rows, so that a graph compiled for that
            batch serves.
        max_episode_steps: an episode that takes more is cut there, which is logged as a warning;
            its environment plays no other.
    """
    n = env.num_envs
    policy = ActingPolicy(runtime, seed)
    spec = runtime.spec
    quota = np.full(n, episodes // n) + (np.arange(n) < episodes % n)
    returns, lengths, cut = np.zeros(n), np.zeros(n, np.int64), np.zeros(n, np.int64)
    finished: list[tuple[float, int]] = []
    observations = env.reset(seed)
    while quota.any():
        rows = max(n, batch_size or 0)
        padded = tuple(pad_rows(x, rows) for x in observations)
        acted = runtime.act(padded, policy.noise(rows, deterministic))
        step = env.step(spec.to_environment(acted.action[:n]))
        observations = step.observations
        returns += np.where(step.valid, step.rewards, 0.0)
        lengths += step.valid
        ended = (step.terminated | step.truncated) & step.valid
        endless = ~ended & (quota > 0) & (lengths >= max_episode_steps)
        cut += endless
        for i in np.flatnonzero(ended | endless):
            if quota[i] > 0:
                quota[i] = 0 if endless[i] else quota[i] - 1
                finished.append((float(returns[i]), int(lengths[i])))
            returns[i], lengths[i] = 0.0, 0
    if cut.any():
        logger.warning(
            "%d evaluation episodes of %s did not end within %d steps and were cut there: limit "
            "them with max_episode_steps where the environment is registered, or with "
            "--set env_kwargs.max_episode_steps=N",
            cut.sum(),
            env.env_id,
            max_episode_steps,
        )
    result = np.array(finished)
    return Evaluation(result[:, 0], result[:, 1].astype(np.int64), deterministic)


def evaluate_run_policy(
    runtime: PolicyRuntime,
    config: TrainConfig,
    episodes: int,
    *,
    deterministic: bool = True,
    seed: int | None = None,
) -> Evaluation:
    """Episodes in new environments of a run's kind, as many at once as the run trains on.

    `seed` is by default one that training does not use, and always the same for a run.
    """
    num_envs = min(episodes, config.n_envs)
    with envs.make_vector(
        config.env, num_envs, kwargs=config.env_kwargs, backend=config.vectorization
    ) as env:
        return evaluate_policy(
            runtime,
            env,
            episodes,
            deterministic=deterministic,
            seed=evaluation_seed(config) if seed is None else seed,
            batch_size=config.n_envs,
            max_episode_steps=config.evaluation.max_episode_steps,
        )


def evaluation_seed(config: TrainConfig) -> int:
    """Seed of evaluation, apart from the one that training resets its environments with."""
    return config.seed + 1_000_003
