"""Environments in threads: the same transitions as in turn, and none waits for a slow one."""

from __future__ import annotations

import threading

import gymnasium
import numpy as np
import pytest
from faulty_envs import Counter

from msrl_accel.envs import make_vector
from msrl_accel.envs.threads import ThreadVectorEnv
from msrl_accel.errors import EnvError

DELAYED = "msrl_accel.envs.delayed:Delayed-v0"


def threads(env_id: str, n: int, **kwargs: object) -> ThreadVectorEnv:
    env = make_vector(env_id, n, backend="threads", **kwargs)  # type: ignore[arg-type]
    assert isinstance(env, ThreadVectorEnv)
    return env


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "faulty_envs:DictCounter-v0"])
def test_steps_equal_those_taken_in_turn(env_id: str) -> None:
    kwargs = {"faulty": False} if "faulty" in env_id else None
    with (
        threads(env_id, 3, kwargs=kwargs) as ours,
        make_vector(env_id, 3, kwargs=kwargs, backend="sync") as reference,
    ):
        for a, b in zip(ours.reset(7), reference.reset(7)):
            np.testing.assert_array_equal(a, b)
        ours.action_space.seed(1)
        for _ in range(60):
            actions = np.stack([ours.action_space.sample() for _ in range(3)])
            got, expected = ours.step(actions), reference.step(actions)
            for name in ("observations", "next_observations"):
                for a, b in zip(getattr(got, name), getattr(expected, name)):
                    np.testing.assert_array_equal(a, b)
                    assert a.dtype == b.dtype
            for name in ("rewards", "terminated", "truncated", "valid"):
                np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))


class Meeting(Counter):
    """A step ends once both environments are in it."""

    barrier = threading.Barrier(2, timeout=30)

    def reward(self) -> float:
        self.barrier.wait()
        return 1.0


class Gated(Counter):
    """Every step of the first environment waits until it is let go."""

    gate = threading.Event()
    made = 0

    def __init__(self) -> None:
        super().__init__(faulty=False)
        self.slow = Gated.made % 2 == 0
        Gated.made += 1

    def reward(self) -> float:
        if self.slow:
            assert self.gate.wait(30)
        return 1.0


for _cls in (Meeting, Gated):
    gymnasium.register(f"{_cls.__name__}-v0", entry_point=_cls)


def test_environments_wait_at_the_same_time() -> None:
    with threads("Meeting-v0", 2, kwargs={"faulty": False}) as env:
        env.reset(0)
        np.testing.assert_array_equal(env.step(np.zeros(2, np.int64)).rewards, [1.0, 1.0])


def test_the_quick_do_not_wait_for_the_slow() -> None:
    with threads("Gated-v0", 2) as env:
        env.reset(0)
        env.send(np.arange(2), np.zeros(2, np.int64))
        for _ in range(3):
            indices, result = env.receive()
            assert indices.tolist() == [1]
            assert len(result.rewards) == 1
            env.send(indices, np.zeros(1, np.int64))
        Gated.gate.set()
        assert 0 in env.receive(2)[0]


def test_failures_name_the_environment_and_leave_no_thread() -> None:
    before = threading.active_count()
    with threads("faulty_envs:Raising-v0", 2) as env:
        env.reset(0)
        with pytest.raises(EnvError, match=r"Raising-v0: environment [01] raised"):
            for _ in range(4):
                env.step(np.zeros(2, np.int64))
    assert threading.active_count() == before


def test_a_hung_environment_is_named_after_the_timeout() -> None:
    with threads(DELAYED, 2, kwargs={"mean_ms": 1500.0}, timeout=0.3) as env:
        env.reset(0)
        env.send(np.array([1]), np.zeros(1, np.int64))
        with pytest.raises(EnvError, match=r"environment 1 did not answer within 0\.3 s"):
            env.receive()


def test_a_non_finite_number_is_blamed_on_the_right_environment() -> None:
    with threads("faulty_envs:NanReward-v0", 2) as env:
        env.reset(0)
        with pytest.raises(EnvError, match="environment 1 returned reward nan"):
            for _ in range(4):
                env.send(np.array([1]), np.zeros(1, np.int64))
                env.receive()


def test_latencies_have_the_mean_and_the_tail_that_were_asked_for() -> None:
    from msrl_accel.envs.delayed import DelayedEnv

    env = DelayedEnv(mean_ms=10.0, spread=1.0)
    env.reset(seed=0)
    seconds = np.array([env.latency() for _ in range(20000)])
    assert seconds.mean() == pytest.approx(0.010, rel=0.05)
    assert np.quantile(seconds, 0.99) > 0.06
