"""What a replay refuses, and how much memory it takes."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from replay_helpers import IMAGE_SPEC, VECTOR_SPEC, Stream

from msrl_accel.errors import ConfigError, ReplayError
from msrl_accel.replay import (
    PrioritySettings,
    ReplayBuffer,
    ShardedReplay,
    buffer,
    memory,
    sharded,
    storage,
)

ARGUMENTS = (
    "observations",
    "actions",
    "rewards",
    "next_observations",
    "terminated",
    "truncated",
    "valid",
)


def step(spec=VECTOR_SPEC, n_envs=2):
    return dict(zip(ARGUMENTS, Stream(spec, n_envs, 0).step()))


@pytest.mark.parametrize("prioritized", [None, PrioritySettings()])
def test_sampling_before_anything_is_stored_is_refused(prioritized):
    replay = ReplayBuffer(VECTOR_SPEC, 10, 2, gamma=0.9, prioritized=prioritized)
    both = ShardedReplay.create(2, VECTOR_SPEC, 10, 2, gamma=0.9, prioritized=prioritized)
    nothing = {**step(), "valid": np.zeros(2, bool)}
    for empty in (replay, both):
        for _ in range(2):
            with pytest.raises(ReplayError, match="empty"):
                empty.sample(np.random.default_rng(0), 4)
            empty.add(**nothing)  # still nothing


def test_one_stored_transition_can_be_sampled_at_once():
    replay = ReplayBuffer(VECTOR_SPEC, 10, 2, gamma=0.9, n_step=5, share_next=True)
    arguments = step()
    arguments["valid"] = np.array([False, True])
    replay.add(**arguments)
    batch = replay.sample(np.random.default_rng(0), 4)
    assert len(replay) == 1
    np.testing.assert_allclose(batch.rewards, arguments["rewards"][1], rtol=1e-6)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"capacity": 3}, "capacity = 3: .* n_envs = 4 .* raise it to 4"),
        ({"capacity": 0}, "capacity = 0"),
        ({"n_envs": 0}, "n_envs = 0"),
        ({"n_step": 0}, "n_step = 0"),
        ({"gamma": 1.1}, "gamma = 1.1"),
        ({"gamma": np.nan}, "gamma = nan"),
    ],
)
def test_arguments_out_of_bounds_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        ReplayBuffer(VECTOR_SPEC, **{"capacity": 8, "n_envs": 4, "gamma": 0.9, **options})


def test_a_capacity_of_one_transition_holds_the_newest():
    for share_next in (False, True):
        replay = ReplayBuffer(VECTOR_SPEC, 1, 1, gamma=0.9, share_next=share_next)
        stream = Stream(VECTOR_SPEC, 1, 0)
        for _ in range(7):
            arguments = stream.step()
            replay.add(*arguments)
            batch = replay.sample(np.random.default_rng(0), 3)
            assert len(replay) == 1
            np.testing.assert_array_equal(batch.observations[0][0, 0], arguments[0][0][0])
            np.testing.assert_array_equal(batch.next_observations[0][0, 0], arguments[3][0][0])


@pytest.mark.parametrize("name, shape", [("batch_size", (0, 1)), ("k", (1, 0))])
def test_an_empty_batch_is_refused(name, shape):
    replay = ReplayBuffer(VECTOR_SPEC, 8, 2, gamma=0.9)
    replay.add(**step())
    with pytest.raises(ConfigError, match=f"{name} = 0"):
        replay.sample(np.random.default_rng(0), *shape)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e39])
def test_a_reward_that_is_not_finite_is_refused_and_not_stored(bad):
    replay = ReplayBuffer(VECTOR_SPEC, 8, 2, gamma=0.9)
    arguments = step()
    arguments["rewards"][1] = bad
    with pytest.raises(ReplayError, match=r"reward = .* of environment 1 is not a finite"):
        replay.add(**arguments)
    assert len(replay) == 0
    arguments["valid"] = np.array([True, False])
    replay.add(**arguments)  # nobody reads a reward that is not valid
    assert len(replay) == 1


def test_large_rewards_that_float32_can_hold_are_stored():
    replay = ReplayBuffer(VECTOR_SPEC, 8, 2, gamma=0.9)
    replay.add(**{**step(), "rewards": np.array([-3e38, 3e38])})
    sampled = replay.sample(np.random.default_rng(0), 30).rewards
    assert set(sampled.ravel()) == {np.float32(-3e38), np.float32(3e38)}


def test_an_action_that_is_not_finite_names_its_environment():
    replay = ReplayBuffer(VECTOR_SPEC, 8, 2, gamma=0.9)
    arguments = step()
    arguments["actions"][1, 2] = np.nan
    arguments["valid"][0] = False
    with pytest.raises(ReplayError, match=r"action = .*nan.* of environment 1"):
        replay.add(**arguments)


@pytest.mark.parametrize(
    "spec, changed, message",
    [
        (VECTOR_SPEC, {"rewards": np.zeros(1)}, r"rewards: float64 of shape \(1,\)"),
        (VECTOR_SPEC, {"valid": np.ones((2, 1), bool)}, "valid: bool"),
        (VECTOR_SPEC, {"terminated": np.zeros(2)}, "terminated: float64"),
        (VECTOR_SPEC, {"actions": np.zeros((2, 4), np.float32)}, "actions: float32"),
        (VECTOR_SPEC, {"observations": ()}, "1 observation entries"),
        (
            IMAGE_SPEC,
            {"observations": (np.zeros((2, 8, 8, 3)), np.zeros((2, 1)))},
            "observation 'camera': float64 .* uint8",
        ),
        (IMAGE_SPEC, {"actions": np.zeros(2)}, "actions: float64 .* int32"),
    ],
)
def test_a_step_that_does_not_fit_is_refused_by_name(spec, changed, message):
    replay = ReplayBuffer(spec, 8, 2, gamma=0.9)
    with pytest.raises(ReplayError, match=message):
        replay.add(**{**step(spec), **changed})
    assert len(replay) == 0


def test_sharing_observations_nearly_halves_the_memory_of_images():
    one, two = (
        ReplayBuffer.predicted_bytes(IMAGE_SPEC, 10_000, 4, share_next=share)
        for share in (True, False)
    )
    assert one / two < 0.56


@pytest.mark.parametrize("share_next", [False, True])
@pytest.mark.parametrize("prioritized", [None, PrioritySettings()])
def test_memory_is_predicted_exactly(share_next, prioritized):
    replay = ReplayBuffer(
        IMAGE_SPEC, 103, 4, gamma=0.9, share_next=share_next, prioritized=prioritized
    )
    predicted = ReplayBuffer.predicted_bytes(
        IMAGE_SPEC, 103, 4, share_next=share_next, prioritized=prioritized is not None
    )
    held = [*replay.storage.arrays.values(), replay.eligible, replay.written]
    if prioritized:
        held.append(replay.priorities.tree._nodes)
    assert replay.nbytes == predicted == sum(array.nbytes for array in held)


def test_what_cannot_fit_is_refused_with_the_numbers(monkeypatch, tmp_path):
    monkeypatch.setattr(buffer, "available_memory", lambda: 10**9)
    monkeypatch.setattr(sharded, "available_memory", lambda: 10**9)
    need = ReplayBuffer.predicted_bytes(IMAGE_SPEC, 10**7, 1)
    fits = int(10**7 * 10**9 / need)
    message = rf"capacity = 10000000: the replay needs {need / 1e9:.1f} GB of memory, 1.0 GB .*"
    message += rf"at most {fits}, or .*share_next_observations.*replay_dir"
    with pytest.raises(ConfigError, match=message):
        ReplayBuffer(IMAGE_SPEC, 10**7, 1, gamma=0.9)
    # Each of four shards would fit, but not all four.
    with pytest.raises(ConfigError, match=r"of memory, 1.0 GB"):
        ShardedReplay.create(4, IMAGE_SPEC, 8 * 10**6, 4, gamma=0.9)
    monkeypatch.setattr(buffer, "free_disk", lambda folder: 2 * 10**6)
    with pytest.raises(ConfigError, match=r"GB of disk space in .*, 2.0 MB are available"):
        ReplayBuffer(IMAGE_SPEC, 10**7, 1, gamma=0.9, folder=tmp_path / "new" / "er")
    assert not (tmp_path / "new").exists()


def test_memory_that_the_system_refuses_is_a_clear_error(monkeypatch):
    def refuse(*_):
        raise MemoryError

    monkeypatch.setattr(storage.np, "zeros", refuse)
    with pytest.raises(ConfigError, match=r"capacity = 100: the replay needs 3.4 kB of memory"):
        ReplayBuffer(VECTOR_SPEC, 100, 1, gamma=0.9)


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_container_counts(monkeypatch, tmp_path, version):
    folder = tmp_path if version == 2 else tmp_path / "memory"
    names = (
        ("memory.max", "memory.current", "inactive_file")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    folder.mkdir(exist_ok=True)
    (folder / names[0]).write_text("5000000\n")
    (folder / names[1]).write_text("3000000\n")
    (folder / "memory.stat").write_text(f"anon 7\n{names[2]} 500000\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.available_memory() == 2_500_000
    (folder / names[0]).write_text("max\n")
    assert memory.available_memory() > 2_500_000


def test_bytes_are_written_for_people():
    values = {0: "0 bytes", 999: "999 bytes", 1500: "1.5 kB", 12.34e9: "12.3 GB", 5e15: "5000.0 TB"}
    assert {n: memory.format_bytes(n) for n in values} == values


def test_replay_needs_no_mindspore():
    code = "import sys, msrl_accel.replay; sys.exit('mindspore' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_shards_that_differ_are_refused():
    def shard(**options):
        return ReplayBuffer(VECTOR_SPEC, 8, 2, **{"gamma": 0.9, **options})

    for other, message in (
        (shard(gamma=0.5), "gamma = 0.5, shard 0 0.9"),
        (shard(n_step=2), "n_step = 2"),
        (shard(prioritized=PrioritySettings()), "settings"),
        (ReplayBuffer(IMAGE_SPEC, 8, 2, gamma=0.9), "spec"),
    ):
        with pytest.raises(ConfigError, match=message):
            ShardedReplay([shard(), other])
    with pytest.raises(ConfigError, match="at least 1"):
        ShardedReplay([])
    with pytest.raises(ConfigError, match="n_shards = 3"):
        ShardedReplay.create(3, VECTOR_SPEC, 8, 2, gamma=0.9)
    with pytest.raises(ConfigError, match="capacity = "):
        ShardedReplay.create(2, VECTOR_SPEC, 1, 2, gamma=0.9)
    with pytest.raises(ReplayError, match="4 environments"):
        ShardedReplay([shard(), shard()]).add(**step(n_envs=3))


def test_shards_filled_by_sources_of_their_own_are_sampled_by_mass():
    shards = [ReplayBuffer(VECTOR_SPEC, 100, 1, gamma=0.9) for _ in range(3)]
    replay = ShardedReplay(shards)
    stream = Stream(VECTOR_SPEC, 1, 0)
    for shard, steps in zip(shards, (30, 0, 90)):
        for _ in range(steps):
            shard.add(*stream.step())
    drawn = replay.sample(np.random.default_rng(0), 10_000).indices
    assert (drawn < 100).mean() == pytest.approx(0.25, abs=0.02)
    assert ((drawn >= 100) & (drawn < 200)).sum() == 0
