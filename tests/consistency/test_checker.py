"""The checker on runtimes that are right and on runtimes that are not."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from consistency_helpers import Changed, make_policy
from gymnasium import spaces
from policy_helpers import ACTION_SPACES

from msrl_accel.consistency import Tolerances, check_consistency
from msrl_accel.consistency.drift import damaged_weights, swaps
from msrl_accel.consistency.observations import make_cases, make_observations
from msrl_accel.consistency.reference import NumpyPolicy
from msrl_accel.errors import ConfigError, PolicyError
from msrl_accel.spaces import PolicySpec


def numpy_runtime(policy, arrays=None):
    return NumpyPolicy(policy.spec, arrays or policy.arrays(), activation="relu")


@pytest.fixture(scope="module")
def policy(graph_mode):
    return make_policy(normalize_observations=True)


def check(policy, runtime, **values):
    values = {"batches": (3, 32), **values}  # each size compiles once
    return check_consistency(policy=policy, runtimes={"other": runtime}, **values)


@pytest.mark.parametrize("action", ["discrete", "multi_discrete", "multi_binary", "box"])
def test_an_independent_network_is_consistent(graph_mode, action):
    policy = make_policy(action, normalize_observations=True)
    report = check(policy, numpy_runtime(policy), drift=True)
    assert report.ok, report
    assert report.results["loss"].comparison.outputs["log_prob"].max_abs < 1e-5
    caught = [d.name for d in report.results["other"].drift]
    assert len(caught) == 3 and all(d.caught for d in report.results["other"].drift)


def test_the_same_graph_is_bit_equal(policy):
    from msrl_accel.runtime.graph import GraphRuntime

    tolerances = {"other": Tolerances.exact()}
    report = check(policy, GraphRuntime(policy), tolerances=tolerances, batches=(1, 3, 32, 256))
    assert report.ok
    assert all(o.bit_equal for o in report.results["other"].comparison.outputs.values())


@pytest.mark.parametrize("field", ["value", "log_prob", "parameters"])
def test_a_wrong_output_is_found(policy, field):
    def change(r):
        wrong = getattr(r, field)
        wrong = (wrong[0] + 1e-3,) if field == "parameters" else wrong + 1e-3
        return replace(r, **{field: wrong})

    report = check(policy, Changed(numpy_runtime(policy), change))
    name = "logits" if field == "parameters" else field
    assert not report.ok
    assert any(p.startswith(name) for p in report.results["other"].problems)
    assert "NOT CONSISTENT (other)" in str(report)


def test_a_wrong_action_is_found(policy):
    report = check(
        policy,
        Changed(
            numpy_runtime(policy),
            lambda r: replace(r, raw_action=(r.raw_action + 1) % 4, action=r.action),
        ),
    )
    problems = report.results["other"].problems
    assert any("actions flip" in p for p in problems)


def test_actions_out_of_step_with_choices_are_found(policy):
    """The choice is right and its translation into the environment's units is not."""
    report = check(
        policy, Changed(numpy_runtime(policy), lambda r: replace(r, action=r.action - 2))
    )
    assert any(p.startswith("action differs") for p in report.results["other"].problems)


@pytest.mark.parametrize("which", ["actor.weight", "normalizer"])
def test_one_damaged_number_is_found(policy, which):
    damaged = damaged_weights(policy.arrays())
    (arrays,) = (a for name, a in damaged.items() if which in name)
    assert not check(policy, numpy_runtime(policy, arrays)).ok


def test_swapped_dict_entries_are_found(graph_mode):
    space = spaces.Dict({k: spaces.Box(-1, 1, (3,)) for k in ("left", "right")})
    policy = make_policy("box", space)
    assert "left and right exchanged" in swaps(policy.spec)
    report = check(policy, numpy_runtime(policy), drift=True)
    names = [d.name for d in report.results["other"].drift if d.caught]
    assert "left and right exchanged" in names


def test_drift_that_the_checker_misses_is_a_problem(policy):
    """A backend that ignores its weights cannot be damaged, which the report says."""
    deaf = numpy_runtime(policy)
    deaf.load_weights = lambda version, arrays: None
    report = check(policy, deaf, drift=True)
    assert not report.ok
    assert any("drift not caught: one weight" in p for p in report.results["other"].problems)


def test_an_engine_that_fails_is_reported_with_its_words(policy):
    def fail(result):
        raise PolicyError("the engine has no such kernel")

    report = check(policy, Changed(numpy_runtime(policy), fail))
    assert not report.ok
    assert "no such kernel" in str(report)
    json.dumps(report.to_dict(), allow_nan=False)


def test_an_output_of_a_fixed_batch_is_found(policy):
    def first_32(r):
        keep = {k: getattr(r, k)[:32] for k in ("action", "log_prob", "value", "raw_action")}
        return replace(r, **keep, parameters=tuple(p[:32] for p in r.parameters))

    report = check(policy, Changed(numpy_runtime(policy), first_32), batches=(32, 40))
    assert not report.ok and "batch 40" in str(report)


def test_report_in_every_form(policy, tmp_path):
    pytest.importorskip("matplotlib")
    report = check(policy, Changed(numpy_runtime(policy), lambda r: replace(r, value=r.value * 2)))
    content = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert content["ok"] is False
    assert content["backends"]["other"]["outputs"]["value"]["max_abs"] > 0
    html = report._repr_html_()
    assert "NOT CONSISTENT" in html and html.count("<tr>") == 3
    data = report.save_plot(tmp_path / "figure.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 10_000


def test_nothing_to_check():
    with pytest.raises(ConfigError, match="nothing to check"):
        check_consistency()


def test_episodes_need_an_environment(policy):
    with pytest.raises(ConfigError, match="environment"):
        check(policy, numpy_runtime(policy), episodes=2)


def test_cases_cover_kinds_batches_and_modes(policy):
    recorded = make_observations(policy.spec, "random", 700, np.random.default_rng(1))
    cases = list(make_cases(policy.spec, recorded=recorded))
    seen = {(c.kind, c.batch, c.deterministic) for c in cases}
    kinds, batches = ("zero", "corner", "random", "recorded"), (1, 3, 32, 256)
    assert seen >= {(k, b, d) for k in kinds for b in batches for d in (True, False)}
    assert all((c.noise == 0).all() == c.deterministic for c in cases)


def test_corners_are_bounds_and_random_lies_between():
    low, high = np.array([-1, 0, -np.inf]), np.array([2, 5, np.inf])
    space = spaces.Box(low.astype(np.float32), high.astype(np.float32))
    spec = PolicySpec.from_spaces(space, ACTION_SPACES["discrete"])
    statistics = {
        "normalizer.observation.mean": np.array([0, 0, 100.0]),
        "normalizer.observation.inverse_std": np.array([1, 1, 0.5]),
    }
    rng = np.random.default_rng(0)
    (corner,) = make_observations(spec, "corner", 50, rng, statistics=statistics)
    assert corner[0].tolist() == [-1, 0, 80] and corner[1].tolist() == [2, 5, 120]
    assert all(set(corner[:, i]) == {corner[0, i], corner[1, i]} for i in range(3))
    (random,) = make_observations(spec, "random", 500, rng, statistics=statistics)
    assert (random >= corner[0]).all() and (random <= corner[1]).all()
    assert (random.max(axis=0) - random.min(axis=0) > 0.9 * (corner[1] - corner[0])).all()
