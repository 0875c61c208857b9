"""Every kind of action and observation space is learned, in seconds, through the public entry."""

from __future__ import annotations

import pytest

from msrl_accel.train import train

SETTINGS = {
    "n_envs": 16,
    "seed": 0,
    "quiet": True,
    "evaluation.episodes": 16,
    "logging.tensorboard": False,
    "policy.hidden_sizes": (32,),
    "ppo.n_steps": 16,
    "ppo.batch_size": 64,
    "ppo.n_epochs": 4,
    "ppo.gamma": 0.5,
    "ppo.learning_rate": 1e-2,
    "ppo.learning_rate_schedule": "linear",
}


# The best return is 8, of the Box task 0; an untrained policy gets 1.3 to 4, and about -5 there.
@pytest.mark.parametrize(
    ("task", "total_steps", "enough", "settings"),
    [
        ("IdentityDiscrete", 2048, 7.9, {}),
        ("IdentityMultiDiscrete", 3072, 7.5, {}),
        ("IdentityMultiBinary", 3072, 7.5, {}),
        ("IdentityBox", 8192, -0.5, {"policy.log_std_init": -0.5}),
        ("IdentityImage", 2048, 7.5, {"ppo.learning_rate": 3e-3}),
        ("IdentityDict", 4096, 7.5, {"ppo.learning_rate": 3e-3}),
    ],
)
def test_ppo_learns_the_identity(tmp_path, task, total_steps, enough, settings):
    run = train(
        algo="ppo",
        env=f"msrl_accel.envs.toy:{task}-v0",
        total_steps=total_steps,
        run_dir=str(tmp_path / "run"),
        **{**SETTINGS, **settings},
    )
    assert run.summary["steps"] == total_steps
    assert run.summary["deterministic"]["return_mean"] >= enough
    assert run.summary["sampled"]["return_mean"] >= enough - 3.0
