"""Public bug reports of neighbouring projects about training, by kind of fault."""

from __future__ import annotations

import signal
import sys

import gymnasium
import numpy as np
import pytest
import run_helpers
from gymnasium import spaces
from run_helpers import BATCH, STOPPED, interrupt_in_iteration, rows, settings, tiny

from msrl_accel import envs
from msrl_accel.api import evaluate, load_run, train
from msrl_accel.config import resolve_config
from msrl_accel.errors import SpaceError
from msrl_accel.run import Run
from msrl_accel.spaces import PolicySpec
from msrl_accel.train import main
from msrl_accel.trajectories import gae

no_curves = run_helpers.no_curves

ACTIONS = {
    "one": spaces.Discrete(1, start=2),
    "negative": spaces.Discrete(3, start=-5),
    "multi": spaces.MultiDiscrete([1, 3], start=[4, -1]),
    # No float32 equals these bounds: rounded outwards they would leave the space.
    "float64": spaces.Box(np.array([0.1, -1e-3]), np.array([0.3, 0.7]), dtype=np.float64),
    "unbounded_float64": spaces.Box(-np.inf, np.inf, (2,), np.float64),
}

pytestmark = pytest.mark.filterwarnings("ignore:.*WARN. The ")  # Gymnasium's, besides ours


class Strict(gymnasium.Env):
    """Refuses every action that is not in its space; remembers all, and the draws of its resets."""

    observation_space = spaces.Box(-1, 1, (2,), np.float64)

    def __init__(self, action="one", reward=1.0, length=5):
        self.action_space = ACTIONS[action]
        self.reward = reward
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        draw = self.np_random.uniform(-1, 1, 2)
        DRAWS.append(tuple(draw))
        return draw, {}

    def step(self, action):
        assert self.action_space.contains(action), (action, self.action_space)
        TAKEN.append(action)
        self.count += 1
        draw = self.np_random.uniform(-1, 1, 2)
        return draw, self.reward, False, self.count >= self.length, {}


DRAWS: list = []
TAKEN: list = []
gymnasium.register("Strict-v0", entry_point=Strict)


@pytest.fixture(autouse=True)
def forget():
    DRAWS.clear()
    TAKEN.clear()


def run_main(*arguments):
    assert main([*map(str, arguments), "--quiet"]) == 0


def run_main_until_stopped(*arguments):
    assert main([*map(str, arguments), "--quiet"]) in STOPPED


def one_line(capsys, *arguments):
    assert main([*map(str, arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def strict(run_dir, action, **values):
    return tiny(
        run_dir, env="Strict-v0", n_envs=2, iterations=2, env_kwargs={"action": action}, **values
    )


@pytest.mark.parametrize("action", ["one", "negative", "multi"])
def test_actions_start_where_the_space_says(tmp_path, action):
    """stable-baselines3#2241: Discrete(1, start=2) is sent 0."""
    run_main(*strict(tmp_path / "run", action))
    space = ACTIONS[action]
    assert len(TAKEN) >= 32
    if action == "one":
        assert set(TAKEN) == {2}
    acted = load_run(tmp_path / "run").policy.act(np.zeros(2), deterministic=True)
    assert space.contains(acted)
    assert acted.dtype == space.dtype


@pytest.mark.parametrize(
    ("observation", "action"),
    [
        (spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 1, (2,)))), spaces.Discrete(2)),
        (spaces.Dict({"a": spaces.Tuple((spaces.Box(0, 1, (2,)),))}), spaces.Discrete(2)),
        (spaces.Box(0, 1, (2,)), spaces.Tuple((spaces.Discrete(2),))),
        (spaces.Graph(spaces.Box(0, 1, (2,)), None), spaces.Discrete(2)),
        (spaces.Sequence(spaces.Box(0, 1, (2,))), spaces.Discrete(2)),
    ],
)
def test_spaces_that_cannot_be_learned_are_named(observation, action):
    """stable-baselines3#1140: Tuple observations crash obscurely."""
    with pytest.raises(SpaceError) as caught:
        PolicySpec.from_spaces(observation, action)
    message = str(caught.value)
    assert "\n" not in message
    assert "Box" in message  # what could be used instead
    assert any(name in message for name in ("Tuple", "Graph", "Sequence"))


@pytest.mark.parametrize("action", ["float64", "unbounded_float64"])
def test_float64_actions_train(tmp_path, action):
    """stable-baselines3#1145: a float64 Box action crashes SAC."""
    run_main(*strict(tmp_path / "run", action))
    assert {taken.dtype for taken in TAKEN} == {np.dtype(np.float64)}
    policy = load_run(tmp_path / "run").policy
    for corner in (np.full(2, 1e6), np.full(2, -1e6), np.zeros(2)):
        assert ACTIONS[action].contains(policy.act(corner))


