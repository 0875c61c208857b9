"""Rewrites of the ONNX graph that MindSpore writes: what it gets wrong, and what runs slowly.

None changes a result by more than rounding; the parity gate of the export sees to that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper

from msrl_accel.export.names import BATCH, WEIGHT_PREFIX

Graph = Any
Node = Any

_TO_THE_END = np.iinfo(np.int64).max
_ACTIVATIONS = ("Tanh", "Relu")


def open_slices(graph: Graph) -> None:
    """Slices of size -1 reach to the end; MindSpore writes their end as begin - 1."""
    constants = {i.name: i for i in graph.initializer}
    sums = {node.output[0]: node for node in graph.node if node.op_type == "Add"}
    for node in graph.node:
        if node.op_type != "Slice" or node.input[2] not in sums:
            continue
        begin, size = (
            numpy_helper.to_array(constants[name]).astype(np.int64)
            for name in sums[node.input[2]].input
        )
        end = np.where(size == -1, _TO_THE_END, begin + size)
        name = f"{node.input[2]}.constant"
        if name not in constants:
            constants[name] = numpy_helper.from_array(end, name)
            graph.initializer.append(constants[name])
        node.input[2] = name


class _Makers:
    """Finds the node that makes a tensor."""

    def __init__(self, graph: Graph) -> None:
        self._nodes = {name: node for node in graph.node for name in node.output}

    def get(self, tensor: str, *operators: str) -> Node | None:
        """The maker of `tensor` if it is one of these operators."""
        node = self._nodes.get(tensor)
        return node if node is not None and node.op_type in operators else None

    def chain(self, tensor: str, *operators: str) -> Node | None:
        """Follow first inputs: the last operator's node, if all are as listed, from `tensor` up."""
        node = None
        for operator in operators:
            node = self.get(tensor, operator)
            if node is None:
                return None
            tensor = node.input[0]
        return node


def fuse_tanh(graph: Graph) -> None:
    """Write `networks.Tanh`, 2 t / (1 + t^2) of t = tanh(x / 2), as the Tanh that it is."""
    makers = _Makers(graph)
    for node in graph.node:
        if node.op_type != "Div":
            continue
        double = makers.get(node.input[0], "Add")
        square = makers.chain(node.input[1], "Add", "Mul")
        if double is None or square is None or len({*double.input, *square.input}) != 1:
            continue
        half = makers.chain(double.input[0], "Tanh", "Mul")
        if half is not None:
            node.CopyFrom(helper.make_node("Tanh", half.input[:1], list(node.output)))


def gather_log_prob(graph: Graph) -> None:
    """Take log p(a) out of log p by its index instead of a product with a one-hot vector."""
    makers = _Makers(graph)
    for i, node in enumerate(graph.node):
        product = makers.get(node.input[0], "Mul") if node.op_type == "ReduceSum" else None
        one_hot = product and makers.chain(product.input[1], "OneHot", "Cast")
        if not product or not one_hot or not makers.get(product.input[0], "LogSoftmax"):
            continue
        index, value = f"{node.output[0]}.index", f"{node.output[0]}.column"
        graph.node.insert(i, helper.make_node("Unsqueeze", one_hot.input[:1], [index], axes=[1]))
        graph.node.insert(
            i + 1,
            helper.make_node("GatherElements", [product.input[0], index], [value], axis=1),
        )
        graph.node[i + 2].CopyFrom(
            helper.make_node("Squeeze", [value], list(graph.node[i + 2].output), axes=[1])
        )


class _Stack(NamedTuple):
    """A tensor [M, B, ...] of the graph, as M tensors [B, ...]."""

    members: tuple[str, ...]
    weight: tuple[str, ...] = ()
    """Of a product whose bias has not been added yet."""


