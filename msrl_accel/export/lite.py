"""MindIR for MindSpore Lite: rewrites a graph to the MindIR version that an older Lite reads.

MindSpore 2.10 writes MindIR version 3, where an operator is a function whose attributes are trailing
constant inputs. MindSpore Lite 2.0 reads version 1, where they are attributes of the primitive, and
it knows no operator that was added later. The graph that comes out has the same inputs and outputs
in the same order, and takes any batch size once the runtime has resized it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from msrl_accel.errors import MsrlError
from msrl_accel.files import write_bytes_atomic

LITE_2_0_LEVEL = 1
"""MindIR version that MindSpore Lite 2.0 reads."""


class LiteExportError(MsrlError):
    """A graph holds something that the wanted MindIR version cannot express."""


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


@dataclass(frozen=True)
class Signature:
    """Arguments of an operator of version 3: tensors first, then what version 1 calls attributes."""

    tensors: int
    attributes: tuple[str, ...] = ()


_UNARY, _BINARY = Signature(1), Signature(2)

# Operators whose version 1 form differs only in where the attributes are.
SIGNATURES: Mapping[str, Signature] = {
    **dict.fromkeys(
        [
            "Abs",
            "Exp",
            "Log",
            "Neg",
            "ReLU",
            "Sigmoid",
            "Sqrt",
            "Rsqrt",
            "Square",
            "Tanh",
            "Sin",
            "Cos",
        ],
        _UNARY,
    ),
    **dict.fromkeys(["Add", "Sub", "Mul", "Div", "RealDiv", "Pow", "Maximum", "Minimum"], _BINARY),
    **dict.fromkeys(["Equal", "Greater", "GreaterEqual", "Less", "LessEqual"], _BINARY),
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

# Attributes that were strings before they became numbers.
ENUMERATIONS: Mapping[str, Mapping[int, str]] = {"data_format": {0: "NCHW", 1: "NHWC"}}


_TENSOR_TYPES = {np.float32: "FLOAT", np.int32: "INT32"}

_REFERENCE = "REF::"
"""Prefix of a node's operator that is described in the model's list of primitives."""


@dataclass(frozen=True)
class _Node:
    """One operator of the source graph; `inputs` are names of tensors in the graph being written."""

    operator: str
    inputs: tuple[str, ...]
    output: str
    proto: Any

    def refuse(self, why: str) -> NoReturn:
        raise LiteExportError(
            f"operator {self.operator} at {self.proto.domain or self.output!r} {why}; "
            "use other operators there, or a MindSpore Lite that reads this MindIR version"
        )


class _Writer:
    """The version 1 model while it is written, node by node."""

    def __init__(self, schema: Any, source: Any) -> None:
        self.schema = schema
        self.source_primitives = {p.name: p for p in source.primitives}
        self.model = schema.ModelProto()
        self.model.CopyFrom(source)
        self.model.mind_ir_version = LITE_2_0_LEVEL
        self.model.ClearField("primitives")
        self.model.ClearField("user_info")
        self.model.graph.ClearField("node")
        self.aliases: dict[str, str] = {}
        self.constants: dict[str, Any] = {}
        self.tensors = {i.name: i.tensor[0] for i in source.graph.input}
        self.readers = Counter(name for node in source.graph.node for name in node.input)
        self.reshaped_bytes: dict[str, _Node] = {}
        self.emitted: dict[str, Any] = {}

    def add(self, source: Any) -> None:
        """Write one node of the source graph."""
        if source.op_type == "Constant":
            self.constants[source.output[0]] = source
            return
        primitive = self.source_primitives.get(source.op_type[len(_REFERENCE) :])
        operator = source.op_type if primitive is None else primitive.op_type
        inputs = tuple(self.aliases.get(name, name) for name in source.input)
        node = _Node(operator, inputs, source.output[0], source)
        if operator in ("Load", "Depend"):  # order of side effects, of which inference has none
            self.aliases[node.output] = inputs[0]
        elif operator in REWRITES:
            REWRITES[operator](self, node)
        elif operator in SIGNATURES:
            self._move_attributes(node, SIGNATURES[operator], primitive)
        elif operator in UNCHANGED:
            self._emit(node, primitive, inputs, node.output)
        elif operator != "UpdateState":
            node.refuse(f"has no form in MindIR version {LITE_2_0_LEVEL}")

    def emit(
        self,
        node: _Node,
        operator: str,
        inputs: Sequence[str],
        attributes: Mapping[str, bool] | None = None,
        output: str | None = None,
    ) -> str:
        """Write a node of the same shape as `node`; returns its name, by default that of `node`."""
        primitive = self.schema.PrimitiveProto(op_type=operator, instance_name="")
        for name, value in (attributes or {}).items():
            primitive.attribute.add(name=name, i=int(value), type=self.schema.AttributeProto.BOOL)
        return self._emit(node, primitive, inputs, output or node.output)

    def intermediate(self, node: _Node, operator: str, *inputs: str) -> str:
        """Write an elementwise node that feeds the replacement of `node`; returns its name."""
        name = f"{node.output}_{operator}_{len(self.emitted)}"
        return self.emit(node, operator, inputs, output=name)

    def copy(self, node: _Node, name: str) -> str:
        """Write a tensor equal to the one called `name`; returns its name."""
        if name not in self.emitted or name not in self.tensors:
            node.refuse("returns an input or a weight twice")
        is_int = self.tensors[name].data_type == self.schema.TensorProto.INT32
        lowest = self.scalar(np.iinfo(np.int32).min, np.int32) if is_int else self.scalar(-np.inf)
        copied = _Node("Maximum", (name, lowest), name, self.emitted[name])
        return self.intermediate(copied, "Maximum", *copied.inputs)

    def scalar(self, value: float, dtype: type = np.float32) -> str:
        """A scalar constant; returns its name."""
        name = f"scalar_{len(self.constants)}"
        constant = self.schema.NodeProto(name=name, op_type="Constant", output=[name])
        attribute = constant.attribute.add(name="value", type=self.schema.AttributeProto.TENSORS)
        attribute.tensors.add(
            name="value0",
            data_type=getattr(self.schema.TensorProto, _TENSOR_TYPES[dtype]),
            raw_data=dtype(value).tobytes(),
        )
        self.constants[name] = constant
        return name

    def integers(self, values: Sequence[int]) -> str:
        """A constant tuple of integers; returns its name."""
        kinds = self.schema.AttributeProto
        name = f"integers_{len(self.constants)}"
        constant = self.schema.NodeProto(name=name, op_type="Constant", output=[name])
        attribute = constant.attribute.add(name="value", type=kinds.TUPLE)
        for value in values:
            attribute.values.add(ints=[value], type=kinds.INT64)
        self.constants[name] = constant
        return name

    def value(self, node: _Node, position: int) -> Any:
        """The constant argument of `node` at `position`: number, None, or tuple of integers."""
        attribute = self._constant(node, position, f"argument {position}")
        kinds = self.schema.AttributeProto
        if attribute.type in (kinds.TUPLE, kinds.LIST):
            return tuple(int(v.ints[0]) for v in attribute.values)
        if attribute.type == kinds.NONE:
            return None
        return attribute.f if attribute.type == kinds.FLOAT else attribute.i

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor at the batch size of the source file."""
        return tuple(self.tensors[name].dims) if name in self.tensors else ()

    def declare(self, name: str, shape: Sequence[int]) -> None:
        """Correct the shape of a node written with that of another."""
        self.tensors[name].dims[:] = shape

    def is_bytes(self, name: str) -> bool:
        kind: int = self.schema.TensorProto.UINT8
        return name in self.tensors and self.tensors[name].data_type == kind

    def finish(self) -> bytes:
        """The serialised model."""
        for output in self.model.graph.output:
            output.name = self.aliases.get(output.name, output.name)
        used = {output.name for output in self.model.graph.output}
        nodes = []
        for node in reversed(self.emitted.values()):
            if node.output[0] in used:
                used.update(node.input)
                nodes.append(node)
        constants = [c for name, c in self.constants.items() if name in used]
        self.model.graph.node.extend([*constants, *reversed(nodes)])
        data: bytes = self.model.SerializeToString()
        return data

    def _move_attributes(self, node: _Node, signature: Signature, source: Any) -> None:
        """Write an operator whose trailing constant inputs become attributes."""
        count = signature.tensors
        if len(node.inputs) != count + len(signature.attributes):
            node.refuse(f"has {len(node.inputs)} arguments where {signature} is expected")
        primitive = self.schema.PrimitiveProto(op_type=node.operator, instance_name="")
        primitive.attribute.extend(source.attribute)
        for position, name in enumerate(signature.attributes, count):
            attribute = self._constant(node, position, name)
            added = primitive.attribute.add()
            added.CopyFrom(attribute)
            added.name = name
            if name in ENUMERATIONS:
                added.ClearField("i")
                added.type = self.schema.AttributeProto.STRING
                added.s = ENUMERATIONS[name][attribute.i].encode()
        self._emit(node, primitive, node.inputs[:count], node.output)

    def _constant(self, node: _Node, position: int, what: str) -> Any:
        constant = self.constants.get(node.inputs[position])
        if constant is None:
            node.refuse(f"has an argument ({what}) that is not constant")
        return constant.attribute[0]

    def _emit(self, node: _Node, primitive: Any, inputs: Iterable[str], output: str) -> str:
        written = self.schema.NodeProto()
        written.CopyFrom(node.proto)
        added = self.model.primitives.add()
        added.CopyFrom(primitive)
        added.ClearField("prim_type")
        added.name = f"{primitive.op_type}:{len(self.model.primitives)}"
        written.op_type = _REFERENCE + added.name
        written.ClearField("input")
        written.input.extend(inputs)
        written.name, written.output[0] = output, output
        if output != node.output:  # Lite merges nodes that have one name
            scope = written.domain.rpartition("/")[0]
            written.domain = f"{scope}/{primitive.op_type}-x{len(self.emitted)}"
        self.emitted[output] = written
        tensors = _declared_tensors(written)
        if len(tensors) == 1:
            self.tensors[output] = tensors[0]
        return output


