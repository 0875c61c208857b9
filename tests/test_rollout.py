from __future__ import annotations

from types import MappingProxyType

import numpy as np
import pytest
from gymnasium import spaces

from msrl_accel.envs import make_vector
from msrl_accel.envs.base import StepResult, VectorEnv
from msrl_accel.normalize import RewardNormalizer
from msrl_accel.rollout import Collector
from msrl_accel.runtime.base import ActResult, check_inputs
from msrl_accel.spaces import PolicySpec


class NumpyRuntime:
    """A hand-made policy: the value is ten times the first number of the observation."""

    def __init__(self, spec):
        self.spec = spec
        self.version = 0
        self.batches = []

    def act(self, observations, noise):
        (x,) = check_inputs(self.spec, observations, noise)
        self.batches.append(len(x))
        logits = np.concatenate([x[:, :1], -x[:, :1]], axis=1) + noise
        raw = logits.argmax(axis=1).astype(np.int32)
        log_prob = logits[np.arange(len(x)), raw]
        start = self.spec.action.starts[0]
        return ActResult(raw + start, log_prob, 10.0 * x[:, 0], raw, (logits,))


class ScriptedEnv(VectorEnv):
    """Plays back observations, ends and rewards; every observation is a number of its own."""

    env_id = "Scripted-v0"
    num_envs = 2
    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = spaces.Discrete(2, start=5)

    # What the policy acts on next; 50 and 80 begin new episodes.
    observations = ((1, 2), (3, 4), (50, 6), (7, 80), (9, 10))
    final = MappingProxyType({(1, 0): 30, (2, 1): 60})
    """True last observations by step and environment: truncated, terminated."""
    rewards = ((0.1, 0.2), (0.3, 0.4), (0.5, 0.6), (0.7, 0.8))

    def __init__(self, invalid=()):
        self.invalid = invalid
        self.t = 0
        self.actions = []

    @staticmethod
    def as_observations(numbers):
        return (np.array(numbers, np.float64)[:, None],)

    def reset(self, seed=None):
        self.t = 0
        return self.as_observations(self.observations[0])

    def step(self, actions):
        self.actions.append(actions)
        t, self.t = self.t, self.t + 1
        upcoming = self.observations[t + 1]
        true = [self.final.get((t, n), upcoming[n]) for n in range(2)]
        return StepResult(
            observations=self.as_observations(upcoming),
            next_observations=self.as_observations(true),
            rewards=np.array(self.rewards[t]),
            terminated=np.array([False, t == 2]),
            truncated=np.array([t == 1, False]),
            valid=np.array([(t, n) not in self.invalid for n in range(2)]),
        )

    def close(self):
        pass


def collector_of(env, n_steps=4, seed=0, **arguments):
    spec = PolicySpec.from_spaces(env.observation_space, env.action_space)
    runtime = NumpyRuntime(spec)
    return Collector(env, runtime, n_steps, np.random.default_rng(seed), **arguments)


def collect_scripted(**arguments):
    env = ScriptedEnv(**arguments)
    collector = collector_of(env)
    collector.reset(0)
    return env, collector, collector.collect()


def test_trajectories_hold_what_the_environment_gave():
    env, collector, batch = collect_scripted()
    np.testing.assert_array_equal(batch.observations[0][..., 0], env.observations[:-1])
    assert batch.observations[0].dtype == np.float32
    np.testing.assert_array_equal(batch.rewards, env.rewards)
    np.testing.assert_array_equal(batch.values, 10.0 * np.array(env.observations[:-1]))
    np.testing.assert_array_equal(np.argwhere(batch.truncated), [[1, 0]])
    np.testing.assert_array_equal(np.argwhere(batch.terminated), [[2, 1]])
    assert batch.valid.all()
    np.testing.assert_array_equal(collector.observations[0][:, 0], [9, 10])


def test_the_environment_gets_its_own_units_and_training_the_raw_action():
    env, _, batch = collect_scripted()
    np.testing.assert_array_equal(np.array(env.actions), batch.raw_actions + 5)
    assert env.actions[0].dtype == env.action_space.dtype


def test_a_truncated_step_is_valued_by_the_true_final_observation():
    _, _, batch = collect_scripted()
    assert batch.next_values[1, 0] == 300.0  # of 30, not of the reset observation 50


def test_other_steps_are_valued_by_the_next_observation():
    _, _, batch = collect_scripted()
    assert batch.next_values[0].tolist() == [30.0, 40.0]
    assert batch.next_values[1, 1] == 60.0
    assert batch.next_values[2, 0] == 70.0
    assert batch.next_values[-1].tolist() == [90.0, 100.0]


