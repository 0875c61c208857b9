"""The check of an ONNX file against what ATC documents."""

from __future__ import annotations

import pytest
from gymnasium import spaces
from om_helpers import write_onnx
from onnx import TensorProto, helper
from policy_helpers import spec_of

from msrl_accel.errors import ExportError
from msrl_accel.export.onnx_check import check_onnx_for_atc


def findings(path, **kwargs):
    return {(f.level, f.where): f.message for f in check_onnx_for_atc(path, **kwargs)}


def test_operator_sets_outside_the_range_are_errors(tmp_path):
    spec = spec_of(spaces.Discrete(2))
    assert not check_onnx_for_atc(write_onnx(tmp_path / "a.onnx", spec))
    new = write_onnx(tmp_path / "b.onnx", spec, opset=19)
    assert "9 to 18" in findings(new)["error", "opset"]
    middle = write_onnx(tmp_path / "c.onnx", spec, opset=14)
    assert "9 to 13" in findings(middle, cann="6.0.1")["error", "opset"]
    assert ("warning", "opset") in findings(middle, cann="12.1")


def test_unlisted_operators_types_and_axes_are_named(tmp_path):
    spec = spec_of(spaces.Discrete(2))
    nodes = [
        helper.make_node("SequenceConstruct", ["noise"], ["sequence"]),
        helper.make_node("Cast", ["noise"], ["indices"], to=TensorProto.INT64),
        helper.make_node("Constant", [], ["depth"], value_int=2),
        helper.make_node("Constant", [], ["values"], value_floats=[0.0, 1.0]),
        helper.make_node("OneHot", ["indices", "depth", "values"], ["hot"], axis=-1),
        helper.make_node("ArgMax", ["indices"], ["largest"]),
        helper.make_node("Cast", ["noise"], ["double"], to=TensorProto.DOUBLE),
        helper.make_node("Neg", ["double"], ["negative"]),
    ]
    model = write_onnx(tmp_path / "a.onnx", spec, opset=12, nodes=nodes)
    found = findings(model)
    assert "not among the documented operators" in found["warning", "SequenceConstruct"]
    assert "int64" in found["warning", "ArgMax"]
    assert "float64" in found["warning", "Neg"]
    assert ("warning", "OneHot") not in found
    assert "int32 only" in findings(model, cann="9.0.0")["warning", "OneHot"]


def test_images_are_pointed_out(bundle_folder):
    _, model, _ = bundle_folder
    assert "AIPP" in findings(model)["warning", "input image"]


def test_what_is_no_onnx_or_no_version_is_one_line(tmp_path):
    (tmp_path / "bad.onnx").write_bytes(b"\xffno")
    with pytest.raises(ExportError, match=r"bad\.onnx"):
        check_onnx_for_atc(tmp_path / "bad.onnx")
    with pytest.raises(ExportError, match="latest"):
        check_onnx_for_atc(tmp_path / "bad.onnx", cann="latest")
