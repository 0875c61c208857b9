"""A MindIR model of version 1 while it is written, node by node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np

from msrl_accel.errors import ExportError

LITE_2_0_LEVEL = 1
"""MindIR version that MindSpore Lite 2.0 reads."""

# Attributes that were strings before they became numbers.
ENUMERATIONS: Mapping[str, Mapping[int, str]] = {"data_format": {0: "NCHW", 1: "NHWC"}}

_NUMPY_TYPES: Mapping[str, Any] = {"FLOAT": np.float32, "INT32": np.int32}

REFERENCE = "REF::"
"""Prefix of a node's operator that is described in the model's list of primitives."""


class LiteExportError(ExportError):
    """A graph holds something that the wanted MindIR version cannot express."""


@dataclass(frozen=True)
class Signature:
    """Arguments of an operator of version 3: tensors, then what version 1 calls attributes."""

    tensors: int
    attributes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Node:
    """One operator of the source graph; `inputs` are names in the graph being written."""

    operator: str
    inputs: tuple[str, ...]
    output: str
    proto: Any
    primitive: Any

    def refuse(self, why: str) -> NoReturn:
        raise LiteExportError(
            f"operator {self.operator} at {self.proto.domain or self.output!r} {why}; "
            "use other operators there, or a MindSpore Lite that reads this MindIR version"
        )


class Writer:
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
        self.tensors.update((p.name, p) for p in source.graph.parameter)
        self.readers = Counter(name for node in source.graph.node for name in node.input)
        self.reshaped_bytes: dict[str, Node] = {}
        self.emitted: dict[str, Any] = {}

    def read(self, source: Any) -> Node:
        """A node of the source graph; a reference to another graph is an operator of its name."""
        primitive = self.source_primitives.get(source.op_type[len(REFERENCE) :])
        operator = source.op_type if primitive is None else primitive.op_type
        inputs = tuple(self.aliases.get(name, name) for name in source.input)
        return Node(operator, inputs, source.output[0], source, primitive)

    def emit_unchanged(self, node: Node) -> None:
        """Write a node as it is."""
        self._emit(node, node.primitive, node.inputs, node.output)

    def emit_with_attributes(self, node: Node, signature: Signature) -> None:
        """Write an operator whose trailing constant inputs become attributes."""
        count = signature.tensors
        if len(node.inputs) != count + len(signature.attributes):
            node.refuse(f"has {len(node.inputs)} arguments where {signature} is expected")
        primitive = self.schema.PrimitiveProto(op_type=node.operator, instance_name="")
        primitive.attribute.extend(node.primitive.attribute)
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

    def emit(
        self,
        node: Node,
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

    def intermediate(self, node: Node, operator: str, *inputs: str) -> str:
        """Write an elementwise node that feeds the replacement of `node`; returns its name."""
        name = f"{node.output}_{operator}_{len(self.emitted)}"
        return self.emit(node, operator, inputs, output=name)

    def copy(self, node: Node, name: str) -> str:
        """Write a tensor equal to the one called `name`, an input of `node`; returns its name."""
        original = self.tensors.get(name)
        if original is None:
            node.refuse("takes the same list of tensors twice")
        is_int = original.data_type == self.schema.TensorProto.INT32
        lowest = self.scalar(np.iinfo(np.int32).min, "INT32") if is_int else self.scalar(-np.inf)
        proto = self.schema.NodeProto(output=[name], domain=node.proto.domain)
        shape = proto.attribute.add(name="shape", type=self.schema.AttributeProto.TENSORS)
        shape.tensors.add(dims=original.dims, data_type=original.data_type)
        return self.intermediate(replace(node, output=name, proto=proto), "Maximum", name, lowest)

    def scalar(self, value: float, kind: str = "FLOAT") -> str:
        """A scalar constant, FLOAT or INT32; returns its name."""
        name = f"scalar_{len(self.constants)}"
        constant = self.schema.NodeProto(name=name, op_type="Constant", output=[name])
        attribute = constant.attribute.add(name="value", type=self.schema.AttributeProto.TENSORS)
        attribute.tensors.add(
            name="value0",
            data_type=getattr(self.schema.TensorProto, kind),
            raw_data=_NUMPY_TYPES[kind](value).tobytes(),
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

    def value(self, node: Node, position: int) -> Any:
        """The constant argument of `node` at `position`: number, None, or tuple of integers.

        A tensor of one float32 counts as a number.
        """
        attribute = self._constant(node, position, f"argument {position}")
        kinds = self.schema.AttributeProto
        if attribute.type in (kinds.TUPLE, kinds.LIST):
            return tuple(int(v.ints[0]) for v in attribute.values)
        if attribute.type == kinds.NONE:
            return None
        if attribute.type == kinds.TENSORS and len(attribute.tensors[0].raw_data) == 4:
            return float(np.frombuffer(attribute.tensors[0].raw_data, np.float32)[0])
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

    def _constant(self, node: Node, position: int, what: str) -> Any:
        constant = self.constants.get(node.inputs[position])
        if constant is None:
            node.refuse(f"has an argument ({what}) that is not constant")
        return constant.attribute[0]

    def _emit(self, node: Node, primitive: Any, inputs: Iterable[str], output: str) -> str:
        written = self.schema.NodeProto()
        written.CopyFrom(node.proto)
        added = self.model.primitives.add()
        added.CopyFrom(primitive)
        added.ClearField("prim_type")
        added.name = f"{primitive.op_type}:{len(self.model.primitives)}"
        written.op_type = REFERENCE + added.name
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


def _declared_tensors(node: Any) -> list[Any]:
    """Shapes and data types that a node declares for its outputs."""
    return [t for a in node.attribute if a.name == "shape" for t in a.tensors]
