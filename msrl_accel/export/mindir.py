"""A policy as a MindIR file: the training Cell itself, at any batch size."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import mindspore as ms
import numpy as np

from msrl_accel.algorithms import algorithm_class
from msrl_accel.config import resolve_config
from msrl_accel.errors import BundleError, ExportError
from msrl_accel.export.bundle import Bundle
from msrl_accel.export.manifest import arrays_digest
from msrl_accel.files import write_bytes_atomic
from msrl_accel.policy import Policy
from msrl_accel.runtime.model_weights import weight_slots


def export_mindir(policy: Policy, target: Path, *, batch: int | None = None) -> None:
    """Write the graph of `policy` with its present weights and statistics.

    Args:
        policy: the Cell that training uses; it stays as it is.
        target: replaced atomically.
        batch: a fixed batch size, for engines that need one; None leaves it open.

    Raises:
        ExportError: MindSpore cannot write the graph, or the disk refuses the file.
    """
    inputs = [
        ms.Tensor(shape=[batch, *shape], dtype=dtype) for shape, dtype in graph_inputs(policy)
    ]
    export_cell(policy, inputs, target)


def export_cell(cell: ms.nn.Cell, inputs: Sequence[ms.Tensor], target: Path) -> None:
    """Write the graph of any Cell; errors are those of `export_mindir`."""
    with tempfile.TemporaryDirectory() as scratch:  # MindSpore refuses paths with spaces
        file = Path(scratch) / "graph.mindir"
        try:
            ms.export(cell, *inputs, file_name=str(file), file_format="MINDIR")
            write_bytes_atomic(target, file.read_bytes())
        except (RuntimeError, ValueError, TypeError, OSError) as error:
            raise ExportError(f"cannot write {target}: {error}") from error


def graph_inputs(policy: Policy) -> list[tuple[tuple[int, ...], ms.Type]]:
    """Shape of one row and dtype of each input: the observations, then the noise."""
    inputs = [(o.shape, getattr(ms, o.dtype)) for o in policy.spec.observations]
    return [*inputs, ((policy.spec.action.noise_size,), ms.float32)]


def policy_of(bundle: Bundle) -> Policy:
    """The training Cell of a bundle: its configuration is in the manifest, its weights in MindIR.

    Raises:
        BundleError: the bundle has no MindIR file, or that has other weights than the manifest.
    """
    file = bundle.file("mindir")
    if file is None:
        raise BundleError(f"{bundle.path} has no MindIR file to take the weights from")
    config = resolve_config(tuned=False, overrides=bundle.manifest["config"])
    policy = algorithm_class(config.algo).build_policy(config, bundle.spec)
    data = file.read_bytes()
    slots = weight_slots(data)
    arrays = {}
    for p in policy.get_parameters():
        if p.name not in slots:
            raise BundleError(f"{file} has no weight {p.name!r}: export the bundle again")
        arrays[p.name] = np.frombuffer(data[slots[p.name]], "<f4").reshape(p.shape)
    if arrays_digest(arrays) != bundle.manifest["weights"]["sha256"]:
        raise BundleError(f"{file} has other weights than the manifest: export the bundle again")
    policy.load_arrays(arrays)
    return policy
