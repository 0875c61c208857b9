"""An OM file on an Ascend device as a runtime: by ais_bench, or by pyACL where that is missing.

Written against the documented interfaces of both. Not yet run on a device: check a bundle there
with ``msrl-check BUNDLE --backends om`` before it is relied on.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from msrl_accel.errors import PolicyError
from msrl_accel.runtime.acl_session import AclSession, load_engine
from msrl_accel.runtime.base import ActResult, check_inputs, pad_rows
from msrl_accel.spaces import Observations, PolicySpec

INSTALL = (
    "source set_env.sh of CANN (it brings pyACL), or install the wheels aclruntime and ais_bench "
    "of the MindStudio inference tools"
)
AIS_BENCH, PYACL = "ais_bench", "acl"
_FIRST_WITHOUT_ROWS = 5
"""Index of log_std after action, log_prob, value, raw_action and mean."""


class Session(Protocol):
    """A loaded OM file."""

    batches: tuple[int, ...]
    """Batch sizes that it was compiled for, ascending."""

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """C-contiguous inputs of a size in `batches` -> outputs, which the caller owns."""

    def close(self) -> None: ...


class OmRuntime:
    """Runs an OM file of `msrl_accel.export.om` on an Ascend device.

    A batch is padded to the next size that the file was compiled for; a larger one than all is run
    in pieces.

    Args:
        model: the file.
        spec: the policy's tensors.
        version: of the weights in the file.
        device: index among the devices that this process sees (ASCEND_RT_VISIBLE_DEVICES).
        batches: the sizes that the file was compiled for; None asks the file, or with ais_bench,
            which cannot, the bundle's manifest.

    Raises:
        PolicyError: neither engine is here (the message says what to install), or it refuses the
            model or the device.
    """

    def __init__(
        self,
        model: Path,
        spec: PolicySpec,
        version: int = 0,
        *,
        device: int = 0,
        batches: Sequence[int] | None = None,
    ) -> None:
        if not Path(model).is_file():
            raise PolicyError(f"cannot read the model {model}: there is no such file")
        self.spec = spec
        self.version = version
        self.engine = _engine()
        make = AisBenchSession if self.engine == AIS_BENCH else AclSession
        self._session: Session | None = make(Path(model), device, batches)

    def load_weights(self, version: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Not possible: ATC compiles the weights in.

        Raises:
            PolicyError: always.
        """
        raise PolicyError("the weights of an OM file are fixed: export and build another")

    def act(self, observations: Observations, noise: np.ndarray) -> ActResult:
        inputs = (
            *check_inputs(self.spec, observations, noise),
            np.ascontiguousarray(noise, np.float32),
        )
        session = self._session
        if session is None:
            raise PolicyError("this runtime is closed: open another with load_policy")
        rows, largest = len(noise), session.batches[-1]
        if rows == 0:
            raise PolicyError("the batch is empty; give at least one observation")
        parts = [
            _run_padded(session, [x[start : start + largest] for x in inputs])
            for start in range(0, rows, largest)
        ]
        outputs = [_join(i, pieces) for i, pieces in enumerate(zip(*parts))]
        return ActResult.of(self.spec, outputs)

    def close(self) -> None:
        """Unload the model and release the device."""
        if self._session is not None:
            self._session.close()
            self._session = None


class AisBenchSession:
    """`ais_bench.infer.interface.InferSession`."""

    def __init__(self, model: Path, device: int, batches: Sequence[int] | None) -> None:
        interface = load_engine("ais_bench.infer.interface")
        self.batches = tuple(sorted(batches or _manifest_batches(model)))
        self._mode = "dymbatch" if len(self.batches) > 1 else "static"
        try:
            self._session: Any = interface.InferSession(device, str(model))
        except Exception as error:  # aclruntime raises RuntimeError and types of its own
            raise PolicyError(f"ais_bench refuses {model} on device {device}: {error}") from error

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        try:
            outputs = self._session.infer(list(inputs), mode=self._mode)
        except Exception as error:  # aclruntime raises RuntimeError and types of its own
            raise PolicyError(f"ais_bench failed: {error}") from error
        return [np.array(o) for o in outputs]

    def close(self) -> None:
        # Older releases have no free_resource: their sessions end with the object.
        getattr(self._session, "free_resource", lambda: None)()
        self._session = None


def available() -> tuple[bool, str]:
    """Whether an engine for OM files is here, and which, or what adds one."""
    try:
        return True, f"OM by {_engine()}"
    except PolicyError as error:
        return False, str(error)


def _engine() -> str:
    """ais_bench where it can be imported, otherwise pyACL."""
    for name in (AIS_BENCH, PYACL):
        if importlib.util.find_spec(name) is not None:
            return name
    raise PolicyError(f"neither ais_bench nor pyACL is here to run an OM file: {INSTALL}")


def _manifest_batches(model: Path) -> list[int]:
    manifest = model.with_name("manifest.json")
    try:
        batches = json.loads(manifest.read_bytes())["om"]["batches"]
        if batches and all(type(b) is int and b > 0 for b in batches):
            return list(batches)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise PolicyError(
        f"the batch sizes of {model} are unknown ({manifest} does not tell): give batches=[...] "
        "as they were given to atc"
    )


def _run_padded(session: Session, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Outputs for the rows that were given; those without a row for each are as they are."""
    rows = len(inputs[0])
    batch = next(b for b in session.batches if b >= rows)
    outputs = session.run([pad_rows(x, batch) for x in inputs])
    return [o[:rows] if _has_rows(i, o) else o for i, o in enumerate(outputs)]


def _join(index: int, pieces: Sequence[np.ndarray]) -> np.ndarray:
    """The pieces of a batch in one array; an output without rows is the same in each."""
    if len(pieces) == 1 or not _has_rows(index, pieces[0]):
        return pieces[0]
    return np.concatenate(pieces)


def _has_rows(index: int, output: np.ndarray) -> bool:
    """Whether an output has a row for each observation: all but a state-independent log_std."""
    return index < _FIRST_WITHOUT_ROWS or output.ndim > 1
