"""What is known of a policy that is to be checked, whatever it was given as."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Union

import numpy as np

from msrl_accel.config import TrainConfig, resolve_config
from msrl_accel.consistency.layers import onnx_weights
from msrl_accel.consistency.reference import NumpyPolicy
from msrl_accel.errors import ConfigError, MsrlError
from msrl_accel.export.bundle import Bundle
from msrl_accel.spaces import PolicySpec

if TYPE_CHECKING:
    from msrl_accel.policy import Policy
    from msrl_accel.run import Run

BundleLike = Union[Bundle, str, Path]


@dataclass
class Subject:
    """What is known of the policy."""

    name: str
    spec: PolicySpec
    arrays: Mapping[str, np.ndarray]
    activation: str
    observation_clip: float
    config: TrainConfig | None = None
    bundle: Bundle | None = None
    policy: Policy | None = None

    @classmethod
    def of(
        cls, source: BundleLike | None, run: Run | str | Path | None, policy: Policy | None
    ) -> Subject:
        bundle = Bundle.open(source) if isinstance(source, (str, Path)) else source
        config = None
        if bundle is not None:
            config = resolve_config(tuned=False, overrides=bundle.manifest["config"])
        if run is not None:
            run = _open_run(run)
            config = run.config
            if policy is None:
                which = "last" if bundle is None else bundle.version
                policy = run.load_policy(which).runtime.policy  # type: ignore[attr-defined]
        name = str(bundle.path if bundle is not None else run.path if run is not None else "policy")
        if policy is not None:
            activation = str(policy.torso.activation.name).lower()
            clip, spec, arrays = policy.encoder.clip, policy.spec, policy.arrays()
            return cls(name, spec, arrays, activation, clip, config, bundle, policy)
        if bundle is None or config is None:
            raise ConfigError("nothing to check: give a bundle, a run or a policy")
        options = config.policy
        arrays = bundle_arrays(bundle)
        return cls(
            name, bundle.spec, arrays, options.activation, options.observation_clip, config, bundle
        )

    def numpy_policy(self) -> NumpyPolicy:
        return NumpyPolicy(
            self.spec,
            self.arrays,
            activation=self.activation,
            observation_clip=self.observation_clip,
        )


def _open_run(run: Run | str | Path) -> Run:
    from msrl_accel.run import Run, load_run

    return run if isinstance(run, Run) else load_run(run)


def bundle_arrays(bundle: Bundle) -> dict[str, np.ndarray]:
    """Weights of a bundle with their shapes; empty where no file can be read here."""
    file = bundle.file("onnx")
    try:
        return {} if file is None else onnx_weights(file)
    except MsrlError:  # the package onnx is missing: checks that need weights say so
        return {}
