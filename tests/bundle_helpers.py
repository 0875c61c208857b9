"""What the tests of bundles share: policies of every kind, and bundles made of them once."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import numpy as np
from gymnasium import spaces
from policy_helpers import ACTION_SPACES, VECTOR, decided_arrays, options, spec_of

from msrl_accel.config import resolve_config

CAMERA = spaces.Box(0, 255, (12, 12, 3), np.uint8)
VERSION = 512

KINDS = {
    "discrete": (VECTOR, ACTION_SPACES["discrete"]),
    "multi_discrete": (VECTOR, ACTION_SPACES["multi_discrete"]),
    "multi_binary": (VECTOR, ACTION_SPACES["multi_binary"]),
    "normalized_box": (VECTOR, ACTION_SPACES["box"]),
    "image": (CAMERA, ACTION_SPACES["discrete"]),
    # The names are those of other tensors of the graph.
    "dict": (spaces.Dict({"noise": CAMERA, "action": VECTOR}), ACTION_SPACES["box"]),
}
"""Observation and action space of each kind of policy."""


def make_policy(kind, scale=1):
    """A policy with weights that make decided logits and means, unlike those of a new one."""
    from msrl_accel.config import RuntimeConfig
    from msrl_accel.device import set_up
    from msrl_accel.policy import Policy

    set_up(RuntimeConfig())
    observation, action = KINDS[kind]
    normalize = kind == "normalized_box"
    policy = Policy(
        spec_of(action, observation),
        options(hidden_sizes=(16, 16), normalize_observations=normalize),
        0,
    )
    arrays = decided_arrays(policy, np.random.default_rng(5), 0.3)
    policy.load_arrays({k: scale * v for k, v in arrays.items()} if scale != 1 else arrays)
    if normalize:
        policy.set_normalizer("observation", np.array([3.0, -1.0, 0.1]), np.array([4.0, 0.1, 9.0]))
    return policy


def config(kind):
    overrides = {"algo": "ppo", "env": "CartPole-v1", "seed": 7, "policy.hidden_sizes": (16, 16)}
    overrides["policy.normalize_observations"] = kind == "normalized_box"
    return resolve_config(tuned=False, overrides=overrides).to_dict()


def write(policy, folder, kind="discrete", **values):
    from msrl_accel.export.write import write_bundle

    Path(folder).mkdir()
    write_bundle(policy, Path(folder), version=VERSION, config=config(kind), **values)


@functools.cache
def shared_bundle(kind="discrete"):
    """Folder of a bundle that tests read and copy; made once a session."""
    folder = Path(tempfile.mkdtemp(dir=_scratch().name)) / kind
    write(make_policy(kind), folder, kind)
    return folder


@functools.cache
def _scratch():
    return tempfile.TemporaryDirectory()


def edit_manifest(folder, edit):
    file = Path(folder) / "manifest.json"
    manifest = json.loads(file.read_text())
    edit(manifest)
    file.write_text(json.dumps(manifest))


def random_inputs(spec, batch, seed=0):
    rng = np.random.default_rng(seed)
    observations = tuple(
        rng.integers(0, 256, (batch, *o.shape)).astype(np.uint8)
        if o.dtype == "uint8"
        else rng.normal(0, 2, (batch, *o.shape)).astype(np.float32)
        for o in spec.observations
    )
    return observations, spec.draw_noise(rng, (batch,))


def outputs(result):
    return [result.action, result.log_prob, result.value, result.raw_action, *result.parameters]