def unstack_members(graph: Graph) -> None:
    """Write perceptrons that MindSpore runs stacked, [M, B, ...], as M chains of plain layers.

    Engines run a plain layer several times faster than a stack of products.
    """
    makers, shapes = _Makers(graph), {i.name: tuple(i.dims) for i in graph.initializer}
    stacks: dict[str, _Stack] = {}
    nodes: list[Node] = []

    def each(operator: str, node: Node, inputs: list[list[str]], **attributes: Any) -> _Stack:
        names = tuple(f"{node.output[0]}.{m}" for m in range(len(inputs)))
        for given, name in zip(inputs, names):
            nodes.append(helper.make_node(operator, given, [name], **attributes))
        return _Stack(names)

    def parts(weight: str, squeeze: list[int]) -> tuple[str, ...]:
        """The M slices of a stacked weight; engines compute them once, when they load the model."""
        count = shapes[weight][0]
        pieces = [f"{weight}.{m}" for m in range(count)]
        nodes.append(helper.make_node("Split", [weight], pieces, axis=0, split=[1] * count))
        for piece in pieces:
            nodes.append(helper.make_node("Squeeze", [piece], [f"{piece}.flat"], axes=squeeze))
        return tuple(f"{piece}.flat" for piece in pieces)

    for node in graph.node:
        first = stacks.get(node.input[0]) if len(node.input) else None
        name = node.output[0]
        source = makers.chain(name, "Tile", "Reshape")
        if source is not None:
            count = int(numpy_helper.to_array(_constant(graph, makers, node.input[1]))[0])
            stacks[name] = _Stack((source.input[0],) * count)
        elif first is None:
            nodes.append(node)
        elif node.op_type == "MatMul":
            weight = makers.get(node.input[1], "Transpose")
            assert weight is not None
            stacks[name] = _Stack(first.members, parts(weight.input[0], [0]))
        elif node.op_type == "Add":
            inputs = zip(first.members, first.weight, parts(node.input[1], [0, 1]))
            stacks[name] = each("Gemm", node, [list(i) for i in inputs], transB=1)
        elif node.op_type in _ACTIVATIONS:
            stacks[name] = each(node.op_type, node, [[m] for m in first.members])
        elif node.op_type == "Split":
            stacks.update({out: _Stack((m,)) for out, m in zip(node.output, first.members)})
        elif node.op_type == "Identity":
            stacks[name] = first
        else:
            assert node.op_type == "Reshape"  # [1, B, n] becomes [B, n]
            nodes.append(helper.make_node("Identity", list(first.members), [name]))
    del graph.node[:]
    graph.node.extend(nodes)


def sum_values(graph: Graph) -> None:
    """Write a layer of one unit that ends as [B], a value, as a sum of products.

    ONNX Runtime adds up a product of one column term by term: of values around 50 that loses three
    times as much as a sum in parts, which is what other engines do.
    """
    makers, shapes = _Makers(graph), {i.name: tuple(i.dims) for i in graph.initializer}
    for node in list(graph.node):
        layer = makers.get(node.input[0], "Gemm") if node.op_type == "Reshape" else None
        if layer is None or shapes.get(layer.input[1], ())[:1] != (1,):
            continue
        x, weight, bias = layer.input
        name, position = layer.output[0], list(graph.node).index(layer)
        sums = [
            helper.make_node("Mul", [x, weight], [f"{name}.products"]),
            helper.make_node(
                "ReduceSum", [f"{name}.products"], [f"{name}.sum"], axes=[1], keepdims=0
            ),
            helper.make_node("Add", [f"{name}.sum", bias], [name]),
        ]
        graph.node.remove(layer)
        for i, each in enumerate(sums):
            graph.node.insert(position + i, each)
        node.CopyFrom(helper.make_node("Identity", [name], list(node.output)))


def _constant(graph: Graph, makers: _Makers, name: str) -> Any:
    node = makers.get(name, "Constant")
    if node is not None:
        return node.attribute[0].t
    return next(i for i in graph.initializer if i.name == name)


def bypass_identities(graph: Graph) -> None:
    """Let readers of a copy read the original."""
    sources: dict[str, str] = {}
    for node in graph.node:
        if node.op_type == "Identity":
            sources[node.output[0]] = sources.get(node.input[0], node.input[0])
    for node in graph.node:
        node.input[:] = [sources.get(name, name) for name in node.input]
    for output in graph.output:
        output.name = sources.get(output.name, output.name)


def remove_unread(graph: Graph) -> None:
    """Remove nodes and constants that no output depends on."""
    while True:
        read = {n for node in graph.node for n in node.input} | {o.name for o in graph.output}
        unread = [node for node in graph.node if not read.intersection(node.output)]
        if not unread:
            break
        for node in unread:
            graph.node.remove(node)
    for initializer in [i for i in graph.initializer if i.name not in read]:
        graph.initializer.remove(initializer)


def rename(graph: Graph, output_names: tuple[str, ...], weights: set[str]) -> None:
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
        graph.node.append(helper.make_node("Identity", [names.get(source, source)], [name]))


def open_batch(graph: Graph) -> None:
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


def check(model: Any) -> None:
    """Raise ValueError where the model is not valid ONNX."""
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ValueError(str(error)) from error
