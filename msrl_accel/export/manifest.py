"""The manifest of a bundle: what it holds, and a validator for what was read from a disk."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from msrl_accel.errors import BundleError
from msrl_accel.spaces import PolicySpec

KIND = "msrl_accel policy bundle"
LANGUAGE_MODEL_KIND = "msrl_accel language model bundle"
OPENERS = {
    KIND: "a policy: open it with msrl_accel.runtime.load.load_policy",
    LANGUAGE_MODEL_KIND: "a language model: open it with "
    "msrl_accel.runtime.language_model.load_language_model",
}
"""What bundles hold, by their kind."""
SCHEMA = 1
FORMATS = ("mindir", "onnx", "lite", "om")
MODELS = (*FORMATS, "ms")
"""Backends that have a file of their own; 'ms' is written with 'lite'."""

_NOISE = {
    "gumbel": "For every number u uniform in the open interval (0, 1) the noise is -log(-log(u)). "
    "There is one for each logit, in the order of the logits. The graph takes, for each component "
    "of the action, the choice with the largest logit + noise.",
    "logistic": "For every number u uniform in the open interval (0, 1) the noise is "
    "log(u) - log(1 - u). There is one for each component of the action. The graph sets the bits "
    "where logit + noise is above 0.",
    "normal": "Independent standard normal numbers (mean 0, variance 1), one for each component of "
    "the action. The graph takes mean + exp(log_std) * noise.",
}
_SQUASHED = " The tanh of that, in [-1, 1], is mapped to the bounds of the environment's action."
_DETERMINISTIC = (
    "Feed zeros as noise: the action is then the mode of the distribution, and equal inputs give "
    "equal actions."
)
_ACTION = (
    "The output `action` is in the units of the environment and within its bounds; cast it to "
    "spec.action.dtype."
)

# Field -> type of its value; None stands for null.
_TYPES: Mapping[str, tuple[type, ...]] = {
    "spec": (dict,),
    "inputs": (list,),
    "outputs": (list,),
    "noise": (dict,),
    "deterministic": (str,),
    "action": (str,),
    "recurrent_state": (type(None),),
    "normalization": (dict, type(None)),
    "weights": (dict,),
    "config": (dict,),
    "versions": (dict,),
    "seed": (int,),
    "precision": (str,),
    "reference": (dict,),
    "files": (dict,),
    "models": (dict,),
    "notes": (dict,),
    "parity": (dict,),
}


def describe_graph(
    spec: PolicySpec, inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> dict[str, Any]:
    """The fields that tell how to call the graph."""
    tensors = [(o.shape, o.dtype) for o in spec.observations]
    tensors.append(((spec.action.noise_size,), "float32"))
    law = spec.action.noise_kind
    how = _NOISE[law] + (_SQUASHED if spec.action.squashed else "")
    return {
        "spec": spec.to_dict(),
        "inputs": [
            {"name": name, "shape": ["batch", *shape], "dtype": dtype}
            for name, (shape, dtype) in zip(inputs, tensors)
        ],
        "outputs": list(outputs),
        "noise": {"law": law, "size": spec.action.noise_size, "how": how},
        "deterministic": _DETERMINISTIC,
        "action": _ACTION,
        "recurrent_state": None,
    }


def arrays_digest(arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over names, shapes and little-endian float32 values, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name], "<f4")
        digest.update(f"{name} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def file_entry(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    return {"size": path.stat().st_size, "sha256": file_digest(path)}


def file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def parse(data: bytes, where: Path) -> dict[str, Any]:
    """Read and validate a manifest of a policy.

    Raises:
        BundleError: it is no manifest, of a newer schema, or a field is missing or of another type.
    """
    manifest = parse_header(data, where)
    check_kind(manifest, KIND, where)
    check_types(manifest, _TYPES, where)
    check_files(manifest, where)
    _check_details(manifest, where)
    return manifest


def parse_header(data: bytes, where: Path) -> dict[str, Any]:
    """The content of a manifest of any kind, of which kind and schema alone are checked.

    Raises:
        BundleError: it is no manifest, or of a newer schema.
    """
    try:
        manifest = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BundleError(
            f"{where} is damaged ({error}): copy or export the bundle again"
        ) from None
    if not isinstance(manifest, dict) or manifest.get("kind") not in (*OPENERS,):
        raise BundleError(f"{where} is no manifest of a bundle: give a folder of msrl-export")
    schema = manifest.get("schema")
    if type(schema) is not int or schema < 1:
        raise damaged(where, "schema", schema)
    if schema > SCHEMA:
        raise BundleError(
            f"{where} has schema {schema}, this msrl_accel reads up to {SCHEMA}: "
            "upgrade with pip install --upgrade msrl_accel"
        )
    return manifest


def check_kind(manifest: Mapping[str, Any], kind: str, where: Path) -> None:
    """Refuse the bundle of something else."""
    if manifest["kind"] != kind:
        raise BundleError(f"{where.parent} is the bundle of {OPENERS[manifest['kind']]}")


def check_types(
    manifest: Mapping[str, Any], fields: Mapping[str, tuple[type, ...]], where: Path
) -> None:
    """Refuse a manifest that lacks a field, or has one of another type."""
    for field, types in fields.items():
        if field not in manifest or type(manifest[field]) not in types:
            raise damaged(where, field, manifest.get(field, "missing"))


def parse_spec(manifest: Mapping[str, Any], where: Path) -> PolicySpec:
    """The policy's tensors, checked.

    Raises:
        BundleError: the description is not one that `PolicySpec.to_dict` writes.
    """
    try:
        spec = PolicySpec.from_dict(manifest["spec"])
        sizes = [*spec.action.shape, *(d for o in spec.observations for d in o.shape)]
        ok = all(type(d) is int and d >= 0 for d in sizes)
        ok = ok and all(o.dtype in ("uint8", "float32") for o in spec.observations)
        ok = ok and len(spec.observations) > 0 and spec.action.noise_size > 0
        np.dtype(spec.action.dtype)
        for o in spec.observations:
            _ = o.bounds
        ok = ok and len(manifest["inputs"]) == len(spec.observations) + 1
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged(where, "spec", repr(error)) from error
    if not ok:
        raise damaged(where, "spec", manifest["spec"])
    return spec


def check_files(manifest: Mapping[str, Any], where: Path) -> None:
    """Every file is named plainly, so that none outside the bundle is ever read."""
    for name, entry in manifest["files"].items():
        if name in ("", ".", "..") or any(c in name for c in "/\\:\0"):
            raise BundleError(
                f"{where} lists the file {name!r}, which is not inside the bundle: do not use it"
            )
        size, digest = (
            (entry.get("size"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
        )
        if type(size) is not int or not isinstance(digest, str) or len(digest) != 64:
            raise damaged(where, f"files.{name}", entry)


def _check_details(manifest: Mapping[str, Any], where: Path) -> None:
    for backend, name in manifest["models"].items():
        if not isinstance(name, str) or name not in manifest["files"]:
            raise damaged(where, f"models.{backend}", name)
    outputs = manifest["outputs"]
    if not all(isinstance(name, str) for name in outputs) or len(outputs) < 5:
        raise damaged(where, "outputs", outputs)
    inputs = [i.get("name") if isinstance(i, dict) else None for i in manifest["inputs"]]
    if not all(isinstance(name, str) for name in inputs):
        raise damaged(where, "inputs", inputs)
    check_weights_and_parity(manifest, where)


def check_weights_and_parity(manifest: Mapping[str, Any], where: Path) -> None:
    """Refuse a manifest without version and digest of the weights, or the gate's verdict."""
    weights, parity = manifest["weights"], manifest["parity"]
    if type(weights.get("version")) is not int or not isinstance(weights.get("sha256"), str):
        raise damaged(where, "weights", weights)
    if type(parity.get("passed")) is not bool or type(parity.get("gate")) is not bool:
        raise damaged(where, "parity", parity)


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def damaged(where: Path, field: str, value: Any) -> BundleError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return BundleError(f"{where}: {field} = {shown} cannot be: copy or export the bundle again")


def json_number(value: float) -> float | None:
    """A number as JSON has them: null where it is not finite."""
    return float(value) if math.isfinite(value) else None
