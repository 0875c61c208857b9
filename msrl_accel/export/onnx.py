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
from msrl_accel.export.names import BATCH, WEIGHT_PREFIX, input_names
from msrl_accel.files import write_bytes_atomic
from msrl_accel.policy import Policy

_EXPORT_BATCH = 2
_TO_THE_END = np.iinfo(np.int64).max


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
            model = onnx.load(str(file))
        except (RuntimeError, ValueError, TypeError, OSError) as error:
            raise ExportError(f"cannot write {target}: {error}") from error
    _open_slices(onnx, model.graph)
    _fuse_tanh(onnx, model.graph)
    weights = {p.name for p in policy.get_parameters()}
    _rename(onnx, model.graph, policy.output_names, weights)
    _open_batch(model.graph)
    model.producer_name = "msrl_accel"
    try:
        onnx.checker.check_model(model)
        write_bytes_atomic(target, model.SerializeToString())
    except (onnx.checker.ValidationError, OSError) as error:
        raise ExportError(f"cannot write {target}: {error}") from error


def _import_onnx() -> Any:
    try:
        import onnx
    except ImportError as error:
        raise ExportError(
            "writing ONNX needs the package onnx: pip install 'msrl_accel[onnx]', "
            "or leave onnx out of --formats"
        ) from error
    return onnx


def _open_slices(onnx: Any, graph: Any) -> None:
    """Slices of size -1 reach to the end; MindSpore writes their end as begin - 1."""
    constants = {i.name: i for i in graph.initializer}
    sums = {node.output[0]: node for node in graph.node if node.op_type == "Add"}
    for node in graph.node:
        if node.op_type != "Slice" or node.input[2] not in sums:
            continue
        begin, size = (
            onnx.numpy_helper.to_array(constants[name]).astype(np.int64)
            for name in sums[node.input[2]].input
        )
        end = np.where(size == -1, _TO_THE_END, begin + size)
        name = f"{node.input[2]}.constant"
        if name not in constants:
            constants[name] = onnx.numpy_helper.from_array(end, name)
            graph.initializer.append(constants[name])
        node.input[2] = name
    _remove_unread(graph)


def _fuse_tanh(onnx: Any, graph: Any) -> None:
    """Write `networks.Tanh`, 2 t / (1 + t^2) of t = tanh(x / 2), as the Tanh that it is."""
    makers = {name: node for node in graph.node for name in node.output}

    def made_by(name: str, operator: str) -> Any:
        node = makers.get(name)
        return node if node is not None and node.op_type == operator else None

    def halved(t: str) -> str | None:
        """x, where t is tanh(x / 2)."""
        tanh = made_by(t, "Tanh")
        product = tanh and made_by(tanh.input[0], "Mul")
        return product.input[0] if product else None

    for node in graph.node:
        if node.op_type != "Div":
            continue
        double, shifted = made_by(node.input[0], "Add"), made_by(node.input[1], "Add")
        square = shifted and made_by(shifted.input[0], "Mul")
        if not double or not square or len({*double.input, *square.input}) != 1:
            continue
        x = halved(double.input[0])
        if x is not None:
            node.CopyFrom(onnx.helper.make_node("Tanh", [x], list(node.output)))
    _remove_unread(graph)


def _remove_unread(graph: Any) -> None:
    while True:
        read = {n for node in graph.node for n in node.input} | {o.name for o in graph.output}
        unread = [node for node in graph.node if not read.intersection(node.output)]
        if not unread:
            break
        for node in unread:
            graph.node.remove(node)
    for initializer in [i for i in graph.initializer if i.name not in read]:
        graph.initializer.remove(initializer)


def _rename(onnx: Any, graph: Any, output_names: tuple[str, ...], weights: set[str]) -> None:
    """Name outputs and weights; a tensor that is returned twice, or is a weight, is copied.

    MindSpore's own `output_names` renames a tensor but not where it is read.
    """
    inputs = {i.name for i in graph.input}
    names = {name: WEIGHT_PREFIX + name for name in weights}
    copies = []
    for output, name in zip(graph.output, output_names):
        if output.name in names or output.name in inputs:
            copies.append((output.name, name))
        else:
            names[output.name] = name
        output.name = name
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for initializer in graph.initializer:
        initializer.name = names.get(initializer.name, initializer.name)
    for source, name in copies:
        graph.node.append(onnx.helper.make_node("Identity", [names.get(source, source)], [name]))


def _open_batch(graph: Any) -> None:
    """Give every output but copies of weights an open batch dimension."""
    copied_weights = {
        node.output[0]
        for node in graph.node
        if node.op_type == "Identity" and node.input[0].startswith(WEIGHT_PREFIX)
    }
    del graph.value_info[:]
    for output in graph.output:
        if output.name not in copied_weights:
            output.type.tensor_type.shape.dim[0].dim_param = BATCH
