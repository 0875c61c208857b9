"""`python -m msrl_accel.evaluate` and rendering."""

from __future__ import annotations

import json
import shutil
import sys
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
import run_helpers
from PIL import Image
from run_helpers import BATCH, tiny

from msrl_accel import render, train
from msrl_accel.envs import make_vector
from msrl_accel.errors import CheckpointError, ConfigError, EnvError, MsrlError
from msrl_accel.evaluate import evaluate, main
from msrl_accel.evaluation import evaluate_policy
from msrl_accel.render import render_episode
from msrl_accel.run import Run
from msrl_accel.runtime.base import ActResult
from msrl_accel.spaces import PolicySpec

no_curves = run_helpers.no_curves


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("evaluated") / "run"
    arguments = tiny(directory, "--quiet", checkpoint__interval_seconds=0, iterations=3)
    assert train.main(arguments) == 0
    return directory


def report(capsys, *arguments):
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def one_line(capsys, *arguments):
    assert main([*map(str, arguments)]) == 2
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert output.out == ""
    return line


@pytest.mark.parametrize("kind", ["deterministic", "sampled"])
def test_the_closing_evaluation_is_repeated_exactly(run_dir, kind):
    result = evaluate(run_dir, 4, deterministic=kind == "deterministic")
    assert result.to_dict() == Run(run_dir).summary[kind]


def test_the_report_is_readable(run_dir, capsys):
    assert main([str(run_dir), "--episodes", "4"]) == 0
    output = capsys.readouterr().out
    expected = Run(run_dir).summary["deterministic"]
    assert "ppo on CartPole-v1" in output
    assert f"{expected['return_mean']:.1f} +- {expected['return_std']:.1f} over 4" in output
    assert f"step {3 * BATCH}" in output
    assert f"python -m msrl_accel.evaluate {run_dir} --render episode.gif" in output


def test_json_holds_every_episode(run_dir, capsys):
    result = report(capsys, run_dir, "--episodes", 6, "--sampled", "--seed", 5)
    assert (result["algo"], result["env"]) == ("ppo", "CartPole-v1")
    assert result["deterministic"] is False
    assert len(result["returns"]) == result["episodes"] == 6
    assert result["return_mean"] == pytest.approx(np.mean(result["returns"]))
    again = report(capsys, run_dir, "--episodes", 6, "--sampled", "--seed", 5)
    other = report(capsys, run_dir, "--episodes", 6, "--sampled", "--seed", 6)
    assert result == again != other


