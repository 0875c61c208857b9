from __future__ import annotations

from collections import deque
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from msrl_accel.errors import ConfigError
from msrl_accel.pipeline.staleness import StalenessManager, lag_learning_rate


def admit_all(manager):
    count = 0
    while manager.admit():
        count += 1
    return count


@pytest.mark.parametrize(("max_staleness", "batch"), [(0, 1), (0, 3), (2, 4), (5, 1)])
def test_capacity_is_that_of_the_formula(max_staleness, batch):
    manager = StalenessManager(max_staleness, batch)
    assert admit_all(manager) == (max_staleness + 1) * batch
    for version in range(1, 10):
        manager.version = version
        assert manager.capacity == batch
        assert admit_all(manager) == batch
        assert not manager.admit()


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 4), st.integers(1, 3), st.integers(0, 999))
def test_whatever_the_workers_speed_the_lag_is_bounded_and_training_goes_on(
    max_staleness, batch, seed
):
    """Trajectories used in the order they started, by workers of any speed."""
    random = Random(seed)
    manager = StalenessManager(max_staleness, batch)
    running: deque[int] = deque()  # versions they started with
    while manager.version < 12:
        if random.random() < 0.5:
            for _ in range(random.randrange(4)):
                if manager.admit():
                    running.append(manager.version)
        elif len(running) >= batch:
            versions = np.array([running.popleft() for _ in range(batch)])
            assert manager.lag(versions).max() <= max_staleness
            assert (manager.weigh(versions) == 1).all()
            manager.version += 1
        else:
            assert manager.capacity > 0  # somebody can always go on
    assert manager.metrics()["dropped"] == 0


def test_max_staleness_zero_is_synchronous():
    """No trajectory starts before the one batch in flight has been trained on."""
    manager = StalenessManager(0, 2)
    for version in range(5):
        assert admit_all(manager) == 2
        assert manager.lag(np.full(2, version)).tolist() == [0, 0]
        manager.version = version + 1


def test_a_withdrawn_trajectory_makes_room_for_another():
    manager = StalenessManager(0, 2)
    for _ in range(20):  # workers that die again and again
        assert admit_all(manager) == 2
        manager.withdraw()
        manager.withdraw()
    assert manager.capacity == 2


def test_a_group_starts_only_where_there_is_capacity_for_all_of_it():
    manager = StalenessManager(1, 50, group=32)
    assert admit_all(manager) == 3  # 96 of 100
    manager.version = 1
    assert manager.capacity == 54
    assert admit_all(manager) == 1
    manager.withdraw()
    assert manager.capacity == 54


def test_with_a_quota_the_quick_do_not_take_the_share_of_the_slow():
    manager = StalenessManager(0, 4, group=2, quota=2)
    for version in range(3):
        assert manager.admit("quick")
        assert not manager.admit("quick")
        manager.withdraw("quick")  # it died; the next in its place may go on
        assert manager.admit("quick")
        assert not manager.admit("quick")
        assert manager.admit("slow")
        manager.version = version + 1


def test_a_resumed_run_starts_with_the_capacity_of_a_new_one():
    assert StalenessManager(3, 8, version=1000).capacity == StalenessManager(3, 8).capacity


VERSIONS = hnp.arrays(
    np.int64, st.tuples(st.integers(1, 4), st.integers(1, 4)), elements=st.integers(0, 20)
)


@settings(max_examples=100, deadline=None)
@given(VERSIONS, st.integers(0, 6), st.sampled_from(["drop", "down_weight"]))
def test_weights_and_shares_are_those_of_each_sample(versions, max_staleness, stale):
    manager = StalenessManager(max_staleness, 1, version=20, stale=stale)
    weights = manager.weigh(versions)
    assert weights.dtype == np.float32
    lags = [20 - int(v) for v in versions.ravel()]
    late = [lag > max_staleness for lag in lags]
    for weight, lag, is_late in zip(weights.ravel(), lags, late):
        down = (1 + max_staleness) / (1 + lag) if stale == "down_weight" else 0
        assert weight == pytest.approx(down if is_late else 1)
    metrics = manager.metrics()
    assert metrics["lag_mean"] == pytest.approx(np.mean(lags))
    assert metrics["lag_max"] == max(lags)
    for i in range(7):
        assert metrics[f"lag_{i}"] == pytest.approx(np.mean([lag == i for lag in lags]))
    assert metrics["lag_7"] == pytest.approx(np.mean([lag >= 7 for lag in lags]))
    shares = {"drop": "dropped", "down_weight": "down_weighted"}
    for kind, name in shares.items():
        assert metrics[name] == pytest.approx(np.mean(late) if kind == stale else 0)
    assert manager.metrics()["lag_max"] == 0  # counted anew


def test_weights_of_a_trajectory_that_is_too_old_as_a_whole_are_zero():
    manager = StalenessManager(1, 1, version=5)
    assert not manager.weigh(np.full((3, 2), 3)).any()
    assert manager.weigh(np.int64(4)).item() == 1.0


def test_the_learning_rate_falls_with_lag():
    assert lag_learning_rate(1e-3, 0) == 1e-3
    assert lag_learning_rate(1e-3, 4) == pytest.approx(1e-3 / 1.2)
    assert lag_learning_rate(1e-3, 1, 0.5) == pytest.approx(1e-3 / 1.5)


def test_settings_that_mean_nothing_are_refused():
    for arguments in ({"max_staleness": -1, "batch": 1}, {"max_staleness": 1, "batch": 0}):
        with pytest.raises(ConfigError, match="max_staleness"):
            StalenessManager(**arguments)
    with pytest.raises(ConfigError, match=r"'ignore'.*'drop' or 'down_weight'"):
        StalenessManager(1, 1, stale="ignore")
