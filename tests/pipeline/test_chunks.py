"""Chunks of environments that go each at its own pace."""

from __future__ import annotations

import numpy as np
import pytest

from msrl_accel.envs import make_vector
from msrl_accel.pipeline.chunks import ChunkCollector
from msrl_accel.runtime.base import ActResult, check_inputs
from msrl_accel.spaces import PolicySpec
from msrl_accel.trajectories import Trajectories


class ValuesTheObservation:
    """Value: 10 times the first number of the observation, plus the second; action 0."""

    def __init__(self, spec: PolicySpec) -> None:
        self.spec = spec
        self.version = 0

    def act(self, observations, noise):
        (x,) = check_inputs(self.spec, observations, noise)
        raw = np.zeros(len(x), np.int32)
        value = 10.0 * x[:, 0] + x[:, 1]
        return ActResult(raw, np.zeros(len(x), np.float32), value, raw, (noise,))


def collector_of(env_id, n_envs, n_steps, runtime=ValuesTheObservation, **kwargs):
    env = make_vector(env_id, n_envs, kwargs=kwargs, backend="threads")
    spec = PolicySpec.from_spaces(env.observation_space, env.action_space)
    return ChunkCollector(env, runtime(spec), n_steps, np.random.default_rng(0))


@pytest.mark.parametrize("columns", [1, 3, 7])
def test_a_chunk_is_a_stretch_of_one_environment(columns):
    # Counter observes [episode, step], rewards the step, and is truncated after 4 steps.
    collector = collector_of("faulty_envs:Counter-v0", 3, 6, faulty=False)
    with collector.env:
        collector.reset(0)
        last = {}
        for _ in range(4):
            chunks = collector.collect(Trajectories.empty(collector.spec, 6, columns))
            for j in range(columns):
                episode, count = chunks.observations[0][:, j].T
                cut = count == 3
                np.testing.assert_array_equal(chunks.rewards[:, j], count + 1)
                np.testing.assert_array_equal(chunks.truncated[:, j], cut)
                np.testing.assert_array_equal(count[1:], np.where(cut, 0, count + 1)[:-1])
                np.testing.assert_array_equal(episode[1:], (episode + cut)[:-1])
                # Of the true successor: the final observation where the episode was cut.
                np.testing.assert_array_equal(chunks.next_values[:, j], 10 * episode + count + 1)
                np.testing.assert_array_equal(chunks.values[:, j], 10 * episode + count)
                start = 4 * episode[0] + count[0]
                last[start] = last.get(start, 0) + 1
        # Every environment went through the same steps, in chunks of 6, none twice or left out.
        assert all(start % 6 == 0 and seen <= 3 for start, seen in last.items())
        assert collector.episodes.return_mean == 10.0


class Counting(ValuesTheObservation):
    """Has newer weights at every call."""

    def act(self, observations, noise):
        self.version += 1
        return super().act(observations, noise)


def test_steps_carry_the_version_that_chose_them():
    collector = collector_of("faulty_envs:Counter-v0", 1, 3, Counting, faulty=False)
    with collector.env:
        chunk = collector.collect(Trajectories.empty(collector.spec, 3, 1))
        np.testing.assert_array_equal(chunk.versions[:, 0], [1, 2, 3])
