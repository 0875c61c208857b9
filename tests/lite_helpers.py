"""What the tests of MindSpore Lite share: exported policies and small graphs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces
from policy_helpers import ACTION_SPACES, VECTOR, options

from msrl_accel.export.lite import write_lite_mindir
from msrl_accel.runtime.lite import available
from msrl_accel.spaces import Observations, PolicySpec

needs_lite = pytest.mark.skipif(not available()[0], reason=available()[1])

IMAGE_AND_VECTOR = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (16, 16, 3), np.uint8),
        "speed": spaces.Box(-1.0, 1.0, (5,), np.float32),
    }
)
BYTES_AND_MATRIX = spaces.Dict(
    {
        "keys": spaces.Box(0, 255, (4, 4), np.uint8),
        "pose": spaces.Box(-1.0, 1.0, (2, 2), np.float64),
    }
)
NORMALIZED = {"normalize_observations": True}

# observation space, action space, policy options
POLICIES = {
    **{kind: (VECTOR, action, NORMALIZED) for kind, action in ACTION_SPACES.items()},
    "discrete_from_zero": (VECTOR, spaces.Discrete(3), {"activation": "relu"}),
    "multi_discrete_from_zero": (VECTOR, spaces.MultiDiscrete([2, 3]), {"hidden_sizes": (64, 64)}),
    "shared_torso": (VECTOR, ACTION_SPACES["box"], {"torso_sharing": "shared"}),
    "image_and_vector": (IMAGE_AND_VECTOR, spaces.Discrete(3), NORMALIZED),
    "bytes_and_matrix": (BYTES_AND_MATRIX, spaces.MultiBinary(3), NORMALIZED),
    "large_grayscale": (spaces.Box(0, 255, (40, 40), np.uint8), spaces.Discrete(2), {}),
    "channels_first": (spaces.Box(0, 255, (3, 12, 12), np.uint8), ACTION_SPACES["box"], {}),
}


@dataclass
class ExportedPolicy:
    """A policy, the Lite model of it, and what the training graph gives for 256 rows."""

    spec: PolicySpec
    model: Path
    policy: object
    observations: Observations
    noise: np.ndarray
    expected: list[np.ndarray]

    def rows(self, n: int) -> tuple[Observations, np.ndarray]:
        return tuple(x[:n] for x in self.observations), self.noise[:n]


def random_observations(
    spec: PolicySpec, rows: int, rng: np.random.Generator
) -> tuple[np.ndarray, ...]:
    return tuple(
        rng.integers(0, 256, (rows, *o.shape), np.uint8)
        if o.dtype == "uint8"
        else rng.normal(1.0, 2.0, (rows, *o.shape)).astype(np.float32)
        for o in spec.observations
    )


def export_policy(kind: str, folder: Path, seed: int = 0) -> ExportedPolicy:
    """Build, run and export one of POLICIES with weights as after some training."""
    import mindspore
    from mindspore import Tensor

    from msrl_accel.policy import Policy

    observation_space, action_space, values = POLICIES[kind]
    spec = PolicySpec.from_spaces(observation_space, action_space)
    policy = Policy(spec, options(**values), seed=seed)
    rng = np.random.default_rng(seed)
    policy.load_arrays(trained_arrays(policy, rng))
    observations = random_observations(spec, 256, rng)
    noise = spec.draw_noise(rng, (256,))
    outputs = policy(*[Tensor(x) for x in (*observations, noise)])
    sample = [Tensor(x[:1]) for x in (*observations, noise)]
    mindspore.export(policy, *sample, file_name=str(folder / kind), file_format="MINDIR")
    model = folder / f"{kind}.lite.mindir"
    write_lite_mindir(folder / f"{kind}.mindir", model, level=1)
    expected = [np.array(o.asnumpy()) for o in outputs]
    return ExportedPolicy(spec, model, policy, observations, noise, expected)


def trained_arrays(policy, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Weights with distinct logits, statistics other than 0 and 1, biases other than 0."""
    arrays = {}
    for name, array in policy.arrays().items():
        spread = 0.5 if name.startswith("actor") else 0.05
        moved = array + spread * rng.standard_normal(array.shape)
        arrays[name] = moved.astype(np.float32)
    return arrays