def _rewrite_reshape(writer: _Writer, node: _Node) -> None:
    """A leading dimension that is kept becomes -1, so that the graph takes any batch size."""
    source, target = node.inputs
    if writer.is_bytes(source):
        writer.reshaped_bytes[node.output] = node  # Lite 2.0 cannot: reshaped after the cast
        return
    dims, shape = writer.value(node, 1), writer.shape(source)
    if shape and dims and dims[0] == shape[0] and -1 not in dims:
        target = writer.integers((-1, *dims[1:]))
    writer.emit(node, "Reshape", (source, target))


def _rewrite_cast(writer: _Writer, node: _Node) -> None:
    source, kind = node.inputs
    reshape = writer.reshaped_bytes.get(source)
    if reshape is None:
        writer.emit(node, "Cast", node.inputs)
        return
    bytes_, target = reshape.inputs
    numbers = writer.emit(node, "Cast", (bytes_, kind), output=f"{node.output}_numbers")
    writer.declare(numbers, writer.shape(bytes_))
    _rewrite_reshape(writer, _Node("Reshape", (numbers, target), node.output, node.proto))


def _rewrite_slice(writer: _Writer, node: _Node) -> None:
    """A leading dimension that is taken whole gets size -1, so that the graph takes any batch."""
    source, begin, size = node.inputs
    begins, sizes, shape = writer.value(node, 1), writer.value(node, 2), writer.shape(source)
    if shape and begins[0] == 0 and sizes[0] == shape[0]:
        size = writer.integers((-1, *sizes[1:]))
    writer.emit(node, "Slice", (source, begin, size))


