"""Environments in threads: the same transitions as in turn, and none waits for a slow one."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

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


def test_waiting_environments_wait_together() -> None:
    with threads(DELAYED, 16, kwargs={"mean_ms": 100.0}) as env:
        env.reset(0)
        start = time.perf_counter()
        env.step(np.zeros(16, np.int64))
        assert time.perf_counter() - start < 0.8  # in turn: 1.6 s


def test_the_quick_do_not_wait_for_the_slow() -> None:
    with threads(DELAYED, 2, kwargs={"mean_ms": 300.0}) as env:
        env.reset(0)
        env.send(np.array([0]), np.zeros(1, np.int64))
        time.sleep(0.15)
        env.send(np.array([1]), np.zeros(1, np.int64))
        first, result = env.receive()
        assert first.tolist() == [0]
        assert len(result.rewards) == 1
        second, _ = env.receive()
        assert second.tolist() == [1]


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
