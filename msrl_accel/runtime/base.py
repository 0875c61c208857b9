"""What every engine that runs a policy offers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from msrl_accel.errors import PolicyError
from msrl_accel.spaces import Observations, PolicySpec


@dataclass
class ActResult:
    """Outputs of one call, [B, ...], copies that later calls do not touch."""

    action: np.ndarray
    """In environment units; `PolicySpec.to_environment` gives it the environment's dtype."""
    log_prob: np.ndarray
    value: np.ndarray | None
    """None where the policy has none: `PolicySpec.has_value`."""
    raw_action: np.ndarray
    parameters: tuple[np.ndarray, ...]
    """Of the action distribution: logits, or mean and log_std."""

    @classmethod
    def of(cls, spec: PolicySpec, outputs: Sequence[np.ndarray]) -> ActResult:
        """The outputs of a graph, which are in the order of `spec.output_names`.

        Raises:
            PolicyError: there are more or fewer.
        """
        names = spec.output_names
        if len(outputs) != len(names):
            raise PolicyError(
                f"the model returns {len(outputs)} tensors, this policy has {len(names)} "
                f"({', '.join(names)}): the file is of another policy"
            )
        if not spec.has_value:
            return cls(outputs[0], outputs[1], None, outputs[2], tuple(outputs[3:]))
        return cls(outputs[0], outputs[1], outputs[2], outputs[3], tuple(outputs[4:]))

    def outputs(self) -> list[np.ndarray]:
        """All in graph order."""
        value = [] if self.value is None else [self.value]
        return [self.action, self.log_prob, *value, self.raw_action, *self.parameters]


class PolicyRuntime(Protocol):
    """A policy that acts."""

    spec: PolicySpec
    version: int
    """Of the weights in use."""

    def load_weights(self, version: int, arrays: Mapping[str, np.ndarray]) -> None: ...

    def act(self, observations: Observations, noise: np.ndarray) -> ActResult:
        """Act on a batch.

        Args:
            observations: [B, ...] each, in the order of `spec`.
            noise: [B, noise_size]; zeros for the deterministic policy.

        Raises:
            PolicyError: a tensor does not fit the specification.
        """

    def close(self) -> None: ...


def check_inputs(
    spec: PolicySpec, observations: Observations, noise: np.ndarray | None = None
) -> Observations:
    """Check count, shapes, dtypes and finiteness; the observations cast and C-contiguous.

    Raises:
        PolicyError: one does not fit; the message names it.
    """
    if len(observations) != len(spec.observations):
        raise PolicyError(
            f"got {len(observations)} observation tensors, this policy takes "
            f"{len(spec.observations)}: {[o.name for o in spec.observations]}"
        )
    batch = len(observations[0])
    checked = []
    for x, o in zip(observations, spec.observations):
        if x.shape != (batch, *o.shape):
            raise PolicyError(
                f"observation {o.name!r} has shape {x.shape}, this policy takes {('B', *o.shape)}"
            )
        if o.dtype == "uint8":
            if x.dtype != np.uint8:
                raise PolicyError(
                    f"observation {o.name!r} has dtype {x.dtype}, this policy takes uint8 images"
                )
        elif x.dtype.kind not in "fiub":
            raise PolicyError(
                f"observation {o.name!r} has dtype {x.dtype}, this policy takes real numbers"
            )
        tensor = np.ascontiguousarray(x, o.dtype)
        if o.dtype == "float32" and not _all_finite(tensor):
            raise PolicyError(f"observation {o.name!r} holds a number that is not finite")
        checked.append(tensor)
    if noise is not None and noise.shape != (batch, spec.action.noise_size):
        raise PolicyError(
            f"noise has shape {noise.shape}, expected {(batch, spec.action.noise_size)}"
        )
    return tuple(checked)


def _all_finite(x: np.ndarray) -> bool:
    # The sum of squares takes a fraction of the time; it may overflow for finite numbers.
    return math.isfinite(np.vdot(x, x)) or bool(np.isfinite(x).all())


def pad_rows(rows: np.ndarray, n: int) -> np.ndarray:
    """Repeat the last row up to n rows, so that a graph compiled for n rows serves fewer."""
    if len(rows) >= n:
        return rows
    return np.concatenate([rows, np.repeat(rows[-1:], n - len(rows), axis=0)])
