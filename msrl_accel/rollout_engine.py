"""The engine that training rolls out with: the training graph, or one that deploys it."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from msrl_accel.errors import ConfigError, MsrlError
from msrl_accel.graph_cache import GraphCache
from msrl_accel.policy import Policy
from msrl_accel.runtime.base import ActResult, PolicyRuntime
from msrl_accel.runtime.batch_invariant import BatchInvariantRuntime
from msrl_accel.runtime.graph import GraphRuntime
from msrl_accel.runtime.model_weights import ONNX, replace_weights

logger = logging.getLogger("msrl_accel")

PARITY_TOLERANCE = 1e-5
"""Largest difference of a log-probability or value from the training graph's, per unit of size."""

CALLS_PER_REBUILD = 64
"""Calls of ONNX Runtime with constant weights that save about what it costs to change those."""


class RolloutEngine:
    """A runtime that follows a policy in training.

    Args:
        policy: the Cell that training updates.
        kind: 'graph' rolls out with that Cell. 'onnx' and 'lite' export it once and are handed the
            weights after each update; they must agree with it. 'auto' is 'onnx' where it is
            installed and agrees, else 'graph'.
        batch: rows of each call.
        batch_invariant: whether a row's result must not depend, to the last bit, on the batch.
        calls: of the engine between two publications, about.
        check: whether it is compared with the training graph at once, on random observations;
            otherwise `verify` must be told before training relies on it.
        cache: holds the exported file.

    Raises:
        ConfigError: the engine asked for is missing, or does not agree with the training graph.
    """

    def __init__(
        self,
        policy: Policy,
        kind: str,
        batch: int,
        batch_invariant: bool = False,
        calls: int = 1,
        *,
        check: bool = True,
        cache: GraphCache | None = None,
    ) -> None:
        self.policy = policy
        self.calls = calls
        self.wanted = kind
        self.batch_invariant = batch_invariant
        self.kind: str
        self.runtime: PolicyRuntime
        self.verified = True
        self._use_graph()
        if kind != "graph":
            self._use_exported("onnx" if kind == "auto" else kind, batch if check else None, cache)

    def _use_graph(self) -> None:
        self.kind, self.runtime = "graph", self._wrapped(GraphRuntime(self.policy))

    def _use_exported(self, name: str, batch: int | None, cache: GraphCache | None) -> None:
        """Take an engine if it is there, and, where `batch` is given, agrees on so many rows."""
        try:
            runtime = _EXPORTED[name](self.policy, self.calls, cache)
        except MsrlError as error:
            if self.wanted != "auto":
                raise ConfigError(f"runtime.rollout = {self.wanted!r}: {error}") from error
            logger.info("rolling out with the training graph: %s", error)
            return
        if batch is not None and not self._agrees(parity(self.runtime, runtime, batch)):
            runtime.close()
            return
        self.verified = batch is not None
        self.kind, self.runtime = name, self._wrapped(runtime)

    def _wrapped(self, runtime: PolicyRuntime) -> PolicyRuntime:
        return BatchInvariantRuntime(runtime) if self.batch_invariant else runtime

    def verify(self, difference: float) -> bool:
        """Say how far an engine that was not checked is from the training graph.

        Args:
            difference: the largest that was found, as of `relative_difference`.

        Returns:
            Whether the engine stays; the training graph has replaced it otherwise.

        Raises:
            ConfigError: it was asked for by name, and does not agree.
        """
        self.verified = True
        if self._agrees(difference):
            return True
        self.runtime.close()
        version = self.runtime.version
        self._use_graph()
        self.publish(version)
        return False

    def _agrees(self, difference: float) -> bool:
        if difference <= PARITY_TOLERANCE:
            return True
        message = (
            f"runtime.rollout = {self.wanted!r}: differs from the training graph by "
            f"{difference:.1e} (tolerance {PARITY_TOLERANCE:g})"
        )
        if self.wanted != "auto":
            raise ConfigError(f"{message}; use graph")
        logger.warning("%s; rolling out with the training graph", message)
        return False

    def publish(self, version: int) -> None:
        """Let the engine act with the policy's present weights and statistics."""
        if self.kind == "graph":  # it shares them
            self.runtime.version = version
        else:
            self.runtime.load_weights(version, self.policy.arrays())

    @property
    def model(self) -> bytes:
        """The ONNX model, with which other processes can roll out; empty for other engines."""
        runtime = self.runtime
        if isinstance(runtime, BatchInvariantRuntime):
            runtime = runtime.runtime
        return getattr(runtime, "model", b"")

    def close(self) -> None:
        self.runtime.close()


def parity(graph: PolicyRuntime, other: PolicyRuntime, batch: int) -> float:
    """Largest difference between two runtimes on random observations, relative above size 1."""
    rng = np.random.default_rng(0)
    observations = tuple(
        rng.integers(0, 256, (batch, *o.shape), np.uint8)
        if o.dtype == "uint8"
        else rng.standard_normal((batch, *o.shape), dtype=np.float32)
        for o in graph.spec.observations
    )
    noise = graph.spec.draw_noise(rng, (batch,))
    ours, theirs = (_floats(r.act(observations, noise)) for r in (graph, other))
    return max(relative_difference(a, b) for a, b in zip(ours, theirs))


def relative_difference(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference, relative to `a` where that is above 1; infinite where it is no number."""
    difference = float(np.max(np.abs(a - b) / np.maximum(np.abs(a), 1.0), initial=0.0))
    return difference if difference == difference else float("inf")


def _floats(result: ActResult) -> list[np.ndarray]:
    return [x for x in result.outputs() if x.dtype.kind == "f"]


def _onnx(policy: Policy, calls: int, cache: GraphCache | None) -> PolicyRuntime:
    from msrl_accel.export.onnx import export_onnx
    from msrl_accel.runtime.onnx import OnnxRuntime

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "policy.onnx"

        def export() -> bytes:
            export_onnx(policy, file)
            return file.read_bytes()

        model = export() if cache is None else cache.file("policy.onnx", export)
        file.write_bytes(replace_weights(model, policy.arrays(), ONNX))
        return OnnxRuntime(file, policy.spec, weights_as_inputs=calls <= CALLS_PER_REBUILD)


def _lite(policy: Policy, calls: int, cache: GraphCache | None) -> PolicyRuntime:
    import mindspore

    from msrl_accel.export.lite import write_lite_mindir
    from msrl_accel.export.mindir import export_mindir
    from msrl_accel.runtime import lite

    usable, reason = lite.available()
    if not usable:
        raise ConfigError(reason)
    with tempfile.TemporaryDirectory() as folder:
        source, file = Path(folder) / "fixed.mindir", Path(folder) / "policy.mindir"
        export_mindir(policy, source, batch=1)
        write_lite_mindir(source, file, level=lite.mindir_level(mindspore.__version__))
        return lite.LiteRuntime(file, policy.spec)


_EXPORTED: Mapping[str, Callable[[Policy, int, GraphCache | None], PolicyRuntime]] = {
    "onnx": _onnx,
    "lite": _lite,
}
