"""A policy as an ONNX file: the graph of the training Cell, at any batch size."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import mindspore as ms
import mindspore.onnx
import numpy as np

from msrl_accel.errors import ExportError
from msrl_accel.export.mindir import graph_inputs
from msrl_accel.export.names import BATCH, input_names
from msrl_accel.files import write_bytes_atomic
from msrl_accel.policy import Policy

_EXPORT_BATCH = 2


def export_onnx(policy: Policy, target: Path) -> None:
    """Write the graph of `policy` with its present weights and statistics.

    Inputs are named as in `input_names`, outputs as in `policy.output_names`, weights as in
    `policy.arrays()` after `WEIGHT_PREFIX`. Operators are those of opset 11.

    Args:
        policy: the Cell that training uses; it stays as it is.
        target: replaced atomically.

    Raises:
        ExportError: the `onnx` package is missing, an operator has no ONNX form, or the disk
            refuses the file.
    """
    onnx = _import_onnx()
    names = input_names(policy.spec)
    inputs = [
        ms.Tensor(np.zeros((_EXPORT_BATCH, *shape), ms.dtype_to_nptype(dtype)))
        for shape, dtype in graph_inputs(policy)
    ]
    with tempfile.TemporaryDirectory() as scratch:  # MindSpore refuses paths with spaces
        file = Path(scratch) / "policy.onnx"
        try:
            mindspore.onnx.export(
                policy,
                *inputs,
                file_name=str(file),
                input_names=list(names),
                dynamic_axes={name: {0: BATCH} for name in names},
            )
            model = _rewritten(onnx.load(str(file)), policy)
            write_bytes_atomic(target, model.SerializeToString())
        except (RuntimeError, ValueError, TypeError, OSError) as error:
            raise ExportError(f"cannot write {target}: {error}") from error
        finally:
            # MindSpore changes the compiled graph as it writes it: another export needs another.
            policy.compile_cache.difference_update(
                [phase for phase in policy.compile_cache if phase.startswith("export.onnx")]
            )


def _rewritten(model: Any, policy: Policy) -> Any:
    from msrl_accel.export import onnx_graph

    graph = model.graph
    onnx_graph.open_slices(graph)
    onnx_graph.bypass_identities(graph)
    onnx_graph.fuse_tanh(graph)
    onnx_graph.remove_unread(graph)
    onnx_graph.unstack_members(graph)
    onnx_graph.sum_values(graph)
    onnx_graph.gather_log_prob(graph)
    onnx_graph.bypass_identities(graph)
    onnx_graph.remove_unread(graph)
    onnx_graph.rename(graph, policy.output_names, {p.name for p in policy.get_parameters()})
    onnx_graph.open_batch(graph)
    model.producer_name = "msrl_accel"
    onnx_graph.check(model)
    return model


def _import_onnx() -> Any:
    try:
        import onnx
    except ImportError as error:
        raise ExportError(
            "writing ONNX needs the package onnx: pip install 'msrl_accel[onnx]', "
            "or leave onnx out of --formats"
        ) from error
    return onnx
