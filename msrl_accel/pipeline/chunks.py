"""Trajectories from environments that step each at its own pace."""

from __future__ import annotations

from collections import deque
from dataclasses import fields

import numpy as np

from msrl_accel.envs.base import StepResult
from msrl_accel.envs.threads import ThreadVectorEnv
from msrl_accel.normalize import RewardNormalizer
from msrl_accel.rollout import EnvironmentLoop
from msrl_accel.runtime.base import ActResult, PolicyRuntime
from msrl_accel.spaces import Observations
from msrl_accel.trajectories import Trajectories


class ChunkCollector(EnvironmentLoop):
    """Collects chunks of `n_steps` steps of single environments as each environment gets there.

    The policy acts on whichever environments have answered. A finished chunk becomes the next
    column of the trajectories: quick environments give more columns than slow ones, and none waits.

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
        self.finished: deque[Trajectories] = deque()  # chunks that no trajectories had room for

    def reset(self, seed: int | None) -> None:
        super().reset(seed)
        self.filled[:] = 0
        self.finished.clear()
        observations, acted = self._act(self.observations)
        self._begin_steps(np.arange(self.env.num_envs), observations, acted)

    def collect(self, into: Trajectories) -> Trajectories:
        """Fill trajectories [n_steps, M, ...] with M chunks of any environments."""
        if not self.observations:
            self.reset(None)
        for column in range(into.valid.shape[1]):
            while not self.finished:
                self._advance()
            _copy_column(self.finished.popleft(), 0, into, column)
        return into

    def _advance(self) -> None:
        """Wait for at least one environment, and let it go on."""
        indices, step = self.env.receive()
        chunks, t = self.chunks, self.filled[indices]
        self._store_outcome(t, indices, step)
        # What the policy acts on next also values the successor of the step just taken ...
        observations, acted = self._act(step.observations)
        chunks.next_values[t, indices] = acted.value
        cut = step.truncated & ~step.terminated
        if cut.any():  # ... but for episodes that were cut: there it is their final observation
            final = tuple(x[cut] for x in self.spec.cast(step.next_observations))
            noise = self.spec.zero_noise((int(cut.sum()),))
            chunks.next_values[t[cut], indices[cut]] = self.runtime.act(final, noise).value
        self.filled[indices] += 1
        for i in indices[self.filled[indices] == self.n_steps].tolist():
            chunk = Trajectories.empty(self.spec, self.n_steps, 1)
            _copy_column(chunks, i, chunk, 0)
            self.finished.append(chunk)
            self.filled[i] = 0
        self._begin_steps(indices, observations, acted)

    def _act(self, observations: Observations) -> tuple[Observations, ActResult]:
        """The policy's actions, and the observations it saw."""
        cast = self.spec.cast(observations)
        noise = self.spec.draw_noise(self.rng, (len(cast[0]),))
        return cast, self.runtime.act(cast, noise)

    def _begin_steps(
        self, indices: np.ndarray, observations: Observations, acted: ActResult
    ) -> None:
        """Note what the policy saw and did in environments `indices`, and start their steps."""
        chunks, t = self.chunks, self.filled[indices]
        for stored, x in zip(chunks.observations, observations):
            stored[t, indices] = x
        chunks.raw_actions[t, indices] = acted.raw_action
        chunks.log_probs[t, indices] = acted.log_prob
        chunks.values[t, indices] = acted.value
        chunks.versions[t, indices] = self.runtime.version
        self.env.send(indices, self.spec.to_environment(acted.action))

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


def _copy_column(source: Trajectories, i: int, target: Trajectories, j: int) -> None:
    """Chunk i of one set of trajectories into column j of another."""
    for name in _ARRAYS:
        getattr(target, name)[:, j] = getattr(source, name)[:, i]
    for a, b in zip(target.observations, source.observations):
        a[:, j] = b[:, i]


_ARRAYS = tuple(f.name for f in fields(Trajectories) if f.name != "observations")