@pytest.mark.parametrize(
    ("n_envs", "n_steps", "batch_size"),
    [
        (16, 8, 127),  # the last minibatch of each epoch has one row
        (1, 1, 64),  # the whole batch has one row
        (2, 8, 1),  # every minibatch has one row
    ],
)
def test_a_minibatch_of_one_row_stays_finite(tmp_path, n_envs, n_steps, batch_size):
    """stable-baselines3#325, #440: a last minibatch of one gives NaN."""
    run = train(
        algo="ppo",
        env="Pendulum-v1",
        tuned=False,
        run_dir=str(tmp_path / "run"),
        n_envs=n_envs,
        total_steps=2 * n_envs * n_steps,
        quiet=True,
        ppo={"n_steps": n_steps, "batch_size": batch_size, "n_epochs": 2},
        policy={"hidden_sizes": [8], "normalize_observations": True},
        reward={"normalize": True},
        evaluation={"episodes": 1},
        env_kwargs={"max_episode_steps": 5},
        logging={"tensorboard": False},
    )
    for name in ("ppo/policy_loss", "ppo/value_loss", "ppo/approx_kl", "ppo/grad_norm"):
        assert np.isfinite(run.metrics[name]).all(), name
    assert run.metrics["ppo/grad_non_finite"].tolist() == [0, 0]
    for name, array in run.checkpoints.load("last").arrays.items():
        assert np.isfinite(array).all(), name


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Run directory; draws and actions before and after a stop in iteration 2 of 4."""
    run_dir = tmp_path_factory.mktemp("resumed") / "run"
    arguments = tiny(
        run_dir,
        env="Strict-v0",
        n_envs=2,
        iterations=4,
        env_kwargs={"action": "negative"},
        ppo__learning_rate_schedule="linear",
    )
    DRAWS.clear()
    with pytest.MonkeyPatch.context() as patch:
        interrupt_in_iteration(patch, 2, signal.SIGTERM)
        run_main_until_stopped(*arguments)
    before, taken = list(DRAWS), [int(action) for action in TAKEN]
    DRAWS.clear()
    TAKEN.clear()
    run_main("--resume", run_dir)
    return run_dir, before, list(DRAWS), taken, [int(action) for action in TAKEN]


def test_a_resumed_run_does_not_repeat_its_seed(resumed):
    """stable-baselines3#1643: resume repeats the seed.

    These environments cannot be saved; runs whose environments can be are compared bit for bit
    with uninterrupted ones in test_resume.py.
    """
    _, before, after, taken, taken_after = resumed
    assert len(before) > 2
    assert not set(before) & set(after)
    assert taken[:32] != taken_after[:32]


def test_a_resumed_run_does_not_look_like_a_restart(resumed):
    """stable-baselines3#1277: load and learn looks like a restart."""
    found = rows(resumed[0])
    assert [row["step"] for row in found] == [16, 32, 48, 64]
    assert [row["ppo/updates"] for row in found] == [2, 4, 6, 8]
    np.testing.assert_allclose(
        [row["ppo/learning_rate"] for row in found], 3e-4 * np.array([1, 0.75, 0.5, 0.25])
    )
    counts = [row["episode/count"] for row in found]
    assert counts == sorted(counts)
    assert counts[-1] > counts[1] > 0


def test_a_time_limit_does_not_end_the_return():
    """cleanrl#504: Pendulum fails without bootstrapping on truncation."""
    from msrl_accel.pipeline.sync import SyncTrainer

    gamma, value, reward = 0.9, 10.0, 1.0
    for truncates in (True, False):
        trainer = SyncTrainer(
            resolve_config(
                "ppo",
                "Strict-v0",
                tuned=False,
                n_envs=1,
                ppo={"n_steps": 10, "gamma": gamma, "gae_lambda": 1.0},
                policy={"hidden_sizes": [8]},
                env_kwargs={"length": 4},
            ),
            run=None,
        )
        # A critic that says 10 everywhere: its last weights are zero.
        arrays = trainer.algorithm.policy.arrays()
        for name in arrays:
            if name.startswith("critic"):
                arrays[name] = np.full_like(arrays[name], value if arrays[name].ndim == 1 else 0)
        trainer.algorithm.policy.load_arrays(arrays)
        trainer.engine.publish(0)
        trainer.collector.reset(0)
        t = trainer.collector.collect()
        assert t.truncated[:, 0].nonzero()[0].tolist() == [3, 7]
        terminated = t.terminated if truncates else t.truncated
        advantages = gae(
            t.rewards, t.values, t.next_values, terminated, t.truncated, gamma, gae_lambda=1.0
        )
        # Return of step 3 by definition: its reward, and what follows only if cut off.
        expected = reward + (gamma * value if truncates else 0.0) - value
        assert advantages[3, 0] == pytest.approx(expected)
        trainer.close()


