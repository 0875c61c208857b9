"""ONNX Runtime as a runtime; needs neither MindSpore nor Gymnasium."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from msrl_accel.errors import MsrlError, PolicyError
from msrl_accel.export.names import input_names
from msrl_accel.runtime.base import ActResult, check_inputs
from msrl_accel.runtime.model_weights import ONNX, only_output, replace_weights
from msrl_accel.runtime.model_weights import weights_as_inputs as as_inputs
from msrl_accel.spaces import Observations, PolicySpec

Run = Callable[[list[str], dict[str, np.ndarray]], list[np.ndarray]]

INSTALL = "pip install 'msrl_accel[onnx]'"


class OnnxRuntime:
    """Runs an ONNX file of `export_onnx` on the CPU.

    Args:
        model: the file, or its content.
        spec: the policy's tensors.
        version: of the weights in the file.
        threads: of an operator; 1 is fastest for small networks.
        weights_as_inputs: whether weights are given with each call. New ones then cost nothing,
            where they otherwise cost milliseconds, and each call some microseconds more.

    Raises:
        PolicyError: onnxruntime is missing, or refuses the model; the message has its own words.
    """

    def __init__(
        self,
        model: Path | bytes,
        spec: PolicySpec,
        version: int = 0,
        *,
        threads: int = 1,
        weights_as_inputs: bool = False,
    ) -> None:
        self.spec = spec
        self.version = version
        self._threads = threads
        self._names = input_names(spec)
        self.model = model if isinstance(model, bytes) else _read(model)
        self._shapes: dict[str, tuple[int, ...]] | None = None
        self._weights: dict[str, np.ndarray] = {}  # given with each call
        if weights_as_inputs:
            self.model, self._shapes = as_inputs(self.model)
        self._run: Run
        self._run_action: Run | None
        self._start(self.model)

    def load_weights(self, version: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Rebuild the session with other weights, or give these with each call from now on.

        Args:
            version: of these weights.
            arrays: by name as `Policy.arrays` gives them.

        Raises:
            PolicyError: a weight is missing or of another size; the old ones then stay.
        """
        if self._shapes is not None:
            self._weights = _checked_weights(self._shapes, arrays)
            self.version = version
            return
        model = replace_weights(self.model, arrays, ONNX)
        self._start(model)
        self.model, self.version = model, version

    def act(self, observations: Observations, noise: np.ndarray) -> ActResult:
        outputs = self._call(self._run, self._outputs, observations, noise)
        return ActResult.of(self.spec, outputs)

    def action(self, observations: Observations, noise: np.ndarray) -> np.ndarray:
        """`act(...).action` alone, without computing the other outputs: half the time."""
        if self._shapes is not None:
            return self.act(observations, noise).action
        if self._run_action is None:
            self._run_action = self._session_of(only_output(self.model, "action")).run
        action: np.ndarray = self._call(self._run_action, ["action"], observations, noise)[0]
        return action

    def close(self) -> None:
        """Release the sessions."""
        self._run = self._run_action = _closed

    def _call(
        self, run: Run, outputs: list[str], observations: Observations, noise: np.ndarray
    ) -> list[np.ndarray]:
        feed = dict(self._weights)
        feed.update(zip(self._names, check_inputs(self.spec, observations, noise)))
        feed["noise"] = np.ascontiguousarray(noise, np.float32)
        try:
            return run(outputs, feed)
        except MsrlError:
            raise
        except Exception as error:  # onnxruntime's own exceptions have no common base
            raise PolicyError(f"onnxruntime failed: {_words(error)}") from error

    def _start(self, model: bytes) -> None:
        session = self._session_of(model)
        self._outputs = [output.name for output in session.get_outputs()]
        self._run, self._run_action = session.run, None

    def _session_of(self, model: bytes) -> Any:
        ort = _import_onnxruntime()
        options = ort.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        # Threads that wait for the next call would take the time of the environments.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        try:
            session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's own exceptions have no common base
            raise PolicyError(f"onnxruntime refuses the model: {_words(error)}") from error
        self._check_model(session)
        return session

    def _check_model(self, session: Any) -> None:
        spec = self.spec
        types = {"tensor(float)": "float32", "tensor(uint8)": "uint8"}
        found = {
            i.name: (tuple(i.shape[1:]), types.get(i.type, i.type)) for i in session.get_inputs()
        }
        expected = {name: (o.shape, o.dtype) for name, o in zip(self._names, spec.observations)}
        expected["noise"] = ((spec.action.noise_size,), "float32")
        if found != expected:
            raise PolicyError(
                f"the model takes {found}, this policy gives {expected}: "
                "the file is of another policy"
            )


def _read(model: Path) -> bytes:
    try:
        return Path(model).read_bytes()
    except OSError as error:
        raise PolicyError(f"cannot read the model {model}: {error.strerror}") from error


def _checked_weights(
    shapes: Mapping[str, tuple[int, ...]], arrays: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The arrays as a model takes them; PolicyError where one is missing or of another size."""
    weights = {}
    for name, shape in shapes.items():
        if name not in arrays:
            raise PolicyError(f"weight {name!r} is missing; the weights are of another policy")
        array = np.ascontiguousarray(arrays[name], np.float32)
        if array.size != math.prod(shape):
            raise PolicyError(
                f"weight {name!r} has {array.size} numbers, this policy needs {math.prod(shape)}"
            )
        weights[ONNX.prefix + name] = array.reshape(shape)
    return weights


def available() -> tuple[bool, str]:
    """Whether onnxruntime is here, and its version or the command that adds it."""
    try:
        return True, f"onnxruntime {_import_onnxruntime().__version__}"
    except PolicyError as error:
        return False, str(error)


def _import_onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise PolicyError(f"onnxruntime is not installed: {INSTALL}") from error
    return onnxruntime


def _words(error: Exception) -> str:
    """The engine's message without its prefix, in one line."""
    return re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", " ".join(str(error).split()))


def _closed(*_: Any) -> Any:
    raise PolicyError("this runtime is closed: open another with load_policy")