def test_any_checkpoint_can_act(run_dir, capsys):
    store = Run(run_dir).checkpoints
    best = store.best().step
    assert report(capsys, run_dir, "--checkpoint", "best")["checkpoint_step"] == best
    first = report(capsys, run_dir, "--checkpoint", BATCH, "--sampled")
    assert first["checkpoint_step"] == BATCH
    assert first["returns"] != report(capsys, run_dir, "--sampled")["returns"]
    assert "use 'last', 'best' or one of these steps" in one_line(
        capsys, run_dir, "--checkpoint", BATCH + 1
    )
    with pytest.raises(CheckpointError):
        evaluate(run_dir, checkpoint=7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--episodes", "0"], "episodes = 0: must be at least 1"),
        (["--episodes", "many"], "--episodes: invalid int value: 'many'"),
        (["--seed", "-1"], "seed = -1"),
        (["--checkpoint", "newest"], "'newest' is not last, best or a step"),
        (["--render", "episode.avi"], "must end in .gif or .mp4"),
        (["--render", "no/such/folder/episode.gif"], "there is no folder 'no/such/folder'"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_mistakes_are_one_line(run_dir, capsys, arguments, message):
    assert message in one_line(capsys, run_dir, *arguments)


def test_what_is_no_run_or_has_no_checkpoint_is_said(run_dir, tmp_path, capsys):
    assert "not a run directory" in one_line(capsys, tmp_path)
    shutil.copy(run_dir / "config.yaml", tmp_path)
    assert "no checkpoint in" in one_line(capsys, tmp_path)


def test_one_episode_is_rendered(run_dir, tmp_path, capsys):
    pytest.importorskip("pygame")
    target = tmp_path / "episode.gif"
    result = report(capsys, run_dir, "--episodes", 1, "--render", target)["render"]
    assert result["file"] == str(target)
    assert result["return"] == result["length"]  # CartPole gives 1 a step
    with Image.open(target) as image:
        assert image.size == (600, 400)
        assert image.info["loop"] == 0
        assert playing_time(image) == 20 * (result["length"] + 1)  # 50 frames a second
    assert [path.name for path in tmp_path.iterdir()] == ["episode.gif"]


class Rightwards:
    """Stands for a policy."""

    def act(self, observation, deterministic):
        return np.int64(1)


class Screen(gymnasium.Env):
    """Draws its step number as a grey level; four steps long."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode=None, fps=10, fault=None):
        self.render_mode = render_mode
        self.metadata = {**self.metadata, "render_fps": fps}
        self.fault = fault

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.count += 1
        return np.zeros(1, np.float32), 2.0, False, self.count == 4, {}

    def render(self):
        if self.fault is not None and self.count == 2:
            raise self.fault
        return np.full((33, 47, 3), 60 * self.count, np.uint8)


class Endless(Screen):
    """Ends after four steps where the action is 0, otherwise never."""

    def step(self, action):
        self.count += 1
        return np.zeros(1, np.float32), 2.0, False, action == 0 and self.count == 4, {}

    def render(self):
        return np.full((33, 47, 3), 30 * self.count, np.uint8)


gymnasium.register("Screen-v0", entry_point=Screen)
gymnasium.register("Endless-v0", entry_point=Endless)
gymnasium.register("Blind-v0", entry_point="msrl_accel.envs.toy:IdentityDiscrete")


class FixedActions:
    """A runtime that takes the same action in each environment all the time."""

    def __init__(self, *actions):
        self.actions = np.array(actions)
        self.spec = PolicySpec.from_spaces(Screen.observation_space, Screen.action_space)

    def act(self, observations, noise):
        return ActResult(self.actions, None, None, self.actions, ())


def test_an_episode_that_never_ends_is_cut_and_said_to_be(caplog):
    with make_vector("Endless-v0", 2) as env:
        result = evaluate_policy(FixedActions(0, 1), env, 6, max_episode_steps=10)
    assert sorted(result.lengths) == [4, 4, 4, 10]
    assert sorted(result.returns) == [8, 8, 8, 20]
    (record,) = caplog.records
    assert "1 evaluation episodes of Endless-v0 did not end within 10 steps" in record.getMessage()
    assert "max_episode_steps" in record.getMessage()


def test_env_kwargs_limit_an_environment_that_never_ends(caplog):
    with make_vector("Endless-v0", 2, kwargs={"max_episode_steps": 7}) as env:
        result = evaluate_policy(FixedActions(0, 1), env, 6, max_episode_steps=10)
    assert sorted(result.lengths) == [4, 4, 4, 7, 7, 7]
    assert not caplog.records


def test_an_animation_of_an_episode_that_never_ends_is_cut(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(render, "MAX_STEPS", 6)
    episode = render_episode(Rightwards(), "Endless-v0", tmp_path / "episode.gif", seed=0)
    assert episode.length == 6
    with Image.open(tmp_path / "episode.gif") as image:
        assert image.n_frames == 7
    assert "over 6 steps" in caplog.text


def playing_time(image):
    """Milliseconds; also puts each frame's duration where it can be read."""
    total = 0
    for index in range(image.n_frames):
        image.seek(index)
        total += image.info["duration"]
    return total


def test_a_gif_shows_each_step(tmp_path):
    target = tmp_path / "screen.gif"
    episode = render_episode(Rightwards(), "Screen-v0", target)
    assert (episode.length, episode.total_reward) == (4, 8.0)
    with Image.open(target) as image:
        levels = []
        for index in range(image.n_frames):
            image.seek(index)
            levels.append(int(np.asarray(image.convert("RGB"))[5, 5, 0]))
            assert image.info["duration"] == 100
    np.testing.assert_allclose(levels, [0, 60, 120, 180, 240], atol=4)


def test_a_gif_of_a_fast_environment_keeps_its_speed(tmp_path):
    """Viewers slow down frames shorter than 20 ms: every third is left of 125 a second."""
    target = tmp_path / "fast.gif"
    render_episode(Rightwards(), "Screen-v0", target, env_kwargs={"fps": 125})
    with Image.open(target) as image:
        assert image.n_frames == 2  # steps 0 and 3
        assert image.info["duration"] in (20, 24)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # imageio's reader
def test_mp4_shows_each_step(tmp_path):
    iio = pytest.importorskip("imageio.v2")
    pytest.importorskip("imageio_ffmpeg")
    target = tmp_path / "screen.mp4"
    render_episode(Rightwards(), "Screen-v0", target)
    with iio.get_reader(target) as reader:
        frames = [np.asarray(frame) for frame in reader]
        assert reader.get_meta_data()["fps"] == 10
    levels = [frame.mean() for frame in frames]
    np.testing.assert_allclose(levels, [0, 60, 120, 180, 240], atol=6)
    assert [path.name for path in tmp_path.iterdir()] == ["screen.mp4"]


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_a_failure_leaves_the_old_file(tmp_path, suffix):
    if suffix == ".mp4":
        pytest.importorskip("imageio_ffmpeg")
    target = tmp_path / f"old{suffix}"
    target.write_text("old")
    with pytest.raises(RuntimeError, match="broken"):
        render_episode(
            Rightwards(), "Screen-v0", target, env_kwargs={"fault": RuntimeError("broken")}
        )
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


@pytest.mark.filterwarnings("ignore:.*render_mode='rgb_array'")  # Gymnasium's, besides ours
def test_what_is_missing_is_named(tmp_path, monkeypatch):
    missing = gymnasium.error.DependencyNotInstalled("pygame is not installed")
    with pytest.raises(EnvError, match=r"Screen-v0 needs a package .*msrl_accel\[plot\]"):
        render_episode(Rightwards(), "Screen-v0", tmp_path / "x.gif", env_kwargs={"fault": missing})
    with pytest.raises(EnvError, match="no render mode rgb_array"):
        render_episode(Rightwards(), "Blind-v0", tmp_path / "x.gif")
    with pytest.raises(ConfigError, match=r"\.gif or \.mp4"):
        render_episode(Rightwards(), "Screen-v0", tmp_path / "x.webm")
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(MsrlError, match=r"imageio_ffmpeg.*msrl_accel\[plot\]"):
        render_episode(Rightwards(), "Screen-v0", tmp_path / "x.mp4")


def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    def full(path, frames, fps):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(render, "_write_gif", full)
    with pytest.raises(MsrlError, match=r"cannot write .*x\.gif: No space left"):
        render_episode(Rightwards(), "Screen-v0", tmp_path / "x.gif")
