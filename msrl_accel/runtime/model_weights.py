"""Changing serialised MindIR and ONNX models without their libraries: weights, fewer outputs.

Both files are protobuf messages: ModelProto.graph (field 7) holds the weights, each a TensorProto
with a name and raw data. New weights of the same shape fit in the place of the old.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from msrl_accel.errors import PolicyError
from msrl_accel.export.names import WEIGHT_PREFIX


class Layout(NamedTuple):
    """Numbers of the protobuf fields of a kind of model."""

    weight: int
    """Of the weights in GraphProto."""
    name: int
    """Of a weight's name in TensorProto."""
    prefix: str = ""
    """Of the names of weights; other tensors are constants."""
    graph: int = 7
    raw_data: int = 9


MINDIR = Layout(weight=3, name=7)
ONNX = Layout(weight=5, name=8, prefix=WEIGHT_PREFIX)

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_NODE, _INITIALIZER, _INPUT, _OUTPUT = 1, 5, 11, 12
"""Numbers of fields of ONNX's GraphProto."""
_DIMS, _FLOAT = 1, 1
"""Number of the shape's field in TensorProto, and of the type float in its enumeration."""
_MINDIR_OUTPUT = 6
"""Of MindIR's GraphProto, whose nodes have ONNX's numbers."""


def weight_slots(model: bytes | bytearray, layout: Layout = MINDIR) -> dict[str, slice]:
    """Where the raw data of each weight is, by the weight's name.

    Raises:
        PolicyError: the model is truncated or no MindIR file.
    """
    slots = {}
    for graph in _fields(model, slice(0, len(model)), layout.graph):
        for weight in _fields(model, graph, layout.weight):
            names = [bytes(model[f]).decode() for f in _fields(model, weight, layout.name)]
            data = list(_fields(model, weight, layout.raw_data))
            if names and data and names[0].startswith(layout.prefix):
                slots[names[0][len(layout.prefix) :].rpartition(":")[2]] = data[0]
    if not slots:
        raise PolicyError("the model holds no weights; it is no file of a policy")
    return slots


def replace_weights(
    model: bytes, arrays: Mapping[str, np.ndarray], layout: Layout = MINDIR
) -> bytes:
    """The model with every weight taken from `arrays`, named as `Policy.arrays` names them.

    Raises:
        PolicyError: a weight of the model is missing in `arrays`, or has another size.
    """
    patched = bytearray(model)
    for name, slot in weight_slots(model, layout).items():
        if name not in arrays:
            raise PolicyError(f"weight {name!r} is missing; the weights are of another policy")
        data = np.ascontiguousarray(arrays[name], np.float32).tobytes()
        if len(data) != slot.stop - slot.start:
            raise PolicyError(
                f"weight {name!r} has {len(data) // 4} numbers, "
                f"this policy needs {(slot.stop - slot.start) // 4}"
            )
        patched[slot] = data
    return bytes(patched)


def weights_as_inputs(model: bytes) -> tuple[bytes, dict[str, tuple[int, ...]]]:
    """The ONNX model with each weight an input whose default is its value, and their shapes.

    That is how ONNX has it from IR version 4 on: a weight that is named among the inputs may be
    given with each call, and is a constant otherwise.
    """
    (graph,) = _fields(model, slice(0, len(model)), ONNX.graph)
    shapes: dict[str, tuple[int, ...]] = {}
    inputs = []
    for weight in _fields(model, graph, ONNX.weight):
        (full_name,) = _strings(model, weight, ONNX.name)
        if not full_name.startswith(ONNX.prefix):
            continue
        shape = tuple(_integers(model, weight, _DIMS))
        shapes[full_name[len(ONNX.prefix) :]] = shape
        dims = b"".join(_field(1, _key(1, _VARINT) + _as_varint(n)) for n in shape)
        tensor = _key(1, _VARINT) + _as_varint(_FLOAT) + _field(2, dims)
        inputs.append(_field(_INPUT, _field(1, full_name.encode()) + _field(2, _field(1, tensor))))
    return _with_graph(model, model[graph] + b"".join(inputs)), shapes


