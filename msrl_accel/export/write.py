"""Writing a bundle: every form of a policy, the reference set, the parity gate, the manifest."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from msrl_accel import __version__
from msrl_accel.errors import ExportError
from msrl_accel.export.bundle import MANIFEST, REFERENCE, Bundle, describe_arrays
from msrl_accel.export.manifest import (
    FORMATS,
    KIND,
    SCHEMA,
    arrays_digest,
    describe_graph,
    file_entry,
    parse,
)
from msrl_accel.export.names import input_names
from msrl_accel.files import write_bytes_synced

if TYPE_CHECKING:
    from msrl_accel.policy import Policy

_PACKAGES = ("mindspore", "numpy", "onnx", "onnxruntime", "gymnasium")


class GateError(ExportError):
    """An exported form does not act as the training graph does."""


def write_bundle(
    policy: Policy,
    folder: Path,
    *,
    version: int,
    config: dict[str, Any],
    formats: Sequence[str] = FORMATS,
    gate: bool = True,
    precision: str = "origin",
) -> None:
    """Write every file of a bundle into an empty folder, the manifest last.

    Args and errors are those of `export_run`; `config` is the resolved training configuration.
    """
    from msrl_accel.export.gate import check_parity, make_reference
    from msrl_accel.runtime.graph import GraphRuntime

    arrays, graph = policy.arrays(), GraphRuntime(policy, version)
    forms = _write_forms(policy, folder, formats, precision)
    reference = make_reference(graph, arrays, policy.output_names)
    write_reference(folder / REFERENCE, reference)
    manifest = {
        "kind": KIND,
        "schema": SCHEMA,
        **describe_graph(policy.spec, input_names(policy.spec), policy.output_names),
        "normalization": _normalization(arrays, config),
        "weights": {"version": version, "sha256": arrays_digest(arrays)},
        "config": config,
        "seed": config["seed"],
        "versions": package_versions(),
        "precision": precision,
        "reference": {"file": REFERENCE, "arrays": describe_arrays(reference)},
        "files": {file.name: file_entry(file) for file in sorted(folder.iterdir())},
        **forms,
        "parity": {"gate": gate, "passed": True, "results": {}},
    }
    results = check_parity(graph, Bundle(folder, manifest, policy.spec), arrays)
    failures = [
        f"{backend}: {problem}" for backend, r in results.items() for problem in r["problems"]
    ]
    if failures and gate:
        raise GateError(
            "the exported policy does not act as the trained one: "
            + "; ".join(failures)
            + ". Nothing was written; --no-gate writes the bundle with this recorded"
        )
    manifest["parity"] = {"gate": gate, "passed": not failures, "results": results}
    data = json.dumps(manifest, indent=2, allow_nan=False).encode() + b"\n"
    parse(data, folder / MANIFEST)
    write_bytes_synced(folder / MANIFEST, data)


def _write_forms(
    policy: Policy, folder: Path, formats: Sequence[str], precision: str
) -> dict[str, Any]:
    """Write each form; for the manifest: files by backend, and notes on those left out."""
    from msrl_accel.export.mindir import export_mindir

    models, notes = {"mindir": "policy.mindir"}, {}
    export_mindir(policy, folder / models["mindir"])
    if "onnx" in formats or "om" in formats:  # OM files are built from ONNX
        from msrl_accel.export.onnx import export_onnx

        models["onnx"] = "policy.onnx"
        export_onnx(policy, folder / models["onnx"])
    if "lite" in formats:
        written = {"lite": "policy_lite.mindir", "ms": "policy.ms"}
        notes.update(_write_lite(policy, *(folder / name for name in written.values())))
        models.update({form: name for form, name in written.items() if form not in notes})
    if "om" not in formats:
        return {"models": models, "notes": notes}
    from msrl_accel.export.om import export_om

    try:
        om = export_om(
            folder / models["onnx"],
            folder / models["mindir"],
            folder,
            policy.spec,
            precision=precision,
        )
    except ExportError as error:  # the other forms are of use without it
        notes["om"] = str(error)
        return {"models": models, "notes": notes}
    if om["file"] is None:
        notes["om"] = f"{om['script']} builds it on a CANN host ({om['reason']})"
    else:
        models["om"] = om["file"]
    return {"models": models, "notes": notes, "om": om}


def _write_lite(policy: Policy, target: Path, ms: Path) -> dict[str, str]:
    """Write both files for MindSpore Lite; a note on each that cannot be written."""
    import mindspore

    from msrl_accel.export.lite import LITE_2_0_LEVEL, LiteExportError, write_lite_mindir
    from msrl_accel.export.mindir import export_mindir
    from msrl_accel.runtime import lite
    from msrl_accel.runtime.lite_converter import convert_to_ms

    level = lite.mindir_level(mindspore.__version__) if lite.available()[0] else LITE_2_0_LEVEL
    source = target.with_name("fixed_batch.mindir")
    export_mindir(policy, source, batch=1)
    try:
        write_lite_mindir(source, target, level=level)
        convert_to_ms(target, ms)
    except LiteExportError as error:
        return {"lite": str(error), "ms": "it is made of the lite form"}
    except lite.LiteError as error:
        return {"ms": str(error)}
    finally:
        source.unlink()
    return {}


def write_reference(file: Path, arrays: dict[str, np.ndarray]) -> None:
    with open(file, "xb") as opened:
        np.savez_compressed(opened, **arrays)  # type: ignore[arg-type]


def _normalization(arrays: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, Any] | None:
    """What normalisation the graph holds: (x - mean) * inverse_std, clipped; None for none."""
    statistics = {k: v for k, v in arrays.items() if k.startswith("normalizer.")}
    if not statistics:
        return None
    clip = config["policy"]["observation_clip"]
    return {"in_graph": True, "clip": clip, "sha256": arrays_digest(statistics)}


def package_versions() -> dict[str, str]:
    versions = {"msrl_accel": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
