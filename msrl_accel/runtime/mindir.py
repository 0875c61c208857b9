"""A MindIR file as a runtime, run by MindSpore itself."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np

from msrl_accel.errors import PolicyError
from msrl_accel.networks import set_parameter
from msrl_accel.runtime.base import ActResult, check_inputs
from msrl_accel.spaces import Observations, PolicySpec


class MindirRuntime:
    """Runs a MindIR file of `export_mindir`; bit-equal with the training graph.

    Each batch size compiles once (about 0.2 s).

    Args:
        model: the file.
        spec: the policy's tensors.
        version: of the weights in the file.

    Raises:
        PolicyError: MindSpore refuses the model.
    """

    def __init__(self, model: Path, spec: PolicySpec, version: int = 0) -> None:
        ms.set_context(mode=ms.GRAPH_MODE)
        self.spec = spec
        self.version = version
        self._cell = load_cell(Path(model))
        self._parameters = {p.name: p for p in self._cell.get_parameters()}

    def load_weights(self, version: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Set the weights, by name as `Policy.arrays` gives them; nothing is compiled anew.

        Raises:
            PolicyError: a weight is missing or has another shape; none is then changed.
        """
        for name, parameter in self._parameters.items():
            if name not in arrays or arrays[name].shape != tuple(parameter.shape):
                found = arrays[name].shape if name in arrays else "missing"
                raise PolicyError(
                    f"weight {name!r} is {found}, this policy needs {tuple(parameter.shape)}"
                )
        for name, parameter in self._parameters.items():
            set_parameter(parameter, arrays[name])
        self.version = version

    def act(self, observations: Observations, noise: np.ndarray) -> ActResult:
        inputs = (
            *check_inputs(self.spec, observations, noise),
            np.ascontiguousarray(noise, np.float32),
        )
        try:
            # from_numpy shares memory: safe, since reading the outputs waits for the graph.
            outputs = self._cell(*[ms.Tensor.from_numpy(x) for x in inputs])
        except (RuntimeError, ValueError, TypeError) as error:
            raise PolicyError(f"MindSpore failed: {_first_line(error)}") from error
        return ActResult.of(self.spec, [np.array(o.asnumpy()) for o in outputs])

    def close(self) -> None:
        """Nothing to release."""


def load_cell(model: Path) -> Any:
    """The graph of a MindIR file as a Cell.

    Raises:
        PolicyError: it cannot be read, or MindSpore refuses it.
    """
    try:
        data = model.read_bytes()
    except OSError as error:
        raise PolicyError(f"cannot read the model {model}: {error.strerror}") from error
    with tempfile.TemporaryDirectory() as scratch:  # MindSpore refuses paths with spaces
        copy = os.path.join(scratch, "policy.mindir")
        Path(copy).write_bytes(data)
        try:
            return ms.nn.GraphCell(ms.load(copy))
        except (RuntimeError, ValueError, TypeError) as error:
            raise PolicyError(
                f"MindSpore refuses the model {model}: {_first_line(error)}"
            ) from error


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))
