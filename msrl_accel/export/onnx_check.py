"""Checks an exported ONNX file against what the documentation of ATC says it takes.

The tables are those of "Supported ONNX Operators" of CANN. An operator outside them may still
work (CANN has parsers that its documentation does not list), so it is a warning, while an operator
set outside the documented range is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msrl_accel.errors import ExportError

ERROR, WARNING = "error", "warning"

_OPSETS: Mapping[int, tuple[int, int]] = {
    5: (9, 13),
    6: (9, 13),
    7: (9, 18),
    8: (9, 18),
    9: (9, 18),
}
"""Smallest and largest operator set, by major version of CANN."""

# The list of CANN 8.0.
_NAMES = """
    Abs Acos Acosh Add AffineGrid And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool
    BatchNormalization BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast Ceil Celu Clip
    Compress Concat Constant ConstantOfShape Conv ConvTranspose Cos Cosh CumSum DepthToSpace Det Div
    Dropout Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor Gather GatherElements GatherND
    Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool Greater GreaterOrEqual GridSample GRU Hardmax
    HardSigmoid HardSwish Identity If InstanceNormalization IsInf IsNaN LayerNormalization LeakyRelu
    Less LessOrEqual Log LogSoftmax LpNormalization LpPool LRN LSTM MatMul Max MaxPool MaxRoiPool
    MaxUnpool Mean MeanVarianceNormalization Min Mod Mul Multinomial Neg NonMaxSuppression NonZero
    Not OneHot Or Pad Pow PRelu RandomNormal RandomNormalLike RandomUniform RandomUniformLike Range
    Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin
    ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize ReverseSequence RoiAlign Round Scatter
    ScatterElements ScatterND Selu Shape Shrink Sigmoid Sign Sin Sinh Size Slice Softmax
    SoftmaxCrossEntropyLoss Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Tan Tanh
    TfIdfVectorizer ThresholdedRelu Tile TopK Transpose Trilu Unsqueeze Where Xor
"""
OPERATORS = frozenset(_NAMES.split())

# In no list, though CANN's published sources hold a parser.
_UNLISTED: Mapping[str, str] = {
    "SequenceConstruct": "CANN's sources hold a parser from operator set 11 on",
    "ConcatFromSequence": "CANN's sources hold a parser from operator set 11 on",
}


@dataclass(frozen=True)
class Finding:
    """Something in the graph that the target may refuse."""

    level: str
    """'error': outside what is documented; 'warning': not documented as supported."""
    where: str
    """Operator, input or operator set."""
    message: str

    def __str__(self) -> str:
        return f"{self.level}: {self.where}: {self.message}"


def check_onnx_for_atc(path: Path | str, cann: str = "8.0") -> list[Finding]:
    """What of an ONNX file is outside the limits that CANN's documentation sets.

    Args:
        path: the file.
        cann: version of CANN on the host that will run atc.

    Returns:
        Findings, errors first; [] where nothing is known against it.

    Raises:
        ExportError: the `onnx` package is missing, no such file, or `cann` is no version.
    """
    onnx = _import_onnx()
    version = _version(cann)
    try:
        model = onnx.shape_inference.infer_shapes(onnx.load(str(path)))
    except Exception as error:  # protobuf and onnx have exceptions of their own
        raise ExportError(f"{path} is no ONNX file that can be read: {error}") from error
    types = _types(onnx, model.graph)
    found = [
        *_check_opset(model, version, cann),
        *_check_inputs(onnx, model.graph),
        *_check_operators(model.graph, cann),
    ]
    for node in model.graph.node:
        found += _check_node(onnx, node, types, version, cann)
    return sorted(set(found), key=lambda f: (f.level != ERROR, f.where, f.message))


def _import_onnx() -> Any:
    try:
        import onnx
        import onnx.shape_inference
    except ImportError as error:
        raise ExportError(
            "checking ONNX needs the package onnx: pip install 'msrl_accel[onnx]'"
        ) from error
    return onnx


def _version(cann: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", cann)
    if not found:
        raise ExportError(f"cann = {cann!r} is no version of CANN: give for example 8.0")
    return int(found.group(1)), int(found.group(2))


def _types(onnx: Any, graph: Any) -> dict[str, str]:
    name = onnx.TensorProto.DataType.Name
    values = [*graph.value_info, *graph.input, *graph.output]
    types = {v.name: name(v.type.tensor_type.elem_type) for v in values}
    types.update({i.name: name(i.data_type) for i in graph.initializer})
    return {k: v.lower() for k, v in types.items()}


def _check_opset(model: Any, version: tuple[int, int], cann: str) -> Iterator[Finding]:
    limits = _OPSETS.get(version[0])
    if limits is None:
        yield Finding(WARNING, "opset", f"no table for CANN {cann}: compare with its documentation")
    for opset in model.opset_import:
        if opset.domain not in ("", "ai.onnx"):
            yield Finding(ERROR, "opset", f"the domain {opset.domain!r} is unknown to ATC")
        elif limits and not limits[0] <= opset.version <= limits[1]:
            yield Finding(
                ERROR,
                "opset",
                f"the file has operator set {opset.version}, CANN {cann} takes {limits[0]} to "
                f"{limits[1]}",
            )


def _check_inputs(onnx: Any, graph: Any) -> Iterator[Finding]:
    constants = {i.name for i in graph.initializer}
    for value in graph.input:
        if value.name in constants:
            continue
        tensor = value.type.tensor_type
        kind = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
        if kind == "uint8":
            yield Finding(
                WARNING,
                f"input {value.name}",
                "uint8: ATC documents uint8 inputs of ONNX models through AIPP (--insert_op_conf) "
                "only; without it the host may have to give float32",
            )
        elif kind not in ("float", "float16"):
            yield Finding(
                WARNING,
                f"input {value.name}",
                f"{kind}: ATC documents float32, float16 and uint8 inputs of ONNX models",
            )
        sizes = [d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim]
        if 0 in sizes:
            yield Finding(ERROR, f"input {value.name}", "a dimension is 0, which ATC does not take")
        if -1 in sizes[1:]:
            yield Finding(
                ERROR, f"input {value.name}", "a dimension other than the batch is open (E10018)"
            )


def _check_operators(graph: Any, cann: str) -> Iterator[Finding]:
    for name in sorted({node.op_type for node in graph.node} - OPERATORS):
        note = _UNLISTED.get(name, "compare with the operator list of your CANN")
        yield Finding(WARNING, name, f"not among the documented operators of CANN 8.0; {note}")


def _check_node(
    onnx: Any, node: Any, types: Mapping[str, str], version: tuple[int, int], cann: str
) -> Iterator[Finding]:
    """Documented limits of single operators."""
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    inputs = [types.get(name) for name in node.input]
    if node.op_type in ("ArgMax", "ArgMin") and inputs[0] not in ("float", "float16", None):
        yield Finding(WARNING, node.op_type, f"takes float32 and float16, not {inputs[0]}")
    if node.op_type == "OneHot":
        if attributes.get("axis", -1) < -1:
            yield Finding(ERROR, "OneHot", "axis below -1 is not supported")
        if version >= (8, 5) and "int64" in inputs[:2]:
            yield Finding(
                WARNING,
                "OneHot",
                f"indices and depth are int64, the documentation of CANN {cann} lists int32 only",
            )
    if "double" in inputs:
        yield Finding(WARNING, node.op_type, "takes float64, which AI Cores do not compute")
