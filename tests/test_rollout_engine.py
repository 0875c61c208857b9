"""Rolling out with the engine that deploys the policy."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from policy_helpers import ACTION_SPACES, options, spec_of

from msrl_accel.errors import ConfigError
from msrl_accel.policy import Policy
from msrl_accel.rollout_engine import RolloutEngine, parity, relative_difference
from msrl_accel.runtime import lite
from msrl_accel.runtime.graph import GraphRuntime

pytestmark = pytest.mark.usefixtures("graph_mode")


def make_policy(action):
    chosen = options(normalize_observations=True, hidden_sizes=(8, 8))
    return Policy(spec_of(ACTION_SPACES[action]), chosen, seed=0)


def perturb(policy, seed=0):
    """Every weight and statistic changed, as training would."""
    rng = np.random.default_rng(seed)
    arrays = policy.arrays()
    policy.load_arrays({k: v * rng.uniform(0.9, 1.1, v.shape) for k, v in arrays.items()})


@pytest.mark.parametrize("action", ["discrete", "multi_discrete", "multi_binary", "box"])
def test_onnx_follows_the_policy_from_update_to_update(action):
    policy = make_policy(action)
    engine = RolloutEngine(policy, "onnx", batch=4)
    assert engine.kind == "onnx"
    for version in (1, 2):
        before = engine.runtime
        perturb(policy, version)
        engine.publish(version)
        assert engine.runtime is before and engine.runtime.version == version
        assert parity(GraphRuntime(policy), engine.runtime, 4) <= 1e-5
    engine.close()


def test_lite_follows_the_policy():
    usable, reason = lite.available()
    if not usable:
        pytest.skip(reason)
    policy = make_policy("discrete")
    engine = RolloutEngine(policy, "lite", batch=4)
    perturb(policy)
    engine.publish(1)
    assert engine.kind == "lite"
    assert parity(GraphRuntime(policy), engine.runtime, 4) <= 1e-5
    engine.close()


def test_without_onnxruntime_auto_is_the_graph_and_onnx_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert RolloutEngine(make_policy("discrete"), "auto", batch=4).kind == "graph"
    with pytest.raises(ConfigError, match=r"runtime.rollout = 'onnx'.*pip install"):
        RolloutEngine(make_policy("discrete"), "onnx", batch=4)


def test_an_engine_that_disagrees_is_not_used(monkeypatch, caplog):
    import msrl_accel.rollout_engine as module

    def other_policy(policy, calls, cache):
        perturbed = make_policy("discrete")
        perturb(perturbed)
        return GraphRuntime(perturbed)

    monkeypatch.setattr(module, "_EXPORTED", {"onnx": other_policy})
    assert RolloutEngine(make_policy("discrete"), "auto", batch=4).kind == "graph"
    assert "differs from the training graph" in caplog.text
    with pytest.raises(ConfigError, match="differs from the training graph"):
        RolloutEngine(make_policy("discrete"), "onnx", batch=4)


def test_an_engine_can_be_checked_by_what_it_collected(monkeypatch, caplog):
    engine = RolloutEngine(make_policy("discrete"), "auto", batch=4, check=False)
    assert engine.kind == "onnx" and not engine.verified
    engine.publish(7)
    assert engine.verify(9e-6)
    assert engine.kind == "onnx" and engine.verified

    engine = RolloutEngine(make_policy("discrete"), "auto", batch=4, check=False)
    engine.publish(7)
    assert not engine.verify(float("inf"))
    assert engine.kind == "graph" and engine.verified and engine.runtime.version == 7
    assert "differs from the training graph" in caplog.text

    engine = RolloutEngine(make_policy("discrete"), "onnx", batch=4, check=False)
    with pytest.raises(ConfigError, match="differs from the training graph"):
        engine.verify(1e-3)


def test_differences_are_relative_above_one():
    a, b = np.array([0.5, 100.0]), np.array([0.5, 100.01])
    assert relative_difference(a, b) == pytest.approx(1e-4)
    assert relative_difference(a / 200, b / 200) == pytest.approx(5e-5)
    assert relative_difference(a, np.array([0.5, np.nan])) == float("inf")
    assert relative_difference(a[:0], b[:0]) == 0


def test_batch_invariant_rows_do_not_depend_on_their_batch():
    policy = make_policy("discrete")
    engine = RolloutEngine(policy, "onnx", batch=64, batch_invariant=True)
    perturb(policy)
    engine.publish(1)
    rng = np.random.default_rng(0)
    observations = rng.standard_normal((64, 3), dtype=np.float32)
    noise = policy.spec.draw_noise(rng, (64,))
    whole = engine.runtime.act((observations,), noise)
    for rows in (slice(0, 1), slice(3, 10), slice(20, 57)):
        part = engine.runtime.act((observations[rows],), noise[rows])
        np.testing.assert_array_equal(part.log_prob, whole.log_prob[rows])
        np.testing.assert_array_equal(part.value, whole.value[rows])
    assert engine.runtime.version == 1