def test_the_value_of_a_cut_episode_is_that_of_its_own_last_observation():
    """cleanrl#504, second half: not of the next episode's first observation."""
    from msrl_accel.pipeline.sync import SyncTrainer

    config = resolve_config(
        "ppo",
        "Pendulum-v1",
        tuned=False,
        n_envs=16,
        ppo={"n_steps": 12},
        policy={"hidden_sizes": [8]},
        env_kwargs={"max_episode_steps": 5},
    )
    trainer = SyncTrainer(config, run=None)
    trainer.collector.reset(3)
    t = trainer.collector.collect()
    # The same actions in environments without a limit never leave their first episode.
    free = envs.make_vector("Pendulum-v1", 16, kwargs={"max_episode_steps": -1})
    free.reset(3)
    for step in range(5):
        raw = np.clip(t.raw_actions[step].reshape(16, 1), -1, 1) * 2.0
        last = free.step(raw.astype(np.float32)).observations
    assert t.truncated[4].all()
    np.testing.assert_array_equal(t.next_values[4], trainer.collector.values(last))
    assert not np.allclose(t.next_values[4], t.values[5])
    trainer.close()


@pytest.mark.slow
def test_pendulum_is_learned(tmp_path):
    """cleanrl#504: it is not where truncation ends the return."""
    run = train(algo="ppo", env="Pendulum-v1", quiet=True, run_dir=str(tmp_path / "run"))
    assert evaluate(run, 20).mean >= -250


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_numbers_that_are_not_finite_are_named_at_the_source(tmp_path, capsys, text):
    """tianshou#596: NaN observations surface as a message about `loc`."""
    # JSON's NaN is text in YAML, whose own spelling is .nan.
    kwargs = f"env_kwargs.reward={text.replace('nan', '.nan').replace('inf', '.inf')}"
    line = one_line(capsys, *tiny(tmp_path / "run", "--set", kwargs, env="Strict-v0", n_envs=2))
    assert f"Strict-v0: environment 0 returned reward {text} at step 1" in line


def test_non_finite_observations_of_any_key_are_named(tmp_path, capsys, monkeypatch):
    """tianshou#596, as observations: see also test_bad_input.py."""

    class Nan(Strict):
        observation_space = spaces.Dict({"deep": spaces.Box(-1, 1, (2, 2), np.float32)})

        def reset(self, **kwargs):
            super().reset(**kwargs)
            return {"deep": np.zeros((2, 2), np.float32)}, {}

        def step(self, action):
            _, *rest = super().step(action)
            return {"deep": np.array([[0, 0], [np.nan, 0]], np.float32)}, *rest

    monkeypatch.setitem(
        gymnasium.registry, "Nan-v0", gymnasium.envs.registration.EnvSpec("Nan-v0", Nan)
    )
    line = one_line(capsys, *tiny(tmp_path / "run", env="Nan-v0", n_envs=2))
    assert "Nan-v0: environment 0 returned deep nan at step 1" in line


def test_ctrl_c_leaves_a_policy_that_acts(tmp_path, monkeypatch):
    """ml-agents#980: Ctrl-C loses the model."""
    with monkeypatch.context() as patch:
        interrupt_in_iteration(patch, 2)
        run_main_until_stopped(*tiny(tmp_path / "run", iterations=1000))
    run = load_run(tmp_path / "run")
    assert run.checkpoints.steps() == [2 * BATCH]
    assert run.policy.act(np.zeros(4)) in (0, 1)
    assert len(evaluate(run, 2).returns) == 2


def test_logging_goes_on_without_tensorboard(tmp_path, monkeypatch):
    """stable-baselines3#170: TensorBoard missing means silently no logs."""
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.warns(UserWarning, match=r"no TensorBoard events .*msrl_accel\[tensorboard\]"):
        run_main(*tiny(tmp_path / "run", iterations=2), *settings(logging__tensorboard=True))
    run = Run(tmp_path / "run")
    assert run.metrics["step"].tolist() == [BATCH, 2 * BATCH]
    assert len(rows(run.path)) == 2
    assert not (run.path / "tensorboard").exists()


@pytest.mark.parametrize("more", [[], ["--total-steps", "64"], ["--total-steps", "32"]])
def test_resuming_at_the_last_step_is_said(resumed, capsys, more):
    """verl PR 5725: resuming at the last step trains 0 steps silently."""
    before = rows(resumed[0])
    assert main(["--resume", str(resumed[0]), *more]) == 0
    output = capsys.readouterr().out
    assert "Nothing to do: this run is already complete" in output
    assert "--total-steps" in output
    assert rows(resumed[0]) == before
