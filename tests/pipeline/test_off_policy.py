"""The off-policy training loop, with a small Q network."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import run_helpers
from run_helpers import assert_same_runs, rows, settings

from msrl_accel.errors import ConfigError
from msrl_accel.pipeline import off_policy
from msrl_accel.replay import ReplayBuffer
from msrl_accel.run import Run
from msrl_accel.train import main, train

no_curves = run_helpers.no_curves

STEPS = 120
TINY = {
    "dqn.learning_starts": 40,
    "dqn.batch_size": 8,
    "dqn.train_freq": 4,
    "dqn.gradient_steps": 2,
    "dqn.buffer_size": 96,
    "dqn.exploration_final": 0.2,
    "policy.hidden_sizes": [8],
    "evaluation.episodes": 2,
    "logging.tensorboard": False,
    "runtime.rollout": "graph",
}


@pytest.fixture(autouse=True)
def short_iterations(monkeypatch):
    monkeypatch.setattr(off_policy, "ITERATION_STEPS", 40)


def tiny(run_dir, *more, n_envs=4, steps=STEPS, **values):
    command = ["--algo", "dqn", "--env", "CartPole-v1", "--no-tuned", "--quiet"]
    command += ["--run-dir", run_dir, "--n-envs", n_envs, "--total-steps", steps]
    return [str(x) for x in [*command, *settings(**TINY), *settings(**values), *more]]


@pytest.mark.parametrize("n_envs", [1, 8])
def test_gradient_steps_follow_transitions_whatever_the_number_of_environments(tmp_path, n_envs):
    assert main(tiny(tmp_path / "run", n_envs=n_envs)) == 0
    # None while fewer than learning_starts are stored; then 2 every 4 transitions.
    last = rows(tmp_path / "run")[-1]
    assert last["step"] == STEPS
    assert abs(last["dqn/updates"] - (STEPS - 40) / 2) <= 4
    assert last["replay/size"] == 96
    assert Run(tmp_path / "run").summary["deterministic"]["return_mean"] > 0


def test_the_replay_holds_true_transitions(tmp_path, monkeypatch):
    """Each stored step leads where Gymnasium's own environment says, ends included."""
    stored = []
    add = ReplayBuffer.add

    def noting(self, *step):
        stored.append([np.copy(x[0]) if isinstance(x, tuple) else np.copy(x) for x in step])
        add(self, *step)

    monkeypatch.setattr(ReplayBuffer, "add", noting)
    assert main(tiny(tmp_path / "run")) == 0
    import gymnasium

    env = gymnasium.make("CartPole-v1").unwrapped
    env.reset()
    ends = 0
    for observation, action, reward, following, terminated, truncated, valid in stored:
        for i in range(len(action)):
            env.state = observation[i].astype(np.float64)
            env.steps_beyond_terminated = None
            expected, _, done, _, _ = env.step(int(action[i]))
            np.testing.assert_allclose(following[i], expected, atol=1e-5)
            assert (reward[i], terminated[i], truncated[i], valid[i]) == (1.0, done, False, True)
            ends += done
    assert ends


@pytest.mark.parametrize("replay", ["uniform", "prioritized"])
def test_a_resumed_run_with_its_replay_equals_an_uninterrupted_one(tmp_path, monkeypatch, replay):
    kind = {"dqn.save_replay": True, "dqn.replay": replay, "checkpoint.interval_seconds": 0}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(tiny(whole, **kind)) == 0
    with monkeypatch.context() as patch:
        iterate = off_policy.OffPolicyTrainer.iterate

        def iterate_and_interrupt(self):
            metrics = iterate(self)
            if self.iteration == 2:
                os.kill(os.getpid(), signal.SIGINT)
            return metrics

        patch.setattr(off_policy.OffPolicyTrainer, "iterate", iterate_and_interrupt)
        main(tiny(parts, **kind))
    assert not Run(parts).summary
    assert main(["--resume", str(parts), "--quiet"]) == 0
    assert_same_runs(whole, parts)


def test_rewards_are_not_normalised_in_a_replay(tmp_path):
    with pytest.raises(ConfigError, match=r"reward\.normalize = True: a replay"):
        train(
            algo="dqn",
            env="CartPole-v1",
            overrides={**TINY, "reward.normalize": True},
            run_dir=str(tmp_path / "run"),
        )
    assert not (tmp_path / "run").exists()


def test_a_replay_smaller_than_the_warm_up_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"learning_starts = 200: the replay never holds as many"):
        train(
            algo="dqn",
            env="CartPole-v1",
            overrides={**TINY, "dqn.learning_starts": 200},
            run_dir=str(tmp_path / "run"),
        )
