"""Worker processes that crash, die or hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest

from msrl_accel.envs import VectorEnv, make_vector
from msrl_accel.errors import EnvError, SpaceError

ACTIONS = np.zeros(2, np.int64)


@pytest.fixture(autouse=True)
def no_orphans() -> Iterator[None]:
    yield
    children = psutil.Process().children(recursive=True)
    left = [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]
    assert not left


def run_until_error(env: VectorEnv) -> str:
    env.reset(seed=0)
    with pytest.raises(EnvError) as caught:
        for _ in range(4):
            env.step(ACTIONS)
    return str(caught.value)


def test_an_exception_arrives_with_the_workers_traceback() -> None:
    message = run_until_error(make_vector("faulty_envs:Raising-v0", 2, backend="async"))
    assert "Raising-v0: environment" in message
    assert "local error 1 2" in message
    assert "in deep_inside" in message


def test_a_worker_that_exits_is_named() -> None:
    message = run_until_error(make_vector("faulty_envs:Exiting-v0", 2, backend="async"))
    assert "Exiting-v0" in message
    assert "environment 0 died (exit code 7)" in message or "environment 1 died" in message


def test_a_worker_that_hangs_is_named_after_the_timeout() -> None:
    env = make_vector("faulty_envs:Hanging-v0", 2, backend="async", timeout=2.0)
    start = time.monotonic()
    message = run_until_error(env)
    assert "Hanging-v0: environment 0, 1 did not answer step within 2 s" in message
    assert time.monotonic() - start < 30
    env.close()


def test_a_killed_worker_is_named() -> None:
    env: Any = make_vector("CartPole-v1", 2, backend="async")
    env.reset(seed=0)
    workers = [
        child
        for child in psutil.Process().children()
        if "resource_tracker" not in " ".join(child.cmdline())
    ]
    victim = max(workers, key=lambda child: child.create_time())
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(EnvError, match=r"CartPole-v1.*environment \d died \(signal SIGKILL\)"):
        for _ in range(3):
            env.step(ACTIONS)


def test_a_worker_that_cannot_make_its_environment_says_why() -> None:
    with pytest.raises(EnvError, match=r"OnlyInParent-v0: environment \d") as caught:
        make_vector("faulty_envs:OnlyInParent-v0", 2, backend="async")
    assert "RuntimeError: no licence in this process" in str(caught.value)


def test_a_refused_space_leaves_no_worker() -> None:
    with pytest.raises(SpaceError):
        make_vector("faulty_envs:TupleObservation-v0", 2, backend="async")


def test_final_observations_come_from_workers() -> None:
    kwargs = {"length": 2, "faulty": False}
    with make_vector("faulty_envs:DictCounter-v0", 2, kwargs=kwargs, backend="async") as env:
        env.reset()
        env.step(ACTIONS)
        result = env.step(ACTIONS)
    assert result.truncated.all()
    assert result.valid.all()
    np.testing.assert_array_equal(result.next_observations[1], [[0, 2], [0, 2]])
    np.testing.assert_array_equal(result.observations[1], [[1, 0], [1, 0]])


def test_an_environment_registered_only_here_works_in_workers() -> None:
    from gymnasium.envs.classic_control import CartPoleEnv

    gymnasium.register(id="LambdaCartPole-v0", entry_point=lambda: CartPoleEnv())
    try:
        with make_vector("LambdaCartPole-v0", 2, backend="async") as env:
            assert env.reset(seed=0)[0].shape == (2, 4)
            assert env.step(ACTIONS).rewards.tolist() == [1.0, 1.0]
    finally:
        del gymnasium.registry["LambdaCartPole-v0"]


def test_closing_twice_and_using_a_closed_environment() -> None:
    env = make_vector("CartPole-v1", 2, backend="async")
    env.reset(seed=0)
    env.close()
    env.close()
    with pytest.raises(EnvError, match="CartPole-v1"):
        env.step(ACTIONS)


def run_script(path: Path, code: str) -> subprocess.CompletedProcess[str]:
    path.write_text(textwrap.dedent(code))
    return subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_script_without_main_guard_gets_one_message(tmp_path: Path) -> None:
    done = run_script(
        tmp_path / "unguarded.py",
        """
        from msrl_accel.envs import make_vector
        env = make_vector("CartPole-v1", 3, backend="async")
        env.reset(seed=0)
        """,
    )
    assert done.returncode != 0
    assert done.stderr.count("if __name__ == '__main__':") == 1
    assert "bootstrapping" not in done.stderr
    assert done.stderr.rstrip().splitlines()[-1].startswith("msrl_accel.errors.EnvError")


def test_an_environment_of_the_main_script_works_and_its_error_is_shown(tmp_path: Path) -> None:
    done = run_script(
        tmp_path / "guarded.py",
        """
        import gymnasium
        import numpy as np
        from msrl_accel.envs import make_vector
        from gymnasium.envs.classic_control import CartPoleEnv

        class MineError(Exception):
            pass

        class Mine(CartPoleEnv):
            def step(self, action):
                if action == 1:
                    raise MineError("mine went off")
                return super().step(action)

        if __name__ == "__main__":
            gymnasium.register(id="Mine-v0", entry_point=lambda **kwargs: Mine(**kwargs))
            env = make_vector("Mine-v0", 2, backend="async")
            env.reset(seed=0)
            env.step(np.array([0, 0]))
            print("stepped")
            env.step(np.array([0, 1]))
        """,
    )
    assert done.stdout == "stepped\n"
    assert "Mine-v0: environment 1" in done.stderr
    assert "MineError: mine went off" in done.stderr


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            """
            import time
            from msrl_accel.envs import make_vector
            if __name__ == "__main__":
                env = make_vector("CartPole-v1", 2, backend="async")
                env.reset(seed=0)
                print("ready", flush=True)
                time.sleep(600)
            """
        )
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        assert parent.stdout.readline() == "ready\n"
    workers = psutil.Process(parent.pid).children(recursive=True)
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(workers, timeout=15)
    assert not alive
