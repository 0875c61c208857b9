"""What is known of a policy that is to be checked, whatever it was given as."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from msrl_accel.consistency.layers import onnx_weights
from msrl_accel.consistency.reference import NumpyPolicy
from msrl_accel.errors import ConfigError, MsrlError
from msrl_accel.export.bundle import Bundle
from msrl_accel.spaces import PolicySpec

if TYPE_CHECKING:
    from msrl_accel.config import TrainConfig
    from msrl_accel.policy import Policy
    from msrl_accel.run import Run

BundleLike = Union[Bundle, str, Path]


@dataclass
class Subject:
    """A policy, by what is there of it: a bundle, a run, the training graph."""

    name: str
    spec: PolicySpec
    arrays: Mapping[str, np.ndarray]
    """Weights and statistics; empty where they cannot be read here."""
    activation: str
    observation_clip: float
    origin: str
    """Where the training graph is from, for the report."""
    bundle: Bundle | None = None
    run: Run | None = None
    policy: Policy | None = None
    """The training graph; None where MindSpore is not here."""

    @classmethod
    def of(
        cls,
        source: BundleLike | None = None,
        run: Run | str | Path | None = None,
        policy: Policy | None = None,
    ) -> Subject:
        """Gather it; the training graph is `policy`, that of `run`, or that of the bundle.

        Raises:
            ConfigError: none of the three is given, or `run` is no run.
            BundleError, CheckpointError: it is damaged, or the run lacks the bundle's checkpoint.
        """
        bundle = Bundle.open(source) if isinstance(source, (str, Path)) else source
        opened = None if run is None else _open_run(run)
        origin = "given"
        if policy is None and opened is not None:
            origin = f"of {opened.path}"
            policy = _run_policy(opened, bundle)
        elif policy is None and bundle is not None and _mindspore_is_here():
            origin = "with the bundle's weights"
            policy = _bundle_policy(bundle)
        name = str(bundle.path if bundle else opened.path if opened else "policy")
        if policy is not None:
            activation = type(policy.torso.activation).__name__.lower()
            clip, arrays = policy.encoder.clip, policy.arrays()
            spec = policy.spec
        elif bundle is not None:
            options = bundle.manifest["config"]["policy"]
            activation, clip = options["activation"], options["observation_clip"]
            spec, arrays = bundle.spec, _onnx_arrays(bundle)
        else:
            raise ConfigError("nothing to check: give a bundle, a run or a policy")
        return cls(name, spec, arrays, activation, clip, origin, bundle, opened, policy)

    @cached_property
    def config(self) -> TrainConfig | None:
        """Of the run, which names the environment; None where only a policy was given."""
        if self.run is not None:
            return self.run.config
        if self.bundle is None:
            return None
        from msrl_accel.config import resolve_config

        return resolve_config(tuned=False, overrides=self.bundle.manifest["config"])

    def numpy_policy(self) -> NumpyPolicy:
        """The same network in NumPy."""
        return NumpyPolicy(
            self.spec,
            self.arrays,
            activation=self.activation,
            observation_clip=self.observation_clip,
        )


def _open_run(run: Run | str | Path) -> Run:
    from msrl_accel.run import Run, load_run

    return run if isinstance(run, Run) else load_run(run)


def _run_policy(run: Run, bundle: Bundle | None) -> Policy:
    """The policy of the checkpoint that the bundle is from, or of the last one."""
    which = "last" if bundle is None else bundle.version
    with_critic = bundle is not None and bundle.spec.has_value
    runtime: Any = run.load_policy(which, with_critic=with_critic).runtime
    policy: Policy = runtime.policy
    return policy


def _bundle_policy(bundle: Bundle) -> Policy:
    from msrl_accel.config import RuntimeConfig
    from msrl_accel.device import set_up
    from msrl_accel.export.mindir import policy_of

    set_up(RuntimeConfig())
    return policy_of(bundle)


def _mindspore_is_here() -> bool:
    from msrl_accel.runtime.load import available_backends

    return available_backends()["graph"][0]


def _onnx_arrays(bundle: Bundle) -> dict[str, np.ndarray]:
    file = bundle.file("onnx")
    try:
        return {} if file is None else onnx_weights(file)
    except MsrlError:  # the package onnx is missing: checks that need weights say so
        return {}
