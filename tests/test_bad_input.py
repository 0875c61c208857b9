"""Mistakes end with status 2 and one line on standard error that names them, never a traceback."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import run_helpers
from gymnasium import spaces
from run_helpers import BATCH, python_m, settings, tiny

from msrl_accel.train import main

no_curves = run_helpers.no_curves


class OddSpaces(gymnasium.Env):
    """Has the spaces it is given; never steps."""

    def __init__(self, observation, action):
        self.observation_space = SPACES[observation]
        self.action_space = SPACES[action]


SPACES = {
    "box": spaces.Box(0, 1, (2,), np.float32),
    "discrete": spaces.Discrete(2),
    "text": spaces.Text(5),
    "tuple": spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 1, (2,)))),
    "nested": spaces.Dict({"outer": spaces.Dict({"inner": spaces.Box(0, 1, (2,))})}),
    "dict_of_discrete": spaces.Dict({"phase": spaces.Discrete(3)}),
    "dict": spaces.Dict({"part": spaces.Box(0, 1, (2,))}),
    "integer_box": spaces.Box(0, 3, (2,), np.int32),
}
gymnasium.register("OddSpaces-v0", entry_point=OddSpaces)


@pytest.fixture(autouse=True)
def faulty_environments(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "envs"))


@pytest.fixture
def refused(capsys):
    """Runs a command line that must fail; returns its only line."""

    def run(arguments):
        assert main([str(word) for word in arguments]) == 2
        output = capsys.readouterr()
        (line,) = output.err.splitlines()
        assert line.startswith("python -m msrl_accel.train: ")
        assert output.out == ""
        return line

    return run


@pytest.mark.parametrize(
    ("env", "parts"),
    [
        ("CartPol-v1", ["unknown environment 'CartPol-v1'", "CartPole-v1"]),
        ("CartPole-v9", ["unknown environment 'CartPole-v9'"]),
        ("Nothing-v0", ["unknown environment 'Nothing-v0'", "module:EnvId"]),
        ("no_such_module:CartPole-v1", ["cannot import the module 'no_such_module'"]),
        ("faulty_envs:Nothing-v0", ["unknown environment 'Nothing-v0'"]),
        ("", ["unknown environment ''"]),
    ],
)
def test_unknown_environment(refused, tmp_path, env, parts):
    line = refused(tiny(tmp_path / "run", env=env))
    assert all(part in line for part in parts), line
    assert not (tmp_path / "run").exists()  # so that the same command can be corrected


@pytest.mark.parametrize("observation", ["tuple", "discrete", "nested", "dict_of_discrete", "text"])
def test_unsupported_observation_space(refused, tmp_path, observation):
    values = {"env_kwargs": {"observation": observation, "action": "discrete"}}
    line = refused(tiny(tmp_path / "run", env="OddSpaces-v0", n_envs=1, **values))
    assert "observation" in line
    assert "support" in line
    assert "Box" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("action", ["tuple", "dict", "integer_box", "text"])
def test_unsupported_action_space(refused, tmp_path, action):
    values = {"env_kwargs": {"observation": "box", "action": action}}
    line = refused(tiny(tmp_path / "run", env="OddSpaces-v0", n_envs=1, **values))
    assert "action" in line
    assert "Discrete, MultiDiscrete, MultiBinary" in line


def test_observation_that_is_not_finite(refused, tmp_path):
    line = refused(tiny(tmp_path / "run", env="faulty_envs:NanObservation-v0", n_envs=2))
    assert "NanObservation-v0: environment 0 returned zeta inf at step 3" in line


def test_environment_that_raises_in_a_subprocess_shows_its_traceback(tmp_path, capsys):
    arguments = tiny(tmp_path / "run", env="faulty_envs:Raising-v0", n_envs=2)
    assert main([*arguments, *settings(vectorization="async")]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("python -m msrl_accel.train: faulty_envs:Raising-v0: environment ")
    assert "LocalError in step: local error 1 2" in errors
    assert "in deep_inside" in errors  # the child's own frames
    assert "msrl_accel/train.py" not in errors  # and none of ours


def test_environment_that_raises_in_this_process(refused, tmp_path):
    line = refused(tiny(tmp_path / "run", env="faulty_envs:Raising-v0", n_envs=2))
    assert "environment 0 raised LocalError in step: local error 1 2" in line


def test_environment_arguments_it_does_not_take(refused, tmp_path):
    line = refused(tiny(tmp_path / "run", n_envs=2, env_kwargs={"gravitas": 1}))
    assert "CartPole-v1 cannot be made with {'gravitas': 1}" in line


def test_run_directory_that_cannot_be_written(refused, tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "run", "/proc/run"):
        line = refused(tiny(path))
        assert f"run_dir = '{path}' cannot be written" in line
        assert "--run-dir" in line


def test_run_directory_that_holds_a_run(refused, tmp_path):
    (tmp_path / "config.yaml").write_text("algo: ppo\nenv: CartPole-v1\n")
    line = refused(tiny(tmp_path))
    assert "already holds a run" in line
    assert f"--resume {tmp_path}" in line
    assert (tmp_path / "config.yaml").read_text() == "algo: ppo\nenv: CartPole-v1\n"


def test_run_directory_with_metrics_of_something_else(refused, tmp_path):
    (tmp_path / "metrics.csv").write_text("mine")
    assert "metrics.csv" in refused(tiny(tmp_path))
    assert (tmp_path / "metrics.csv").read_text() == "mine"


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("ppo.learning_rat", "ppo.learning_rate"),
        ("policy.hiden_sizes", "policy.hidden_sizes"),
        ("reward.normalise", "reward.normalize"),
        ("evaluation.episode", "evaluation.episodes"),
        ("checkpoint.keep", "checkpoint.keep_last"),
        ("logging.tensorbord", "logging.tensorboard"),
        ("runtime.thread", "runtime.threads"),
        ("totl_steps", "total_steps"),
        ("pop.n_steps", "ppo.n_steps"),
    ],
)
def test_misspelt_key(refused, tmp_path, key, nearest):
    line = refused([*tiny(tmp_path / "run"), "--set", f"{key}=1"])
    assert key in line
    assert nearest in line
    file = tmp_path / "config.yaml"
    section, _, name = key.rpartition(".")
    file.write_text(f"{section}:\n  {name}: 1\n" if section else f"{name}: 1\n")
    line = refused(["--algo", "ppo", "--env", "CartPole-v1", "--config", file])
    assert key.split(".")[0] in line
    assert nearest in line


@pytest.mark.parametrize(
    ("assignment", "parts"),
    [
        ("ppo.learning_rate=fast", ["ppo.learning_rate", "fast"]),
        ("ppo.gamma=1.5", ["ppo.gamma", "1.5", "1"]),
        ("policy.activation=swish", ["policy.activation", "swish", "tanh", "relu"]),
        ("policy.hidden_sizes=64", ["policy.hidden_sizes", "64"]),
        ("reward.clip=0", ["reward.clip", "0"]),
        ("evaluation.episodes=0", ["evaluation.episodes", "0"]),
        ("checkpoint.interval_seconds=-1", ["checkpoint.interval_seconds", "-1"]),
        ("logging.tensorboard=maybe", ["logging.tensorboard", "maybe"]),
        ("runtime.device=TPU", ["runtime.device", "TPU", "Ascend"]),
        ("vectorization=fibers", ["vectorization", "fibers", "async"]),
        ("n_envs=0", ["n_envs", "0", "1"]),
        ("total_steps=0", ["total_steps", "0"]),
        ("seed=-1", ["seed", "-1"]),
    ],
)
def test_value_out_of_bounds_or_of_the_wrong_type(refused, tmp_path, assignment, parts):
    line = refused([*tiny(tmp_path / "run"), "--set", assignment])
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--n-envs", "0"], ["n_envs", "0"]),
        (["--total-steps", "1e3.5"], ["total_steps", "1e3.5"]),
        (["--algo", "pppo"], ["algo", "pppo", "ppo"]),
        (["--total-step", "10"], ["--total-step", "--total-steps"]),
        (["--config", "nowhere.yaml"], ["nowhere.yaml"]),
        (["--resume", "nowhere"], ["nowhere", "not a run directory"]),
    ],
)
def test_mistaken_flag(refused, tmp_path, flags, parts):
    line = refused([*tiny(tmp_path / "run"), *flags])
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    "text", ["algo: [", "- a\n- b\n", "\x00", "algo: ppo\nalgo: ppo\n", "!!python/object:os.system"]
)
def test_config_file_that_is_no_config(refused, tmp_path, text):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert str(file) in refused(["--algo", "ppo", "--env", "CartPole-v1", "--config", file])


def test_total_steps_below_one_batch(refused, tmp_path):
    arguments = tiny(tmp_path / "run")
    arguments[arguments.index("--total-steps") + 1] = BATCH - 1
    line = refused(arguments)
    assert f"total_steps = {BATCH - 1}" in line
    assert f"n_envs * ppo.n_steps = {BATCH}" in line
    assert not (tmp_path / "run").exists()


def test_missing_package_of_an_environment(refused, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "Box2D", None)
    for name in [name for name in sys.modules if name.startswith("gymnasium.envs.box2d")]:
        monkeypatch.delitem(sys.modules, name)
    line = refused(tiny(tmp_path / "run", env="LunarLander-v3", n_envs=1))
    assert "LunarLander-v3 needs a package that is missing" in line
    assert "pip install 'msrl_accel[box2d]'" in line


def test_resuming_what_has_another_policy(refused, tmp_path):
    """A checkpoint of one run under the config of another."""
    for name, sizes in (("one", [8]), ("two", [9])):
        assert main(tiny(tmp_path / name, "--quiet", iterations=1, policy__hidden_sizes=sizes)) == 0
    shutil.rmtree(tmp_path / "one" / "checkpoints")
    shutil.copytree(tmp_path / "two" / "checkpoints", tmp_path / "one" / "checkpoints")
    line = refused(["--resume", tmp_path / "one", "--total-steps", 2 * BATCH])
    assert "has shape" in line


def test_a_whole_process_ends_with_one_line(tmp_path):
    result = python_m("msrl_accel.train", *tiny(tmp_path / "run", env="CartPol-v1"))
    assert result.returncode == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert "python -m msrl_accel.train: unknown environment" in result.stderr.splitlines()[-1]


def test_output_that_nobody_reads_is_no_error(tmp_path):
    """As in `python -m msrl_accel.train --help | head -1`."""
    command = f"{sys.executable} -m msrl_accel.train --help | head -1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert "usage" in result.stdout
    assert "Traceback" not in result.stderr
