"""Names of the tensors of exported graphs."""

from __future__ import annotations

from msrl_accel.spaces import PolicySpec

NOISE = "noise"
OBSERVATION_PREFIX = "observation."
"""Before the name of an observation that could be taken for another tensor."""
WEIGHT_PREFIX = "weights/"
BATCH = "batch"
FIXED_OUTPUTS = ("action", "log_prob", "value", "raw_action")
"""Outputs of policies (some have no value); the parameters of the distribution follow."""


def input_names(spec: PolicySpec) -> tuple[str, ...]:
    """Names of the inputs in graph order: the observations, then the noise."""
    taken = {NOISE, *FIXED_OUTPUTS, *spec.action.parameter_names}
    observations = (
        OBSERVATION_PREFIX + o.name if o.name in taken else o.name for o in spec.observations
    )
    return (*observations, NOISE)
