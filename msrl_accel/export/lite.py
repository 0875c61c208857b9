"""MindIR for MindSpore Lite: rewrites a graph to the MindIR version that an older Lite reads.

MindSpore 2.10 writes MindIR version 3, where the attributes of an operator are its last inputs,
constants. MindSpore Lite 2.0 reads version 1, where they are attributes of the primitive, and knows
no operator that was added later. The graph that comes out has the same inputs and outputs in the
same order, and takes any batch size once the runtime has resized it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from msrl_accel.export.lite_writer import (
    LITE_2_0_LEVEL,
    LiteExportError,
    Node,
    Signature,
    Writer,
)
from msrl_accel.files import write_bytes_atomic

__all__ = ["LITE_2_0_LEVEL", "LiteExportError", "write_lite_mindir"]


def write_lite_mindir(source: Path, target: Path, *, level: int | None) -> None:
    """Write the MindIR file that MindSpore Lite is to load.

    Args:
        source: a MindIR file that `mindspore.export` wrote, at a fixed batch size.
        target: replaced atomically.
        level: MindIR version that the Lite in use reads, 1 for Lite 2.0; None for a Lite that reads
            the file as it is, which is then copied.

    Raises:
        LiteExportError: an operator, an argument, control flow or a dynamic shape cannot be written
            at `level`; the message names it and where in the network it is.
    """
    data = Path(source).read_bytes()
    if level is not None:
        if level != LITE_2_0_LEVEL:
            raise LiteExportError(
                f"MindIR version {level} cannot be written; "
                f"give {LITE_2_0_LEVEL} (MindSpore Lite 2.0) or None (copy)"
            )
        data = _to_version_1(data, Path(source))
    write_bytes_atomic(target, data)


_UNARY = ("Abs", "Exp", "Log", "Neg", "Sin", "Sqrt", "Square")
_BINARY = ("Add", "Div", "Maximum", "Minimum", "Mul", "RealDiv", "Sub")
_COMPARISONS = ("Equal", "Greater", "GreaterEqual", "Less", "LessEqual")
_ACTIVATIONS = ("ReLU", "Sigmoid", "Tanh")

# Operators whose version 1 form differs only in where the attributes are.
SIGNATURES: Mapping[str, Signature] = {
    **dict.fromkeys(_UNARY, Signature(1)),
    **dict.fromkeys((*_BINARY, *_COMPARISONS), Signature(2)),
    "Argmax": Signature(1, ("axis", "output_type")),
    "BatchMatMul": Signature(2, ("transpose_a", "transpose_b")),
    "BiasAdd": Signature(2, ("data_format",)),
    "Concat": Signature(1, ("axis",)),
    "ExpandDims": Signature(2),
    "Gather": Signature(3, ("batch_dims",)),
    "LayerNorm": Signature(3, ("begin_norm_axis", "begin_params_axis", "epsilon")),
    "LogSoftmax": Signature(1, ("axis",)),
    "MatMul": Signature(2, ("transpose_a", "transpose_b")),
    "OneHot": Signature(4, ("axis",)),
    "ReduceMax": Signature(2, ("keep_dims",)),
    "ReduceMean": Signature(2, ("keep_dims",)),
    "ReduceSum": Signature(2, ("keep_dims", "skip_mode")),
    "Select": Signature(3),
    "Softmax": Signature(1, ("axis",)),
    "Split": Signature(1, ("axis", "output_num")),
    "Squeeze": Signature(1, ("axis",)),
    "Tile": Signature(2),
}

# Operators that version 3 writes as version 1 does.
UNCHANGED = frozenset({"Conv2D", "Stack", "TupleGetItem"})


def _rewrite_reshape(writer: Writer, node: Node) -> None:
    """A leading dimension that is kept becomes -1, so that the graph takes any batch size."""
    source, target = node.inputs
    if writer.is_bytes(source):
        writer.reshaped_bytes[node.output] = node  # Lite 2.0 cannot: reshaped after the cast
        return
    dims, shape = writer.value(node, 1), writer.shape(source)
    if shape and dims and dims[0] == shape[0] and -1 not in dims:
        target = writer.integers((-1, *dims[1:]))
    writer.emit(node, "Reshape", (source, target))


def _rewrite_cast(writer: Writer, node: Node) -> None:
    source, kind = node.inputs
    reshape = writer.reshaped_bytes.get(source)
    if reshape is None:
        writer.emit(node, "Cast", node.inputs)
        return
    bytes_, target = reshape.inputs
    numbers = writer.emit(node, "Cast", (bytes_, kind), output=f"{node.output}_numbers")
    writer.declare(numbers, writer.shape(bytes_))
    _rewrite_reshape(writer, replace(node, inputs=(numbers, target)))


def _rewrite_slice(writer: Writer, node: Node) -> None:
    """A leading dimension that is taken whole gets size -1, so that the graph takes any batch."""
    source, begin, size = node.inputs
    begins, sizes, shape = writer.value(node, 1), writer.value(node, 2), writer.shape(source)
    if shape and begins[0] == 0 and sizes[0] == shape[0]:
        size = writer.integers((-1, *sizes[1:]))
    writer.emit(node, "Slice", (source, begin, size))


def _rewrite_tuple(writer: Writer, node: Node) -> None:
    """A tensor that comes twice is copied: Lite merges outputs that are the same tensor."""
    members: list[str] = []
    for name in node.inputs:
        members.append(writer.copy(node, name) if name in members else name)
    writer.emit(node, "MakeTuple", members)


def _rewrite_transpose(writer: Writer, node: Node) -> None:
    """NHWC to NCHW goes through a matrix and a copy.

    Lite 2.0 would merge the transpose with the change of layout that it gives every convolution,
    and then reject the convolution.
    """
    if writer.value(node, 1) != (0, 3, 1, 2):
        writer.emit(node, "Transpose", node.inputs)
        return
    rows, height, width, channels = writer.shape(node.inputs[0])
    pixels = writer.integers((-1, height * width, channels))
    planes = writer.integers((-1, channels, height, width))
    x = writer.intermediate(node, "Reshape", node.inputs[0], pixels)
    writer.declare(x, (rows, height * width, channels))
    x = writer.intermediate(node, "Transpose", x, writer.integers((0, 2, 1)))
    writer.declare(x, (rows, channels, height * width))
    x = writer.intermediate(node, "Reshape", x, planes)
    writer.emit(node, "Maximum", (x, writer.scalar(-np.inf)))


def _rewrite_dense(writer: Writer, node: Node) -> None:
    x, weight, bias = node.inputs
    flags = {"transpose_a": False, "transpose_b": True}
    if bias in writer.constants:
        writer.emit(node, "MatMul", (x, weight), flags)
        return
    product = writer.emit(node, "MatMul", (x, weight), flags, output=f"{node.output}_product")
    writer.emit(node, "Add", (product, bias))


def _rewrite_muls(writer: Writer, node: Node) -> None:
    writer.emit(node, "Mul", (node.inputs[0], writer.scalar(writer.value(node, 1))))


def _rewrite_activation(writer: Writer, node: Node) -> None:
    """Lite 2.0 fuses an activation into the layer before it even if others read that layer too."""
    (x,) = node.inputs
    if writer.readers[node.proto.input[0]] > 1:
        x = writer.intermediate(node, "Maximum", x, writer.scalar(-np.inf))
    writer.emit(node, node.operator, (x,))


def _rewrite_silu(writer: Writer, node: Node) -> None:
    (x,) = node.inputs
    copied = writer.intermediate(node, "Maximum", x, writer.scalar(-np.inf))
    writer.emit(node, "Mul", (x, writer.intermediate(node, "Sigmoid", copied)))


def _rewrite_cos(writer: Writer, node: Node) -> None:
    """sin(x + pi / 2): the operator of Lite 2.0 is off by 2e-3."""
    shifted = writer.intermediate(node, "Add", node.inputs[0], writer.scalar(np.pi / 2))
    writer.emit(node, "Sin", (shifted,))


def _rewrite_pow(writer: Writer, node: Node) -> None:
    """A power of a constant base: y + y (z - log y) of y = exp(z), z = exponent log(base).

    Lite 2.0 gives the result of Pow the shape of a constant base, and is wrong where some exponents
    are whole; its exp alone is off by 4e-6 of the result.
    """
    base, exponent = node.inputs
    if base not in writer.constants:
        writer.emit(node, "Pow", (base, exponent))
        return
    factor = np.log(writer.value(node, 0))
    z = exponent
    if not np.isclose(factor, 1.0, rtol=1e-7):
        z = writer.intermediate(node, "Mul", exponent, writer.scalar(factor))
    y = writer.intermediate(node, "Exp", z)
    error = writer.intermediate(node, "Sub", z, writer.intermediate(node, "Log", y))
    writer.emit(node, "Add", (y, writer.intermediate(node, "Mul", y, error)))


def _rewrite_rsqrt(writer: Writer, node: Node) -> None:
    """1 / sqrt(x): the operator of Lite 2.0 is off by 1e-4."""
    root = writer.intermediate(node, "Sqrt", node.inputs[0])
    writer.emit(node, "RealDiv", (writer.scalar(1), root))


def _rewrite_softplus(writer: Writer, node: Node) -> None:
    """max(x, 0) + log(1 + exp(-|x|)): log(1 + exp(x)) would overflow from x = 89 on."""
    (x,) = node.inputs
    negative = writer.intermediate(node, "Neg", writer.intermediate(node, "Abs", x))
    exp = writer.intermediate(node, "Exp", negative)
    log = writer.intermediate(node, "Log", writer.intermediate(node, "Add", exp, writer.scalar(1)))
    writer.emit(node, "Add", (writer.intermediate(node, "Maximum", x, writer.scalar(0)), log))


def _rewrite_clamp(writer: Writer, node: Node) -> None:
    x, *_ = node.inputs
    low, high = writer.value(node, 1), writer.value(node, 2)
    if high is None:
        writer.emit(node, "Maximum", (x, writer.scalar(low)))
        return
    if low is not None:
        x = writer.intermediate(node, "Maximum", x, writer.scalar(low))
    writer.emit(node, "Minimum", (x, writer.scalar(high)))


# Operators that version 1 does not know, or knows with other arguments.
REWRITES: Mapping[str, Callable[[Writer, Node], None]] = {
    "Cast": _rewrite_cast,
    "ClampScalar": _rewrite_clamp,
    "Cos": _rewrite_cos,
    "Dense": _rewrite_dense,
    "Muls": _rewrite_muls,
    "Pow": _rewrite_pow,
    **dict.fromkeys(_ACTIVATIONS, _rewrite_activation),
    "Reshape": _rewrite_reshape,
    "Rsqrt": _rewrite_rsqrt,
    "SiLU": _rewrite_silu,
    "Slice": _rewrite_slice,
    "Softplus": _rewrite_softplus,
    "Transpose": _rewrite_transpose,
    "MakeTuple": _rewrite_tuple,
    "make_list": _rewrite_tuple,
}


def _write_node(writer: Writer, source: Any) -> None:
    """Write what stands for one node of the source graph."""
    if source.op_type == "Constant":
        writer.constants[source.output[0]] = source
        return
    node = writer.read(source)
    if node.operator != "Cast" and writer.reshaped_bytes.keys() & set(node.inputs):
        node.refuse("reads uint8 data that is reshaped but not cast")
    if node.operator in ("Load", "Depend"):  # order of side effects, of which inference has none
        writer.aliases[node.output] = node.inputs[0]
    elif node.operator in REWRITES:
        REWRITES[node.operator](writer, node)
    elif node.operator in SIGNATURES:
        writer.emit_with_attributes(node, SIGNATURES[node.operator])
    elif node.operator in UNCHANGED:
        writer.emit_unchanged(node)
    elif node.operator != "UpdateState":
        node.refuse(f"has no form in MindIR version {LITE_2_0_LEVEL}")


def _to_version_1(data: bytes, source: Path) -> bytes:
    """Serialised MindIR of version 1 or later -> of version 1."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from mindspore.train import mind_ir_pb2 as schema

    try:
        model = schema.ModelProto.FromString(data)
    except DecodeError as error:
        raise LiteExportError(f"{source} is not a MindIR file: {error}") from error
    if model.mind_ir_version <= LITE_2_0_LEVEL:
        return data
    if model.functions:
        raise LiteExportError(
            f"{source} has control flow ({model.functions[0].name}), which MindIR version "
            f"{LITE_2_0_LEVEL} cannot express here; write the network without branches on tensors"
        )
    for value in model.graph.input:
        if any(d < 0 for t in value.tensor for d in t.dims):
            raise LiteExportError(
                f"input {value.name!r} of {source} has a dynamic shape; "
                "export at a fixed batch size: the Lite runtime resizes the graph"
            )
    writer = Writer(schema, model)
    for node in model.graph.node:
        _write_node(writer, node)
    return writer.finish()
