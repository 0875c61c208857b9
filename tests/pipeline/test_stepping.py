from __future__ import annotations

import time

import gymnasium
import pytest
from faulty_envs import Counter

from msrl_accel.config import resolve_config
from msrl_accel.envs import make_vector
from msrl_accel.errors import ConfigError
from msrl_accel.pipeline.stepping import lay_out, waits


class Sleeping(Counter):
    def reward(self):
        time.sleep(0.003)
        return 0.0


class Computing(Counter):
    def reward(self):
        end = time.thread_time() + 0.003
        while time.thread_time() < end:
            pass
        return 0.0


for _cls in (Sleeping, Computing):
    gymnasium.register(f"{_cls.__name__}-v0", entry_point=_cls)


@pytest.mark.parametrize(("env_id", "waiting"), [("Sleeping-v0", True), ("Computing-v0", False)])
def test_waiting_is_told_from_computing(env_id, waiting):
    with make_vector(env_id, 1, kwargs={"faulty": False}) as env:
        assert waits(env) == waiting


def layout_of(env_id="Sleeping-v0", n_envs=16, **options):
    pipeline = {f"pipeline.{key}": value for key, value in options.items() if key != "backend"}
    config = resolve_config(
        "ppo",
        env_id,
        tuned=False,
        n_envs=n_envs,
        env_kwargs={"faulty": False} if env_id != "CartPole-v1" else {},
        vectorization=options.get("backend", "auto"),
        overrides={"pipeline.mode": "async", **pipeline},
    )
    with make_vector(env_id, 1, kwargs=config.env_kwargs, backend="sync") as env:
        return lay_out(config, env)


@pytest.mark.parametrize(
    ("options", "apart"),
    [
        ({}, True),
        ({"env_id": "Computing-v0"}, False),
        ({"env_id": "CartPole-v1"}, False),
        ({"backend": "sync"}, False),  # asked for
        ({"max_staleness": 0, "envs_per_worker": 8}, False),  # as synchronous training steps
        ({"stepping": "together"}, False),
        ({"stepping": "apart", "env_id": "Computing-v0"}, True),
    ],
)
def test_environments_that_wait_go_apart_unless_another_way_is_asked_for(options, apart):
    assert layout_of(**options).apart == apart


def test_slots_suffice_for_what_is_filled_and_what_waits():
    together = layout_of("Computing-v0", n_envs=50, workers=3, envs_per_worker=32)
    assert (together.columns, together.slots(4), together.slots(1)) == (32, 3 + 4 * 2, 3 + 2)
    apart = layout_of(n_envs=50, workers=3, envs_per_worker=32)
    assert (apart.columns, apart.slots(4)) == (1, 3 * 32 + 4 * 50)
    small = layout_of("Computing-v0", n_envs=8, workers=2, envs_per_worker=32)
    assert small.columns == 8  # no more than an update takes


def test_without_lag_everybody_has_an_equal_share():
    assert layout_of(n_envs=32, workers=2, envs_per_worker=8, max_staleness=0).quota == 16
    assert layout_of(n_envs=32, workers=2, envs_per_worker=8).quota is None
    with pytest.raises(ConfigError, match=r"n_envs = 16.*multiple of the 32 environments"):
        layout_of(workers=2, envs_per_worker=16, max_staleness=0)


def test_environments_that_could_never_all_be_at_work_are_warned_of(caplog):
    layout_of(n_envs=8, workers=2, envs_per_worker=8, max_staleness=1)
    assert caplog.text == ""
    layout_of(n_envs=8, workers=2, envs_per_worker=32, max_staleness=1)
    assert "only 16 of 64 environments can be at work at once" in caplog.text