def only_output(model: bytes, name: str) -> bytes:
    """The ONNX model without the outputs but one, and without what only they need."""
    (graph,) = _fields(model, slice(0, len(model)), ONNX.graph)
    parts = list(_all_fields(model, graph))
    needed, kept = {name}, set()
    for part in reversed(parts):  # nodes are listed after those they read
        if part.number == _NODE and needed.intersection(_strings(model, part.content, 2)):
            needed.update(_strings(model, part.content, 1))
            kept.add(part)
    for part in parts:
        named = {_INITIALIZER: ONNX.name, _OUTPUT: 1}.get(part.number)
        tensor = None if named is None else _strings(model, part.content, named)
        wanted = {name} if part.number == _OUTPUT else needed
        if part.number != _NODE and (tensor is None or wanted.intersection(tensor)):
            kept.add(part)
    smaller = b"".join(model[part.start : part.content.stop] for part in parts if part in kept)
    return _with_graph(model, smaller)


def first_output(model: bytes) -> bytes:
    """The MindIR model with the first of its outputs as the only one.

    The graph returns a node that makes a tuple; it is told to return what that node reads first.
    Lite drops what is then not needed.
    """
    (graph,) = _fields(model, slice(0, len(model)), MINDIR.graph)
    parts = list(_all_fields(model, graph))
    (returned,) = (part for part in parts if part.number == _MINDIR_OUTPUT)
    (name,) = _strings(model, returned.content, 1)
    (maker,) = (p for p in parts if p.number == _NODE and name in _strings(model, p.content, 2))
    first = _strings(model, maker.content, 1)[0].encode()
    output = _field(_MINDIR_OUTPUT, _field(1, first))
    kept = (model[p.start : p.stop] for p in parts if p is not returned)
    return _with_graph(model, b"".join([*kept, output]))


def _with_graph(model: bytes, graph: bytes) -> bytes:
    """The model with another graph."""
    others = (p for p in _all_fields(model, slice(0, len(model))) if p.number != ONNX.graph)
    return b"".join([*(model[p.start : p.stop] for p in others), _field(ONNX.graph, graph)])


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited field of a message."""
    return b"".join([_key(number, _BYTES), _as_varint(len(content)), content])


def _key(number: int, kind: int) -> bytes:
    return bytes([number << 3 | kind])


def _integers(data: bytes, within: slice, number: int) -> Iterator[int]:
    """A repeated integer field, packed or not."""
    for field in _all_fields(data, within):
        if field.number == number:
            position, end = field.content.start, field.content.stop
            while position < end:
                value, position = _varint(data, position)
                yield value


def _strings(data: bytes, within: slice, number: int) -> list[str]:
    return [data[field].decode() for field in _fields(data, within, number)]


class _Field(NamedTuple):
    """A field of a message: where its key starts, and its content."""

    number: int
    kind: int
    start: int
    stop: int
    content_start: int

    @property
    def content(self) -> slice:
        return slice(self.content_start, self.stop)


def _fields(data: bytes | bytearray, within: slice, wanted: int) -> Iterator[slice]:
    """Places of the length-delimited fields with number `wanted` of the message at `within`."""
    for field in _all_fields(data, within):
        if field.number == wanted and field.kind == _BYTES:
            yield field.content


def _all_fields(data: bytes | bytearray, within: slice) -> Iterator[_Field]:
    position, end = within.start, within.stop
    while position < end:
        first = position
        key, position = _varint(data, position)
        number, kind = key >> 3, key & 7
        start = position
        if kind == _VARINT:
            _, position = _varint(data, position)
        elif kind == _BYTES:
            length, start = _varint(data, position)
            position = start + length
        elif kind in (_FIXED64, _FIXED32):
            position += 8 if kind == _FIXED64 else 4
        else:
            raise PolicyError(f"the model is damaged: unknown field type {kind}")
        if position > end:
            raise PolicyError("the model is damaged or truncated")
        yield _Field(number, kind, first, position, start)


def _as_varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _varint(data: bytes | bytearray, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(data) or shift > 63:
            raise PolicyError("the model is damaged or truncated")
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