def test_a_truncated_last_step_is_valued_by_its_final_observation_too():
    env = ScriptedEnv()
    collector = collector_of(env, n_steps=2)
    collector.reset(0)
    assert collector.collect().next_values[-1].tolist() == [300.0, 60.0]


def test_fake_transitions_are_marked_and_not_counted():
    _, collector, batch = collect_scripted(invalid=((2, 0),))
    np.testing.assert_array_equal(np.argwhere(~batch.valid), [[2, 0]])
    assert len(batch.flat(batch.rewards)) == 7
    # The first environment's episode of steps 0 and 1 ended; its next one has step 3 alone.
    returns = collector.episodes.state()
    assert returns["episodes"] == 2
    assert returns["returns"][0] == pytest.approx(0.7)


def test_episodes_of_a_gymnasium_environment_keep_their_length():
    env = make_vector("msrl_accel.envs.toy:IdentityDiscrete-v0", 2, backend="sync")
    spec = PolicySpec.from_spaces(env.observation_space, env.action_space)

    class Runtime(NumpyRuntime):
        def act(self, observations, noise):
            action = np.full(len(noise), 2, np.int32)
            zeros = np.zeros(len(noise), np.float32)
            return ActResult(action, zeros, zeros, action - 2, ())

    collector = Collector(env, Runtime(spec), 20, np.random.default_rng(0))
    collector.reset(0)
    batch = collector.collect()
    env.close()
    ends = batch.terminated & batch.valid
    lengths = np.diff(np.flatnonzero(ends[batch.valid[:, 0], 0]), prepend=-1)
    assert set(lengths) == {8}
    assert collector.episodes.length_mean == 8


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7])
def test_values_of_any_number_of_rows_use_one_batch_size(rows):
    collector = collector_of(ScriptedEnv())
    numbers = np.arange(rows, dtype=np.float64)
    values = collector.values((numbers[:, None],))
    np.testing.assert_array_equal(values, 10.0 * numbers)
    assert set(collector.runtime.batches) == {2}


def test_training_sees_normalised_rewards_and_reports_keep_the_raw_ones():
    env = ScriptedEnv()
    collector = collector_of(env, reward_normalizer=RewardNormalizer(2, 0.9))
    collector.reset(0)
    batch = collector.collect()
    reference = RewardNormalizer(2, 0.9)
    for t in range(4):
        done = batch.terminated[t] | batch.truncated[t]
        expected = reference(np.array(env.rewards[t]), done)
        np.testing.assert_array_equal(batch.rewards[t], expected)
    assert collector.episodes.return_mean == pytest.approx(np.mean([0.1 + 0.3, 0.2 + 0.4 + 0.6]))


def cartpole_collector(seed=0):
    return collector_of(
        make_vector("CartPole-v1", 8, backend="batched"),
        n_steps=30,
        seed=seed,
        reward_normalizer=RewardNormalizer(8, 0.9),
    )


def assert_equal_batches(first, second):
    for name, value in vars(first).items():
        for a, b in zip(np.atleast_1d(value), np.atleast_1d(getattr(second, name))):
            np.testing.assert_array_equal(a, b)


def test_the_seeds_decide_the_whole_rollout():
    batches = []
    for seed in (0, 0, 1):
        collector = cartpole_collector(seed)
        collector.reset(3)
        batches.append(collector.collect())
    assert_equal_batches(batches[0], batches[1])
    assert not np.array_equal(batches[0].raw_actions, batches[2].raw_actions)


def test_a_restored_collector_continues_bit_for_bit():
    collector = cartpole_collector()
    collector.reset(3)
    collector.collect()
    state = collector.state()
    expected = [collector.collect(), collector.collect()]
    other = cartpole_collector(seed=9)
    assert other.restore(state, reset_seed=77)
    for batch in expected:
        assert_equal_batches(batch, other.collect())
    assert other.episodes.state()["episodes"] == collector.episodes.state()["episodes"] > 0
    assert other.episodes.return_mean == collector.episodes.return_mean


def test_environments_without_a_state_start_new_episodes():
    _, collector, _ = collect_scripted()
    state = collector.state()
    assert state["env"] is None
    other = collector_of(ScriptedEnv())
    assert not other.restore(state, reset_seed=1)
    np.testing.assert_array_equal(other.observations[0][:, 0], [1, 2])
    assert not other.episodes.state()["returns"].any()
    assert other.episodes.state()["episodes"] == 2