def _rewrite_tuple(writer: _Writer, node: _Node) -> None:
    """A tensor that comes twice is copied: Lite merges outputs that are the same tensor."""
    members: list[str] = []
    for name in node.inputs:
        members.append(writer.copy(node, name) if name in members else name)
    writer.emit(node, "MakeTuple", members)


def _rewrite_transpose(writer: _Writer, node: _Node) -> None:
    """NHWC to NCHW goes through a matrix and a copy.

    Lite 2.0 would merge the transpose with the change of layout that it gives every convolution, and
    then reject the convolution.
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


def _rewrite_dense(writer: _Writer, node: _Node) -> None:
    x, weight, bias = node.inputs
    flags = {"transpose_a": False, "transpose_b": True}
    if bias in writer.constants:
        writer.emit(node, "MatMul", (x, weight), flags)
        return
    product = writer.emit(node, "MatMul", (x, weight), flags, output=f"{node.output}_product")
    writer.emit(node, "Add", (product, bias))


def _rewrite_muls(writer: _Writer, node: _Node) -> None:
    writer.emit(node, "Mul", (node.inputs[0], writer.scalar(writer.value(node, 1))))


def _rewrite_activation(writer: _Writer, node: _Node) -> None:
    """Lite 2.0 fuses an activation into the layer before it even if others read that layer too."""
    (x,) = node.inputs
    if writer.readers[node.proto.input[0]] > 1:
        x = writer.intermediate(node, "Maximum", x, writer.scalar(-np.inf))
    writer.emit(node, node.operator, (x,))


def _rewrite_silu(writer: _Writer, node: _Node) -> None:
    (x,) = node.inputs
    copied = writer.intermediate(node, "Maximum", x, writer.scalar(-np.inf))
    writer.emit(node, "Mul", (x, writer.intermediate(node, "Sigmoid", copied)))


def _rewrite_softplus(writer: _Writer, node: _Node) -> None:
    """max(x, 0) + log(1 + exp(-|x|)): log(1 + exp(x)) would overflow from x = 89 on."""
    (x,) = node.inputs
    negative = writer.intermediate(node, "Neg", writer.intermediate(node, "Abs", x))
    exp = writer.intermediate(node, "Exp", negative)
    log = writer.intermediate(node, "Log", writer.intermediate(node, "Add", exp, writer.scalar(1)))
    writer.emit(node, "Add", (writer.intermediate(node, "Maximum", x, writer.scalar(0)), log))


def _rewrite_clamp(writer: _Writer, node: _Node) -> None:
    x, *_ = node.inputs
    low, high = writer.value(node, 1), writer.value(node, 2)
    if high is None:
        writer.emit(node, "Maximum", (x, writer.scalar(low)))
        return
    if low is not None:
        x = writer.intermediate(node, "Maximum", x, writer.scalar(low))
    writer.emit(node, "Minimum", (x, writer.scalar(high)))


# Operators that version 1 does not know, or knows with other arguments.
REWRITES: Mapping[str, Callable[[_Writer, _Node], None]] = {
    "Cast": _rewrite_cast,
    "ClampScalar": _rewrite_clamp,
    "Dense": _rewrite_dense,
    "Muls": _rewrite_muls,
    **dict.fromkeys(("ReLU", "Sigmoid", "Tanh"), _rewrite_activation),
    "Reshape": _rewrite_reshape,
    "SiLU": _rewrite_silu,
    "Slice": _rewrite_slice,
    "Softplus": _rewrite_softplus,
    "Transpose": _rewrite_transpose,
    "MakeTuple": _rewrite_tuple,
    "make_list": _rewrite_tuple,
}


def _declared_tensors(node: Any) -> list[Any]:
    """Shapes and data types that a node declares for its outputs."""
    return [t for a in node.attribute if a.name == "shape" for t in a.tensors]


def _to_version_1(data: bytes, source: Path) -> bytes:
    """Serialised MindIR of version 1 or later -> of version 1."""
    from google.protobuf.message import DecodeError
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
    writer = _Writer(schema, model)
    for node in model.graph.node:
        writer.add(node)
    return writer.finish()
