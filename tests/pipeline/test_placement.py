from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrl_accel.config import resolve_config
from msrl_accel.pipeline import placement
from msrl_accel.pipeline.placement import Place, parse_cores, places, split, together

TWO_NODES = (frozenset(range(4)), frozenset(range(4, 8)))


@pytest.mark.parametrize(
    ("items", "workers", "nodes", "learner", "theirs"),
    [
        (range(8), 2, (), (0, 1, 2, 3), [(4, 5), (6, 7)]),
        (range(8), 4, TWO_NODES, (0, 1, 2, 3), [(4,), (5,), (6,), (7,)]),
        ((2, 3, 4, 5), 2, TWO_NODES, (2, 3), [(4,), (5,)]),  # what the process may use of them
        ((4, 5, 6, 7), 1, TWO_NODES, (4, 5), [(6, 7)]),  # one node only
        (range(2), 2, (), (0,), [(1,), (1,)]),  # shared by the workers
        (range(1), 2, (), (0,), [(0,), (0,)]),  # shared by all
        ((), 2, (), (), [(), ()]),
    ],
)
def test_the_learner_has_half_and_the_workers_parts_of_the_rest(
    items, workers, nodes, learner, theirs
):
    assert split(tuple(items), workers, nodes) == (learner, theirs)


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 64), st.integers(1, 70), st.integers(1, 8))
def test_learner_and_workers_are_disjoint_and_nothing_is_left_unused(cores, workers, nodes):
    size = -(-cores // nodes)
    groups = [frozenset(range(i, min(i + size, cores))) for i in range(0, cores, size)]
    learner, theirs = split(tuple(range(cores)), workers, groups)
    assert len(theirs) == workers
    assert all(theirs)
    used = {core for part in theirs for core in part}
    assert not used & set(learner)
    rest = set(range(cores)) - set(learner)
    assert used == rest or len(rest) > len(used) == workers
    if len(groups) > 1:
        assert all(not group & set(learner) or group <= set(learner) for group in groups)
    if len(rest) >= workers:
        assert sum(map(len, theirs)) == len(rest)


def test_core_lists_of_the_kernel_are_read():
    assert parse_cores("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert parse_cores("\n") == []


def config_of(**overrides):
    return resolve_config("ppo", "CartPole-v1", overrides={"pipeline.mode": "async", **overrides})


def test_colocated_workers_give_way_to_the_learner():
    learner, workers = places(config_of(**{"pipeline.workers": 3}))
    assert learner == Place()
    assert [w.niceness for w in workers] == [1, 1, 1]
    assert all(w.cores == () and w.devices is None for w in workers)


@pytest.mark.parametrize("source", ["config", "environment"])
def test_ascend_devices_are_divided(monkeypatch, source):
    config = {"runtime.device": "Ascend", "pipeline.placement": "separate", "pipeline.workers": 4}
    for name in placement.DEVICE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if source == "config":
        config["pipeline.devices"] = list(range(8))
    else:
        monkeypatch.setenv("ASCEND_VISIBLE_DEVICES", "0-7")
    learner, workers = places(config_of(**config))
    assert learner.devices == (0, 1, 2, 3)
    assert [w.devices for w in workers] == [(4,), (5,), (6,), (7,)]
    monkeypatch.setenv("ASCEND_VISIBLE_DEVICES", "before")
    with learner.applied():
        for name in placement.DEVICE_VARIABLES:
            assert os.environ[name] == "0,1,2,3"
    assert os.environ["ASCEND_VISIBLE_DEVICES"] == "before"
    assert "ASCEND_RT_VISIBLE_DEVICES" not in os.environ


def test_devices_that_nobody_names_are_left_alone(monkeypatch):
    for name in placement.DEVICE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    learner, workers = places(
        config_of(**{"runtime.device": "Ascend", "pipeline.placement": "separate"})
    )
    assert [p.devices for p in (learner, *workers)] == [None, None, None]


def test_several_places_are_joined():
    joined = together([Place((3, 1), devices=(1,)), Place((1, 2), niceness=1, devices=(0,))])
    assert joined == Place((1, 2, 3), devices=(0, 1))
    assert together([Place(), Place()]) == Place()
