"""Trajectories from environments that step each at its own pace."""

from __future__ import annotations

import numpy as np

from msrl_accel.envs.base import StepResult
from msrl_accel.envs.threads import ThreadVectorEnv
from msrl_accel.normalize import RewardNormalizer
from msrl_accel.pipeline.slots import copy_columns
from msrl_accel.rollout import EnvironmentLoop
from msrl_accel.runtime.base import ActResult, PolicyRuntime
from msrl_accel.spaces import Observations
from msrl_accel.trajectories import Trajectories

_GATHER = 16
"""One in so many of the environments under way is waited for before the policy acts: a call costs
about the same for one row as for several, and that many answer within a moment of each other."""


class ChunkCollector(EnvironmentLoop):
    """Collects chunks of `n_steps` steps of single environments as each environment gets there.

    The policy acts on whichever environments have answered, so that none waits for a slower one.
    An environment whose chunk is finished rests until it is started again: its next action is
    chosen then, by the weights of that time. ::

        collector.reset(seed)
        collector.start(np.arange(n))
        while True:
            for i in collector.advance():
                collector.take(i, trajectories)     # [n_steps, 1]
                collector.start(np.array([i]))

    Args:
        env: the environments.
        runtime: acts for them, at any batch.
        n_steps: steps of a chunk.
        rng: source of the policy's noise.
        reward_normalizer: scales the rewards that training sees; episode returns stay raw.
    """

    env: ThreadVectorEnv

    def __init__(
        self,
        env: ThreadVectorEnv,
        runtime: PolicyRuntime,
        n_steps: int,
        rng: np.random.Generator,
        reward_normalizer: RewardNormalizer | None = None,
    ) -> None:
        super().__init__(env, runtime, rng)
        self.n_steps = n_steps
        self.reward_normalizer = reward_normalizer
        self.chunks = Trajectories.empty(self.spec, n_steps, env.num_envs)  # one under way each
        self.filled = np.zeros(env.num_envs, np.int64)  # steps of it that have been taken

    def reset(self, seed: int | None) -> None:
        super().reset(seed)
        self.observations = self.spec.cast(self.observations)
        self.filled[:] = 0

    def start(self, indices: np.ndarray) -> None:
        """Begin the next chunks of environments [M] that rest."""
        self.filled[indices] = 0
        observations = tuple(x[indices] for x in self.observations)
        self._begin_steps(indices, observations, self._act(observations))

    def advance(self) -> list[int]:
        """Wait for an environment or a few and let them go on; returns those that have finished."""
        indices, step = self.env.receive(max(self.env.under_way // _GATHER, 1))
        chunks, t = self.chunks, self.filled[indices]
        self._store_outcome(t, indices, step)
        # What the policy acts on next also values the successor of the step just taken ...
        observations = self.spec.cast(step.observations)
        acted = self._act(observations)
        chunks.next_values[t, indices] = acted.value
        cut = step.truncated & ~step.terminated
        if cut.any():  # ... but for episodes that were cut: there it is their final observation
            final = tuple(x[cut] for x in self.spec.cast(step.next_observations))
            noise = self.spec.zero_noise((int(cut.sum()),))
            chunks.next_values[t[cut], indices[cut]] = self.runtime.act(final, noise).value
        self.filled[indices] += 1
        done = self.filled[indices] == self.n_steps
        for kept, x in zip(self.observations, observations):
            kept[indices[done]] = x[done]
        if not done.all():
            on = ~done
            self._begin_steps(indices[on], tuple(x[on] for x in observations), acted, on)
        finished: list[int] = indices[done].tolist()
        return finished

    def take(self, index: int, into: Trajectories) -> None:
        """Copy the finished chunk of an environment into trajectories [n_steps, 1]."""
        copy_columns(self.chunks, slice(index, index + 1), into)

    def _act(self, observations: Observations) -> ActResult:
        return self.runtime.act(
            observations, self.spec.draw_noise(self.rng, (len(observations[0]),))
        )

    def _begin_steps(
        self,
        indices: np.ndarray,
        observations: Observations,
        acted: ActResult,
        rows: np.ndarray | slice = slice(None),
    ) -> None:
        """Note what the policy saw and did in environments `indices`, and start their steps.

        Args:
            rows: of `acted` that are these environments'.
        """
        chunks, t = self.chunks, self.filled[indices]
        for stored, x in zip(chunks.observations, observations):
            stored[t, indices] = x
        chunks.raw_actions[t, indices] = acted.raw_action[rows]
        chunks.log_probs[t, indices] = acted.log_prob[rows]
        assert acted.value is not None
        chunks.values[t, indices] = acted.value[rows]
        chunks.versions[t, indices] = self.runtime.version
        self.env.send(indices, self.spec.to_environment(acted.action[rows]))

    def _store_outcome(self, t: np.ndarray, indices: np.ndarray, step: StepResult) -> None:
        chunks, n = self.chunks, self.env.num_envs
        chunks.terminated[t, indices] = step.terminated
        chunks.truncated[t, indices] = step.truncated
        chunks.valid[t, indices] = step.valid
        rewards, done, valid = np.zeros(n), np.zeros(n, bool), np.zeros(n, bool)
        rewards[indices] = step.rewards
        done[indices] = step.terminated | step.truncated
        valid[indices] = step.valid
        self.episodes.update(rewards, done, valid)
        if self.reward_normalizer is not None:
            rewards = self.reward_normalizer(rewards, done, valid)
        chunks.rewards[t, indices] = rewards[indices]
