"""MindSpore Lite as a runtime, and its set-up: `python -m msrl_accel.runtime.lite setup`."""

from __future__ import annotations

import argparse
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from msrl_accel.errors import MsrlError, PolicyError
from msrl_accel.runtime.base import ActResult, check_inputs
from msrl_accel.runtime.lite_engine import Engine, TensorType, is_ms, open_engine
from msrl_accel.runtime.lite_setup import LiteError, available, installed_version, setup
from msrl_accel.runtime.lite_worker import ChildEngine
from msrl_accel.runtime.model_weights import first_output, replace_weights
from msrl_accel.spaces import Observations, PolicySpec

__all__ = ["LiteError", "LiteRuntime", "available", "mindir_level", "setup"]


def mindir_level(writer: str) -> int | None:
    """MindIR version to write for the installed Lite: 1, or None where it reads the file as it is.

    Args:
        writer: version of the MindSpore that wrote the file. A Lite of the same release or newer
            reads it; older ones are given version 1, which all read.
    """
    return None if _release(installed_version()) >= _release(writer) else 1


class LiteRuntime:
    """Runs a MindIR or .ms model file on MindSpore Lite, on the CPU.

    The engine is in this process, or in a child process where MindSpore is loaded too: they cannot
    share one. A batch of another size than the last costs a resize (under a millisecond).

    Args:
        model: a file that `write_lite_mindir` (MindIR) or `convert_to_ms` (.ms) wrote.
        spec: the policy's tensors.
        version: of the weights in the file.
        threads: of the engine; 1 is fastest for small networks.
        isolate: True for a child process, False for this process, None to choose.

    Raises:
        LiteError: Lite is missing (the message says how to add it) or refuses the model.
        PolicyError: the model is of another policy.
    """

    def __init__(
        self,
        model: Path,
        spec: PolicySpec,
        version: int = 0,
        *,
        threads: int = 1,
        isolate: bool | None = None,
    ) -> None:
        installed_version()
        self.spec = spec
        self.version = version
        self.isolated = _mindspore_is_loaded() if isolate is None else isolate
        if not self.isolated and _mindspore_is_loaded():
            raise LiteError("MindSpore is loaded in this process, which Lite cannot share")
        try:
            self._model = Path(model).read_bytes()
        except OSError as error:
            raise LiteError(f"cannot read the model {model}: {error.strerror}") from error
        self._threads = threads
        self._lock = threading.RLock()
        make_engine = ChildEngine if self.isolated else open_engine
        engine: Engine = make_engine(self._model, threads)
        self._engine: Engine | None = engine
        self._action_engine: Engine | None = None
        self._check_signature(engine.inputs)

    def load_weights(self, version: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Rebuild the model with other weights, in about 0.1 s; on an error the old ones stay.

        Raises:
            PolicyError: the weights are of another policy, or the model is a .ms file.
        """
        if is_ms(self._model):
            raise PolicyError("the weights of a .ms file are fixed: export another")
        model = replace_weights(self._model, arrays)
        with self._lock:
            self._open_engine().load(model)
            self._close_action_engine()
            self._model, self.version = model, version

    def act(self, observations: Observations, noise: np.ndarray) -> ActResult:
        inputs = self._inputs(observations, noise)
        with self._lock:
            outputs = self._open_engine().run(inputs)
        return ActResult.of(self.spec, outputs)

    def action(self, observations: Observations, noise: np.ndarray) -> np.ndarray:
        """`act(...).action` alone, without computing the other outputs: two thirds of the time.

        In a child process everything is computed: the way there takes longer than the rest. So it
        is for a .ms file, whose outputs are fixed.
        """
        if self.isolated or is_ms(self._model):
            return self.act(observations, noise).action
        inputs = self._inputs(observations, noise)
        with self._lock:
            if self._action_engine is None:
                self._open_engine()
                self._action_engine = open_engine(first_output(self._model), self._threads)
                self._check_signature(self._action_engine.inputs)
            return self._action_engine.run(inputs)[0]

    def close(self) -> None:
        with self._lock:
            self._close_action_engine()
            if self._engine is not None:
                self._engine.close()
                self._engine = None

    def _inputs(self, observations: Observations, noise: np.ndarray) -> Observations:
        """What the engine takes: the observations, then the noise."""
        if len(noise) == 0:
            raise PolicyError("the batch is empty; give at least one observation")
        checked = check_inputs(self.spec, observations, noise)
        return (*checked, np.ascontiguousarray(noise, np.float32))

    def _close_action_engine(self) -> None:
        if self._action_engine is not None:
            self._action_engine.close()
            self._action_engine = None

    def _open_engine(self) -> Engine:
        if self._engine is None:
            raise LiteError("this runtime is closed")
        return self._engine

    def _check_signature(self, inputs: Sequence[TensorType]) -> None:
        expected = [(o.shape, np.dtype(o.dtype)) for o in self.spec.observations]
        expected.append(((self.spec.action.noise_size,), np.dtype(np.float32)))
        if list(inputs) != expected:
            self.close()
            raise PolicyError(
                f"the model takes {list(inputs)}, this policy gives {expected}; "
                "the file is of another policy"
            )


def _mindspore_is_loaded() -> bool:
    return sys.modules.get("mindspore") is not None


def _release(version: str) -> tuple[int, ...]:
    """Major and minor number; (2, 0) where they are unknown."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match.group(1)), int(match.group(2))) if match else (2, 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: `setup` and `status`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m msrl_accel.runtime.lite", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("status", help="say which MindSpore Lite is used")
    setup_parser = commands.add_parser("setup", help="set up the public MindSpore Lite 2.0.0")
    setup_parser.add_argument(
        "--wheel", type=Path, help="a copy of the wheel, instead of a download"
    )
    options = parser.parse_args(arguments)
    if options.command == "setup":
        try:
            setup(options.wheel)
        except MsrlError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    found, message = available()
    print(message)
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
