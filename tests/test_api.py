"""The library as a notebook uses it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from msrl_accel import api
from msrl_accel.api import evaluate, load_run, train
from msrl_accel.config import resolve_config
from msrl_accel.errors import ConfigError, PolicyError

SMALL = {
    "n_envs": 2,
    "total_steps": 64,
    "quiet": True,
    "ppo": {"n_steps": 16, "batch_size": 16, "n_epochs": 1},
    "policy": {"hidden_sizes": [8]},
    "evaluation": {"episodes": 3},
    "logging": {"tensorboard": False},
}
DICT = "msrl_accel.envs.toy:IdentityDict-v0"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(
        algo="ppo", env=DICT, run_dir=str(tmp_path_factory.mktemp("api") / "run"), seed=3, **SMALL
    )


def test_importing_does_not_wait_for_mindspore():
    code = "import sys, msrl_accel.api; sys.exit('mindspore' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_shows_what_it_is(run):
    assert isinstance(run, api.Run)
    reached = run.summary["deterministic"]["return_mean"]
    assert f"ppo on {DICT}, deterministic return {reached:.1f}" in repr(run)
    assert str(run.path) in repr(run)


def test_metrics_are_arrays_of_one_length(run):
    assert run.metrics["step"].tolist() == [32, 64]
    assert {type(column) for column in run.metrics.values()} == {np.ndarray}
    assert {len(column) for column in run.metrics.values()} == {2}
    assert np.all(run.metrics["episode/return"] <= 8.0)


def test_the_policy_acts_on_one_observation_and_on_a_batch(run):
    one = {"image": np.zeros((8, 8, 1), np.uint8), "vector": np.eye(3, dtype=np.float32)[1]}
    batch = {key: np.repeat(value[None], 5, axis=0) for key, value in one.items()}
    action = run.policy.act(one)
    assert np.shape(action) == ()
    assert action in range(6)
    actions = run.policy.act(batch)
    assert actions.tolist() == [int(action)] * 5
    assert actions.dtype == np.int64
    sampled = np.concatenate([run.policy.act(batch, deterministic=False) for _ in range(20)])
    assert len(set(sampled.tolist())) > 3
    with pytest.raises(PolicyError, match="keys"):
        run.policy.act({"image": one["image"]})


def test_the_curve_is_a_figure(run):
    pytest.importorskip("matplotlib")
    (line, *_) = run.plot().axes[0].lines
    np.testing.assert_array_equal(line.get_ydata(), run.metrics["episode/return"])


def test_evaluation_and_another_session_agree(run):
    again = load_run(str(run.path))
    assert again.config == run.config
    result = evaluate(again, episodes=3)
    assert result.to_dict() == run.summary["deterministic"] == evaluate(run.path, 3).to_dict()
    assert result.mean == pytest.approx(np.mean(result.returns))


def test_a_config_object_can_be_given_and_a_run_resumed(tmp_path):
    config = resolve_config(
        "ppo", "CartPole-v1", tuned=False, run_dir=str(tmp_path / "run"), seed=1, **SMALL
    )
    config = config.replace(total_steps=32)
    assert train(config).summary["steps"] == 32
    extended = train(resume=tmp_path / "run", total_steps=64)
    assert extended.metrics["step"].tolist() == [32, 64]
    assert extended.config == config.replace(total_steps=64)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"algo": "ppo"}, "env"),
        ({"algo": "pppo", "env": DICT}, "did you mean ppo"),
        ({"algo": "ppo", "env": DICT, "total_stepz": 1}, "total_steps"),
        ({"algo": "ppo", "env": DICT, "overrides": {"ppo.gamma": 2}}, "ppo.gamma = 2"),
    ],
)
def test_mistakes_raise_a_config_error(values, message):
    with pytest.raises(ConfigError, match=message):
        train(**values)


def test_what_is_no_run_is_said(tmp_path):
    with pytest.raises(ConfigError, match="not a run directory"):
        load_run(tmp_path)
    with pytest.raises(ConfigError, match="not a run directory"):
        evaluate(tmp_path / "nowhere")
