"""Compiled graphs on disk: the same results, sooner; never those of another configuration."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from policy_helpers import ACTION_SPACES, spec_of
from run_helpers import environment, rows, tiny

from msrl_accel import graph_cache
from msrl_accel.config import resolve_config
from msrl_accel.graph_cache import GraphCache

SPEC = spec_of(ACTION_SPACES["discrete"])


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty cache that is in use."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MS_COMPILER_CACHE_ENABLE", raising=False)
    monkeypatch.setattr(graph_cache, "_taken", False)
    return tmp_path / "msrl_accel" / "graphs"


def config(**values):
    return resolve_config("ppo", "Test-v0", tuned=False, overrides={"n_envs": 4, **values})


def folder(spec=SPEC, **values):
    return GraphCache(config(**values), spec).folder


def train(cache, run_dir, **values):
    """Metrics of a tiny run in a process of its own, with a cache folder."""
    child = {**environment(), "XDG_CACHE_HOME": str(cache)}
    del child["MS_COMPILER_CACHE_ENABLE"]
    arguments = tiny(run_dir, "--quiet", iterations=2, runtime__rollout="onnx", **values)
    command = [sys.executable, "-m", "msrl_accel.train", *arguments]
    done = subprocess.run(command, env=child, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return rows(run_dir)


def graphs(cache):
    found = cache.glob("msrl_accel/graphs/*/update.*/rank_0/graph_cache/*.mindir")
    return {file: file.read_bytes() for file in found}


def test_a_run_from_the_cache_equals_one_that_compiles(tmp_path):
    pytest.importorskip("onnxruntime")
    cache = tmp_path / "cache"
    first = train(cache, tmp_path / "first")
    stored = graphs(cache)
    assert len(stored) == 1
    assert train(cache, tmp_path / "second") == first
    assert graphs(cache) == stored
    (file,) = stored
    assert len(list(file.parents[3].glob("policy.onnx.*"))) == 1

    # Another configuration does not read it.
    assert train(cache, tmp_path / "other", ppo__vf_coef=0.1) != first
    assert len(graphs(cache)) == 2

    # What was damaged is compiled anew.
    file.write_bytes(stored[file][:1000])
    assert train(cache, tmp_path / "damaged") == first
    assert file not in graphs(cache) and len(graphs(cache)) == 2


@pytest.mark.usefixtures("home", "graph_mode")
def test_all_that_shapes_a_graph_is_in_the_name_of_its_folder(monkeypatch):
    one = folder()
    assert folder(seed=7, run_dir="elsewhere", **{"evaluation.episodes": 3}) == one
    others = [
        folder(**{"ppo.vf_coef": 0.1}),
        folder(**{"policy.hidden_sizes": (8,)}),
        folder(**{"ppo.batch_size": 32}),
        folder(n_envs=8),
        folder(spec_of(ACTION_SPACES["box"])),
    ]
    monkeypatch.setattr(graph_cache, "_source_digest", b"of other files".strip)
    others.append(folder())
    monkeypatch.setenv("MS_DEV_SOMETHING", "1")
    others.append(folder())
    assert len({one, *others}) == 8


@pytest.mark.usefixtures("home", "graph_mode")
def test_it_is_left_alone_where_it_could_be_wrong(monkeypatch):
    assert folder() is not None
    assert folder(**{"runtime.compile_cache": False}) is None
    with monkeypatch.context() as patch:
        patch.setenv("MS_COMPILER_CACHE_ENABLE", "1")
        assert folder() is None
    from msrl_accel.algorithms import ppo

    with monkeypatch.context() as patch:
        patch.setattr(ppo, "ppo_loss", lambda *arguments: None)
        assert folder() is None
    with monkeypatch.context() as patch:
        patch.setattr(ppo.PPO, "update", lambda self: None)
        assert folder() is None
    with monkeypatch.context() as patch:
        patch.setattr(ppo.PPO, "__module__", "mine")
        assert folder() is None
    assert folder() is not None


@pytest.mark.usefixtures("graph_mode")
def test_files_are_kept_checked_and_bounded(home, monkeypatch):
    made = []

    def make():
        made.append(1)
        return b"content"

    monkeypatch.setattr(graph_cache, "KEPT", 2)
    for coefficient in (0.1, 0.2, 0.3):
        cache = GraphCache(config(**{"ppo.vf_coef": coefficient}), SPEC)
        assert cache.file("a", make) == cache.file("a", make) == b"content"
    assert len(made) == 3
    assert len(os.listdir(home)) == 2
    (file,) = cache.folder.iterdir()
    file.write_bytes(b"damage!")
    assert cache.file("a", make) == b"content"
    assert len(made) == 4

    shutil.rmtree(home)
    home.write_text("a file where the folder should be")
    assert cache.file("a", make) == b"content"
    with cache.compiling():
        assert "MS_COMPILER_CACHE_ENABLE" not in os.environ


@pytest.mark.usefixtures("graph_mode")
def test_a_stored_graph_that_fails_is_removed(home, monkeypatch):
    cache = GraphCache(config(), SPEC)
    with cache.compiling():
        staging = os.environ["MS_COMPILER_CACHE_PATH"]
        os.makedirs(f"{staging}/rank_0/graph_cache")
        with open(f"{staging}/rank_0/graph_cache/compile_cache_0.mindir", "w") as file:
            file.write("graph")
    assert "MS_COMPILER_CACHE_PATH" not in os.environ
    (stored,) = cache.folder.glob("update.*")
    with cache.compiling():  # one graph a process
        assert "MS_COMPILER_CACHE_PATH" not in os.environ
    monkeypatch.setattr(graph_cache, "_taken", False)
    with pytest.raises(RuntimeError), cache.compiling():
        assert os.environ["MS_COMPILER_CACHE_PATH"] == str(stored)
        raise RuntimeError("the graph does not fit")
    assert not stored.exists()
    assert os.listdir(cache.folder) == []
