"""Streams of transitions, and a replay written as plain loops over lists."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from gymnasium import spaces

from msrl_accel.spaces import PolicySpec

VECTOR_SPEC = PolicySpec.from_spaces(
    spaces.Box(-np.inf, np.inf, (2,), np.float32), spaces.Box(-1.0, 1.0, (3,), np.float32)
)
IMAGE_SPEC = PolicySpec.from_spaces(
    spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (8, 8, 3), np.uint8),
            "speed": spaces.Box(-np.inf, np.inf, (1,), np.float64),
        }
    ),
    spaces.Discrete(5),
)


@dataclass
class Transition:
    """One step of one environment; observations are known by their numbers."""

    observation: int
    action: np.ndarray
    reward: float
    next_observation: int
    terminated: bool
    ended: bool


class Stream:
    """N environments that end episodes at random, in either kind of automatic reset.

    Every observation has a number of its own, so a transition is known by its observation. With
    next-step reset, the step after an end is a fake transition from the final observation.
    """

    def __init__(self, spec, n_envs, seed, next_step_reset=False, end_chance=0.3):
        self.spec = spec
        self.n_envs = n_envs
        self.rng = np.random.default_rng(seed)
        self.next_step_reset = next_step_reset
        self.end_chance = end_chance
        self.count = 0
        self.current = self.new(n_envs)
        self.resetting = np.zeros(n_envs, bool)
        self.transitions = [[] for _ in range(n_envs)]

    def new(self, n):
        self.count += n
        return np.arange(self.count - n, self.count)

    def observations(self, numbers):
        """Observations made of their numbers."""
        return tuple(encode(o, numbers) for o in self.spec.observations)

    def restart(self):
        """Every environment starts anew, without an end."""
        for transitions in self.transitions:
            if transitions:
                transitions[-1].ended = True
        self.current = self.new(self.n_envs)
        self.resetting[:] = False

    def step(self):
        """Arguments of `Replay.add`."""
        n, rng, action = self.n_envs, self.rng, self.spec.action
        if action.kind == "continuous":
            actions = rng.uniform(-1, 1, (n, *action.raw_shape)).astype(np.float32)
        else:
            actions = rng.integers(0, action.sizes[0], n).astype(np.int32)
        rewards = rng.standard_normal(n)
        valid = ~self.resetting
        terminated = valid & (rng.random(n) < self.end_chance / 2)
        truncated = valid & (rng.random(n) < self.end_chance / 2)
        ended = terminated | truncated
        before, after = self.current, self.new(n)
        for e in np.flatnonzero(valid):
            self.transitions[e].append(
                Transition(
                    before[e], actions[e], float(rewards[e]), after[e], terminated[e], ended[e]
                )
            )
        if self.next_step_reset:
            self.resetting, self.current = ended, after
        else:
            self.current = np.where(ended, self.new(n), after)
        return (
            self.observations(before),
            actions,
            rewards,
            self.observations(after),
            terminated,
            truncated,
            valid,
        )


def encode(observation_spec, numbers):
    """Number -> observation, different for each number."""
    if observation_spec.dtype == "uint8":
        images = np.zeros((len(numbers), *observation_spec.shape), np.uint8)
        images[:, 0, 0, 0], images[:, -1, -1, -1] = numbers % 256, numbers // 256
        return images
    values = np.zeros((len(numbers), *observation_spec.shape), np.float32)
    values[:, 0] = numbers
    values[:, -1] += numbers / 1024
    return values


def numbers_of(spec, observations):
    """The numbers of observations [..., *shape], all entries agreeing."""
    found = []
    for o, x in zip(spec.observations, observations):
        assert x.dtype == o.dtype
        rows = x.reshape(-1, *o.shape)
        if o.dtype == "uint8":
            number = rows[:, 0, 0, 0].astype(int) + 256 * rows[:, -1, -1, -1].astype(int)
        else:
            number = np.round(rows[:, 0]).astype(int) if o.size > 1 else decode_single(rows)
        np.testing.assert_array_equal(encode(o, number), rows)
        found.append(number)
    assert all((number == found[0]).all() for number in found)
    return found[0]


def decode_single(rows):
    return np.round(rows[:, 0] / (1 + 1 / 1024)).astype(int)


@dataclass
class Kept:
    """What a replay should hold, by loops: the newest transitions of each environment."""

    stream: Stream
    rows: int
    share_next: bool
    gamma: float
    n_step: int
    expected: dict = field(default_factory=dict)

    def __post_init__(self):
        for transitions in self.stream.transitions:
            for i in self._kept(transitions):
                self.expected[transitions[i].observation] = self._window(transitions, i)

    def _kept(self, transitions):
        if not self.share_next:
            return range(max(0, len(transitions) - self.rows), len(transitions))
        # Each transition takes a place, each final observation another, and so does the
        # observation after the newest transition, the next one's.
        places, taken = [], 0
        for t in transitions:
            places.append(taken)
            taken += 1 + t.ended
        if transitions and not transitions[-1].ended:
            taken += 1
        return [i for i, place in enumerate(places) if place >= taken - (self.rows + 1)]

    def _window(self, transitions, i):
        """(transition, return, discount, number of the successor) step by step."""
        total, discount, last = 0.0, 1.0, i
        for j in range(i, min(i + self.n_step, len(transitions))):
            total += discount * transitions[j].reward
            discount *= self.gamma
            last = j
            if transitions[j].ended:
                break
        final = transitions[last]
        return (
            transitions[i],
            total,
            0.0 if final.terminated else discount,
            final.next_observation,
        )


def check_samples(replay, kept, rng, n=1000):
    """Everything sampled is as expected, and everything expected is sampled."""
    spec = kept.stream.spec
    batch = replay.sample(rng, n)
    numbers = numbers_of(spec, batch.observations)
    successors = numbers_of(spec, batch.next_observations)
    rewards, discounts, actions = batch.rewards[0], batch.discounts[0], batch.actions[0]
    assert len(replay) == len(kept.expected)
    assert set(numbers) == set(kept.expected)
    transitions, totals, expected_discounts, expected_successors = zip(
        *(kept.expected[number] for number in numbers)
    )
    np.testing.assert_array_equal(successors, expected_successors)
    np.testing.assert_array_equal(actions, np.stack([t.action for t in transitions]))
    np.testing.assert_allclose(rewards, totals, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(discounts, expected_discounts, rtol=1e-6)
    return batch
