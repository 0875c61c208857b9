"""Chunks of environments that go each at its own pace."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

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


def collect(collector, count):
    """That many finished chunks; environments go on at once."""
    chunks = []
    collector.reset(0)
    collector.start(np.arange(collector.env.num_envs))
    while len(chunks) < count:
        for i in collector.advance():
            chunks.append((i, Trajectories.empty(collector.spec, collector.n_steps, 1)))
            collector.take(i, chunks[-1][1])
            collector.start(np.array([i]))
    return chunks


def test_a_chunk_is_a_stretch_of_one_environment():
    # Counter observes [episode, step], rewards the step, and is truncated after 4 steps.
    collector = collector_of("faulty_envs:Counter-v0", 3, 6, faulty=False)
    with collector.env:
        begun = {}
        for i, chunk in collect(collector, 12):
            episode, count = chunk.observations[0][:, 0].T
            cut = count == 3
            np.testing.assert_array_equal(chunk.rewards[:, 0], count + 1)
            np.testing.assert_array_equal(chunk.truncated[:, 0], cut)
            np.testing.assert_array_equal(count[1:], np.where(cut, 0, count + 1)[:-1])
            np.testing.assert_array_equal(episode[1:], (episode + cut)[:-1])
            # Of the true successor: the final observation where the episode was cut.
            np.testing.assert_array_equal(chunk.next_values[:, 0], 10 * episode + count + 1)
            np.testing.assert_array_equal(chunk.values[:, 0], 10 * episode + count)
            begun.setdefault(i, []).append(4 * episode[0] + count[0])
        for starts in begun.values():  # none of an environment's steps twice or left out
            assert starts == [6 * k for k in range(len(starts))]
        assert collector.episodes.return_mean == 10.0


def test_an_environment_rests_between_chunks_and_acts_by_the_newest_weights():
    collector = collector_of("faulty_envs:Counter-v0", 2, 2, faulty=False)
    chunk = Trajectories.empty(collector.spec, 2, 1)
    with collector.env:
        collector.reset(0)
        collector.start(np.array([0, 1]))
        finished = set()
        while finished != {0, 1}:
            finished |= set(collector.advance())
        collector.runtime.version = 5
        collector.start(np.array([1]))
        while not collector.advance():
            pass
        collector.take(1, chunk)
        np.testing.assert_array_equal(chunk.versions[:, 0], [5, 5])
        np.testing.assert_array_equal(chunk.observations[0][:, 0], [[0, 2], [0, 3]])
        collector.take(0, chunk)  # untouched
        np.testing.assert_array_equal(chunk.versions[:, 0], [0, 0])


class Counting(ValuesTheObservation):
    """Has newer weights at every call."""

    def act(self, observations, noise):
        self.version += 1
        return super().act(observations, noise)


def test_steps_carry_the_version_that_chose_them():
    collector = collector_of("faulty_envs:Counter-v0", 1, 3, Counting, faulty=False)
    with collector.env:
        ((_, chunk),) = collect(collector, 1)
        np.testing.assert_array_equal(chunk.versions[:, 0], [1, 2, 3])


class CountingRows(ValuesTheObservation):
    rows: ClassVar[list[int]] = []

    def act(self, observations, noise):
        self.rows.append(len(noise))
        return super().act(observations, noise)


def test_of_many_environments_a_few_are_gathered_for_each_call_of_the_policy():
    collector = collector_of("faulty_envs:Counter-v0", 32, 1000, CountingRows, faulty=False)
    with collector.env:
        collector.reset(0)
        collector.start(np.arange(32))
        CountingRows.rows.clear()
        for _ in range(50):
            assert collector.advance() == []
    # Others than these are of final observations, where an episode was cut.
    assert sum(rows >= 2 for rows in CountingRows.rows) >= 50
