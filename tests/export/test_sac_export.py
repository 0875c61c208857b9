"""Exported SAC policies: every form passes the gate and acts within the bounds."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces
from policy_helpers import decided_arrays

from msrl_accel.algorithms.sac import SAC
from msrl_accel.config import resolve_config
from msrl_accel.export.bundle import Bundle
from msrl_accel.export.write import write_bundle
from msrl_accel.runtime import lite
from msrl_accel.runtime.load import open_runtime
from msrl_accel.spaces import PolicySpec

pytestmark = pytest.mark.usefixtures("graph_mode")

VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float64)
CAMERA = spaces.Box(0, 255, (12, 12, 3), np.uint8)
PER_DIMENSION = spaces.Box(np.array([-1.0, 0.0]), np.array([3.0, 0.5]), dtype=np.float64)

CASES = {
    "per dimension, float64": (VECTOR, PER_DIMENSION, {}),
    "from 0 to 1": (VECTOR, spaces.Box(0.0, 1.0, (3,), np.float32), {"policy.activation": "tanh"}),
    "normalised": (VECTOR, PER_DIMENSION, {"policy.normalize_observations": True}),
    "image and vector": (
        spaces.Dict({"camera": CAMERA, "speed": VECTOR}),
        spaces.Box(-0.1, 0.7, (2, 2), np.float32),
        {},
    ),
}


def sac_bundle(folder, case, with_critic=False):
    """A bundle of a policy with decided actions."""
    observation, action, values = CASES[case]
    overrides = {"policy.hidden_sizes": (16, 16), **values}
    config = resolve_config("sac", "Test-v0", tuned=False, seed=4, **overrides)
    sac = SAC(config, PolicySpec.from_spaces(observation, action))
    sac.policy.load_arrays(decided_arrays(sac.policy, np.random.default_rng(1), 0.5))
    policy = SAC.with_critic(config, sac.policy, sac.state()) if with_critic else sac.policy
    folder.mkdir()
    write_bundle(policy, folder, version=1, config=config.to_dict())
    return Bundle.open(folder)


@pytest.mark.parametrize("case", CASES)
def test_every_form_passes_the_gate_and_acts_within_the_bounds(tmp_path, case):
    bundle = sac_bundle(tmp_path / "bundle", case)
    forms = ["mindir", "onnx"] + (["lite", "ms"] if lite.available()[0] else [])
    results = bundle.manifest["parity"]["results"]
    assert bundle.passed and all(results[form]["passed"] for form in forms)
    _, space, _ = CASES[case]
    rng = np.random.default_rng(0)
    observations = tuple(
        rng.integers(0, 256, (64, *o.shape)).astype(np.uint8)
        if o.dtype == "uint8"
        else rng.normal(0, 100, (64, *o.shape)).astype(np.float32)
        for o in bundle.spec.observations
    )
    noise = 10 * bundle.spec.draw_noise(rng, (64,))
    for form in forms:
        runtime = open_runtime(bundle, form)
        acted = runtime.act(observations, noise)
        runtime.close()
        assert acted.value is None
        assert all(space.contains(a) for a in bundle.spec.to_environment(acted.action))
        assert np.isfinite(acted.log_prob).all()


def test_the_critic_is_exported_where_it_is_asked_for(tmp_path):
    bundle = sac_bundle(tmp_path / "bundle", "normalised", with_critic=True)
    assert bundle.passed and "value" in bundle.output_names
    observations = (np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32),)
    noise = bundle.spec.zero_noise((5,))
    values = [
        open_runtime(bundle, form).act(observations, noise).value for form in ("graph", "onnx")
    ]
    np.testing.assert_allclose(*values, atol=1e-5)
