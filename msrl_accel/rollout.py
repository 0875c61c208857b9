"""Collecting trajectories: vector environment + policy runtime -> `Trajectories`."""

from __future__ import annotations

from typing import Any

import numpy as np

from msrl_accel.envs.base import StepResult, VectorEnv
from msrl_accel.metrics import EpisodeStats
from msrl_accel.normalize import RewardNormalizer
from msrl_accel.runtime.base import PolicyRuntime, pad_rows
from msrl_accel.spaces import Observations
from msrl_accel.trajectories import Trajectories


class EnvironmentLoop:
    """Environments, the policy that acts in them, and where they stand.

    Args:
        env: the environments.
        runtime: acts for them, always at batch `env.num_envs`.
        rng: source of the policy's noise.
    """

    def __init__(self, env: VectorEnv, runtime: PolicyRuntime, rng: np.random.Generator) -> None:
        self.env = env
        self.runtime = runtime
        self.spec = runtime.spec
        self.rng = rng
        self.episodes = EpisodeStats(env.num_envs)
        self.observations: Observations = ()

    def reset(self, seed: int | None) -> None:
        """Start all environments anew."""
        self.observations = self.env.reset(seed)

    def state(self) -> dict[str, Any]:
        """All that decides what comes next, apart from the policy.

        Environments that cannot be saved give None: they start new episodes after a restore.
        """
        return {
            "env": self.env.state(),
            "rng": self.rng.bit_generator.state,
            "episodes": self.episodes.state(),
        }

    def restore(self, state: dict[str, Any], reset_seed: int) -> bool:
        """Inverse of `state`; returns whether the environments continue exactly where they were."""
        self.rng.bit_generator.state = state["rng"]
        self.episodes.restore(state["episodes"])
        # Either side may be unable to: the run may continue with another kind of vectorisation.
        if state["env"] is None or self.env.state() is None:
            self.reset(reset_seed)
            self.episodes.abandon_running()
            return False
        self.observations = self.env.restore(state["env"])
        return True


class Collector(EnvironmentLoop):
    """Steps a vector environment with a policy into trajectories.

    Args:
        n_steps: steps of each environment in one batch of trajectories.
        reward_normalizer: scales the rewards that training sees; episode returns stay raw.
    """

    def __init__(
        self,
        env: VectorEnv,
        runtime: PolicyRuntime,
        n_steps: int,
        rng: np.random.Generator,
        reward_normalizer: RewardNormalizer | None = None,
    ) -> None:
        super().__init__(env, runtime, rng)
        self.n_steps = n_steps
        self.reward_normalizer = reward_normalizer

    def collect(self, into: Trajectories | None = None) -> Trajectories:
        """Take `n_steps` steps in each environment.

        Args:
            into: arrays [n_steps, N, ...] to fill; new ones by default.
        """
        steps, n = self.n_steps, self.env.num_envs
        noise = self.spec.draw_noise(self.rng, (steps, n))
        batch = into or Trajectories.empty(self.spec, steps, n)
        final: list[tuple[int, np.ndarray, Observations]] = []
        for t in range(steps):
            observations = self.spec.cast(self.observations)
            acted = self.runtime.act(observations, noise[t])
            step = self.env.step(self.spec.to_environment(acted.action))
            for stored, x in zip(batch.observations, observations):
                stored[t] = x
            batch.raw_actions[t] = acted.raw_action
            batch.log_probs[t] = acted.log_prob
            batch.values[t] = acted.value
            batch.versions[t] = self.runtime.version
            self._store_outcome(batch, t, step)
            cut = np.flatnonzero(step.truncated & ~step.terminated)
            if len(cut):
                final.append((t, cut, tuple(x[cut] for x in step.next_observations)))
            self.observations = step.observations
        self._bootstrap(batch, final)
        return batch

    def _store_outcome(self, batch: Trajectories, t: int, step: StepResult) -> None:
        done = step.terminated | step.truncated
        self.episodes.update(step.rewards, done, step.valid)
        rewards = step.rewards
        if self.reward_normalizer is not None:
            rewards = self.reward_normalizer(rewards, done, step.valid)
        batch.rewards[t] = rewards
        batch.terminated[t] = step.terminated
        batch.truncated[t] = step.truncated
        batch.valid[t] = step.valid

    def _bootstrap(
        self, batch: Trajectories, final: list[tuple[int, np.ndarray, Observations]]
    ) -> None:
        """Fill `next_values`: of the next step, or of the final observation where one was cut."""
        batch.next_values[:-1] = batch.values[1:]
        batch.next_values[-1] = self.values(self.observations)
        if not final:
            return
        columns = range(len(self.spec.observations))
        values = self.values(
            tuple(np.concatenate([part[i] for _, _, part in final]) for i in columns)
        )
        start = 0
        for t, environments, _ in final:
            batch.next_values[t, environments] = values[start : start + len(environments)]
            start += len(environments)

    def values(self, observations: Observations) -> np.ndarray:
        """Values [R] of any number of observations, in batches of the one compiled size."""
        n = self.env.num_envs
        rows = len(observations[0])
        noise = self.spec.zero_noise((n,))
        values = np.empty(rows, np.float32)
        for start in range(0, rows, n):
            chunk = tuple(pad_rows(x[start : start + n], n) for x in observations)
            stop = min(start + n, rows)
            value = self.runtime.act(chunk, noise).value
            assert value is not None
            values[start:stop] = value[: stop - start]
        return values

    def state(self) -> dict[str, Any]:
        normalizer = self.reward_normalizer and self.reward_normalizer.state()
        return {**super().state(), "reward_normalizer": normalizer}

    def restore(self, state: dict[str, Any], reset_seed: int) -> bool:
        if self.reward_normalizer is not None and state["reward_normalizer"] is not None:
            self.reward_normalizer.restore(state["reward_normalizer"])
        return super().restore(state, reset_seed)
