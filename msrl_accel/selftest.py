"""Self-tests of single engines, one a process: `python -m msrl_accel.selftest ENGINE`.

Each computes something small and compares it with NumPy. msrl-doctor runs them in processes of
their own, so that an engine that crashes or hangs takes nothing else down.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

_A = np.arange(6, dtype=np.float32).reshape(2, 3)
_B = np.arange(12, dtype=np.float32).reshape(3, 4) - 5


def graph() -> str:
    """MindSpore compiles and runs a matrix product."""
    import mindspore as ms

    class Product(ms.nn.Cell):
        def construct(self, a: Any, b: Any) -> Any:
            return ms.ops.matmul(a, b)

    ms.set_context(mode=ms.GRAPH_MODE)
    _compare(Product()(ms.Tensor(_A), ms.Tensor(_B)).asnumpy())
    return f"MindSpore {ms.__version__} on {ms.get_context('device_target')}: a compiled product"


def onnx() -> str:
    """onnxruntime runs a matrix product; without the onnx package it is only loaded."""
    import onnxruntime

    name = f"onnxruntime {onnxruntime.__version__}"
    try:
        model = _product_model()
    except ImportError:
        providers = ", ".join(onnxruntime.get_available_providers())
        return f"{name}: loaded ({providers}); with the package onnx a product would be run"
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    _compare(session.run(None, {"a": _A, "b": _B})[0])
    return f"{name}: a product"


def lite() -> str:
    """MindSpore Lite is loaded, and must refuse what is no model."""
    from msrl_accel.runtime import lite_setup
    from msrl_accel.runtime.lite_engine import load_library, open_engine
    from msrl_accel.runtime.lite_setup import LiteError

    version = lite_setup.installed_version()
    if lite_setup.package_version() is None:
        load_library(lite_setup.shim_path())
    else:
        importlib.import_module(lite_setup.PACKAGE)
    try:
        open_engine(b"not a model")
    except LiteError:
        return f"MindSpore Lite {version}: loaded, and refuses a damaged model"
    raise RuntimeError("MindSpore Lite took a damaged model")


def om() -> str:
    """pyACL opens the first device that this process sees."""
    from msrl_accel.runtime.acl_session import load_engine

    acl = load_engine("acl")
    _acl_ok(acl.init(), "acl.init")
    try:
        count, code = acl.rt.get_device_count()
        _acl_ok(code, "acl.rt.get_device_count")
        _acl_ok(acl.rt.set_device(0), "acl.rt.set_device")
        acl.rt.reset_device(0)
    finally:
        acl.finalize()
    return f"pyACL: {count} device(s), the first one opens"


TESTS: Mapping[str, Callable[[], str]] = {"graph": graph, "onnx": onnx, "lite": lite, "om": om}


def _product_model() -> bytes:
    from onnx import TensorProto, helper

    def tensor(name: str) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, None])

    node = helper.make_node("MatMul", ["a", "b"], ["c"])
    body = helper.make_graph([node], "product", [tensor("a"), tensor("b")], [tensor("c")])
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", 11)], ir_version=4)
    return bytes(model.SerializeToString())


def _compare(found: np.ndarray) -> None:
    if not np.array_equal(found, _A @ _B):
        raise RuntimeError("the product is wrong")


def _acl_ok(code: int, what: str) -> None:
    if code != 0:
        raise RuntimeError(f"{what} failed with aclError {code}")


if __name__ == "__main__":
    print(TESTS[sys.argv[1]]())
