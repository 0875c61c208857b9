"""Where two forms of a policy part: the weights that differ, and the first layer that does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from msrl_accel.consistency.reference import Layer, NumpyPolicy
from msrl_accel.errors import PolicyError
from msrl_accel.export.names import WEIGHT_PREFIX, input_names
from msrl_accel.runtime.base import ActResult
from msrl_accel.runtime.model_weights import weight_slots
from msrl_accel.spaces import Observations, PolicySpec

LAYER_TOLERANCE = 1e-5
"""Largest difference of matching layers, relative to the layer's largest number (at least 1)."""
AFTER_HEADS = "distribution"
"""Reported where every layer agrees: what follows the heads differs."""
BASELINE = "baseline"
"""Reported where every layer agrees with the NumPy network, but the baseline does not."""


@dataclass
class Divergence:
    """The first difference between an exported policy and its reference."""

    layer: str | None
    """First layer whose output differs; None where the file's layers cannot be read."""
    max_abs: float = 0.0
    """Difference of that layer."""
    weights: list[str] = field(default_factory=list)
    """Weights and statistics in the file that are not those of the reference."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def __str__(self) -> str:
        parts = []
        if self.layer == AFTER_HEADS:
            parts.append("every layer agrees; the difference arises behind the policy's heads")
        elif self.layer == BASELINE:
            parts.append(
                "every layer agrees with an independent evaluation of the same weights, from which "
                f"the baseline itself is {self.max_abs:.3g} off: its engine rounds more coarsely"
            )
        elif self.layer is not None:
            parts.append(f"first layer that differs: {self.layer} (by up to {self.max_abs:.3g})")
        if self.weights:
            parts.append(f"weights that differ: {', '.join(self.weights)}")
        return "; ".join(parts) or "weights are equal; the engine computes something else"


def first_divergence(
    file: Path,
    backend: str,
    reference: NumpyPolicy,
    arrays: Mapping[str, np.ndarray],
    observations: Observations,
    noise: np.ndarray,
    expected: ActResult,
) -> Divergence:
    """Compare an exported file with the NumPy network of the same weights.

    Layers are read from ONNX files only; weights also from MindIR files.

    Args:
        file: the model; backend: of which engine ('onnx', 'mindir', 'lite').
        arrays: weights as they should be.
        observations: [B, ...] each, as fed to the engine; noise: [B, noise_size].
        expected: what the baseline gave for them.
    """
    weights = differing_weights(file_weights(file, backend), arrays)
    if backend != "onnx":
        return Divergence(None, weights=weights)
    tensors = onnx_tensors(file, reference.spec, observations, noise)
    layers = reference.layers(observations, noise)
    layer, difference = first_unmatched(layers, tensors)
    if layer == AFTER_HEADS:
        parameters, value = reference.heads(layers)
        pairs = [(parameters[0], expected.parameters[0])]
        if value is not None and expected.value is not None:
            pairs.append((value, expected.value))
        difference = max(float(np.abs(ours - theirs).max()) for ours, theirs in pairs)
        if difference > LAYER_TOLERANCE:
            layer = BASELINE
    return Divergence(layer, difference, weights)


def first_unmatched(
    layers: Sequence[Layer], tensors: Sequence[np.ndarray], tolerance: float = LAYER_TOLERANCE
) -> tuple[str, float]:
    """First layer that no tensor equals, and its difference from the nearest one.

    Tensors of the file carry no layer names, and optimisers fuse them. So a layer counts as found
    where some tensor of its size has its numbers, and a missing layer counts as fused where a later
    one that depends on it is found.
    """
    distance = {layer.name: _nearest(layer.output, tensors) for layer in layers}
    scale = {layer.name: max(1.0, float(np.abs(layer.output).max())) for layer in layers}
    found = {name for name, d in distance.items() if d <= tolerance * scale[name]}
    behind_found: set[str] = set()
    for layer in layers:
        if layer.name in found:
            behind_found |= layer.upstream
    for layer in layers:
        if layer.name not in found | behind_found:
            return layer.name, distance[layer.name]
    return AFTER_HEADS, 0.0


def _nearest(output: np.ndarray, tensors: Sequence[np.ndarray]) -> float:
    flat = output.ravel()
    return min(
        (float(np.abs(t.ravel() - flat).max()) for t in tensors if t.size == flat.size),
        default=float("inf"),
    )


def onnx_tensors(
    file: Path, spec: PolicySpec, observations: Observations, noise: np.ndarray
) -> list[np.ndarray]:
    """Every floating-point tensor between the nodes of an ONNX file, in topological order.

    Raises:
        PolicyError: `onnx` or `onnxruntime` is missing.
    """
    onnx, onnxruntime = _onnx(), _onnxruntime()
    model = onnx.load(str(file))
    known = {o.name for o in model.graph.output}
    names = [name for node in model.graph.node for name in node.output]
    for name in names:
        if name not in known:
            model.graph.output.append(onnx.ValueInfoProto(name=name))
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    feed = dict(zip(input_names(spec), (*spec.cast(observations), noise)))
    values = session.run(names, feed)
    tensors = [v for v in values if v.dtype.kind == "f"]
    # Torsos that run together are one tensor [M, B, width]: offer each on its own, too.
    return [*tensors, *(member for t in tensors if t.ndim == 3 for member in t)]


def file_weights(file: Path, backend: str) -> dict[str, np.ndarray]:
    """Weights in an exported file, flattened, by the names `Policy.arrays` gives them."""
    if backend == "onnx":
        return {k: v.ravel() for k, v in onnx_weights(file).items()}
    model = Path(file).read_bytes()
    return {k: np.frombuffer(model[s], np.float32) for k, s in weight_slots(model).items()}


def onnx_weights(file: Path) -> dict[str, np.ndarray]:
    """Weights and statistics in an ONNX file, with their shapes."""
    onnx = _onnx()
    return {
        i.name[len(WEIGHT_PREFIX) :]: onnx.numpy_helper.to_array(i)
        for i in onnx.load(str(file)).graph.initializer
        if i.name.startswith(WEIGHT_PREFIX)
    }


def differing_weights(
    found: Mapping[str, np.ndarray], arrays: Mapping[str, np.ndarray]
) -> list[str]:
    """Names of `arrays` whose numbers in the file are others, with how many are."""
    differing = []
    for name, array in arrays.items():
        match = [k for k in found if k == name or k.endswith(f".{name}")]
        if not match:  # an exporter may drop what no output reads
            continue
        there, here = found[match[0]], np.asarray(array, np.float32).ravel()
        if there.size != here.size:
            differing.append(f"{name} ({there.size} numbers instead of {here.size})")
        elif (there != here).any():
            differing.append(f"{name} ({int((there != here).sum())} of {here.size} numbers)")
    return differing


def _onnx() -> Any:
    try:
        import onnx
        import onnx.numpy_helper
    except ImportError as error:
        raise PolicyError(
            "reading ONNX layers needs onnx: pip install 'msrl_accel[onnx]'"
        ) from error
    return onnx


def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise PolicyError(
            "evaluating ONNX layers needs onnxruntime: pip install 'msrl_accel[onnx]'"
        ) from error
    return onnxruntime
