"""One episode as an animation: GIF with Pillow, MP4 with imageio and ffmpeg."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from msrl_accel.acting import ActingPolicy
from msrl_accel.envs import make_single
from msrl_accel.errors import ConfigError, EnvError, MsrlError

logger = logging.getLogger("msrl_accel")

SUFFIXES = (".gif", ".mp4")
MAX_STEPS = 30_000
"""Of an animation: an episode that never ends would take for ever."""
_DEFAULT_FPS = 30.0
_GIF_FPS = 50.0
"""Viewers slow down GIFs of a higher frame rate, so frames are left out instead."""
_EXTRA = "pip install 'msrl_accel[plot]'"


@dataclass
class Episode:
    """What was rendered."""

    path: Path
    total_reward: float
    length: int
    """Steps."""


def check_target(path: str | Path) -> Path:
    """Refuse a file that could not be written in the end, before the work is done.

    Raises:
        ConfigError: the suffix is unknown, or there is no such folder.
        MsrlError: MP4 without imageio and its ffmpeg.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"render file {str(path)!r}: its name must end in .gif or .mp4")
    if not path.parent.is_dir():
        raise ConfigError(f"render file {str(path)!r}: there is no folder {str(path.parent)!r}")
    if path.suffix.lower() == ".mp4":
        _imageio()
    return path


def render_episode(
    policy: ActingPolicy,
    env_id: str,
    path: str | Path,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    deterministic: bool = True,
    seed: int = 0,
) -> Episode:
    """Play one episode and write it as an animation at the environment's own frame rate.

    Args:
        policy: acts.
        env_id, env_kwargs: the environment, as for `make_single`.
        path: ends in .gif or .mp4; replaced only once the new file is whole.
        deterministic: the mode of the action distribution; otherwise samples.
        seed: of the environment.

    Raises:
        ConfigError: another suffix, or a folder that is missing.
        EnvError: the environment cannot draw itself as an image.
        MsrlError: a package is missing, or the file cannot be written.
    """
    path = check_target(path)
    # Its greeting would be the first line of what a program prints.
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    env = make_single(env_id, env_kwargs, render_mode="rgb_array")
    try:
        modes = env.metadata.get("render_modes") or []
        if "rgb_array" not in modes:
            known = ", ".join(map(str, modes)) or "none"
            raise EnvError(f"{env_id} has no render mode rgb_array (its modes: {known})")
        fps = float(env.metadata.get("render_fps") or _DEFAULT_FPS)
        episode = Episode(path, 0.0, 0)
        frames = _play(env, env_id, policy, deterministic, seed, episode)
        with _replacing(path) as temporary:
            if path.suffix.lower() == ".gif":
                _write_gif(temporary, frames, fps)
            else:
                _write_mp4(temporary, frames, fps)
        return episode
    finally:
        env.close()


def _play(
    env: gymnasium.Env[Any, Any],
    env_id: str,
    policy: ActingPolicy,
    deterministic: bool,
    seed: int,
    episode: Episode,
) -> Iterator[np.ndarray]:
    """Frames [H, W, 3] uint8 of one episode, whose totals end up in `episode`."""
    observation, _ = env.reset(seed=seed)
    yield _frame(env, env_id)
    done = False
    while not done:
        if episode.length == MAX_STEPS:
            logger.warning("the episode of %s is cut: it took over %d steps", env_id, MAX_STEPS)
            return
        action = policy.act(observation, deterministic)
        observation, reward, terminated, truncated, _ = env.step(action)
        episode.total_reward += float(reward)
        episode.length += 1
        done = terminated or truncated
        yield _frame(env, env_id)


def _frame(env: gymnasium.Env[Any, Any], env_id: str) -> np.ndarray:
    try:
        frame: Any = env.render()
    except gymnasium.error.DependencyNotInstalled as error:
        raise EnvError(f"{env_id} needs a package to draw itself: {_EXTRA} ({error})") from error
    image = np.asarray(frame)
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
        raise EnvError(
            f"{env_id} drew {type(frame).__name__} of shape {image.shape} and dtype {image.dtype}; "
            "rgb_array must give uint8 [H, W, 3]"
        )
    return image


def _write_gif(path: Path, frames: Iterator[np.ndarray], fps: float) -> None:
    from PIL import Image

    stride = math.ceil(fps / _GIF_FPS)
    # One palette a frame, made here: kept as palette images, long episodes take a third of memory.
    images = (
        Image.fromarray(frame).quantize(dither=Image.Dither.NONE)
        for i, frame in enumerate(frames)
        if i % stride == 0
    )
    first = next(images)
    duration = round(1000 * stride / fps)
    first.save(path, save_all=True, append_images=images, duration=duration, loop=0)


def _write_mp4(path: Path, frames: Iterator[np.ndarray], fps: float) -> None:
    # H.264 needs even sides; imageio's default would scale to multiples of 16.
    with _imageio().get_writer(path, format="FFMPEG", fps=fps, macro_block_size=2) as writer:
        for frame in frames:
            writer.append_data(frame)


def _imageio() -> Any:
    try:
        import imageio.v2
        import imageio_ffmpeg  # noqa: F401
    except ImportError as error:
        raise MsrlError(f"MP4 needs {error.name}: {_EXTRA}, or render to a .gif file") from error
    return imageio.v2


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`, moved there unless the block fails."""
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(4)}{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise MsrlError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
