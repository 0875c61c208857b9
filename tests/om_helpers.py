"""What the tests of OM export share: small ONNX files, and stand-ins for programs."""

from __future__ import annotations

import stat

import numpy as np
import onnx
from gymnasium import spaces
from onnx import TensorProto, helper

from msrl_accel.export.names import input_names

DICT = spaces.Dict(
    image=spaces.Box(0, 255, (3, 16, 16), np.uint8),
    **{"arm:angle": spaces.Box(-1, 1, (2, 2), np.float32)},
)
NPU_SMI_310P = """\
+--------------------------------------------------------------------------------------------------------+
| npu-smi 24.1.0                                   Version: 24.1.0                                       |
+-------------------------------+-----------------+------------------------------------------------------+
| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
+===============================+=================+======================================================+
| 0       310P3                 | OK              | NA           45                0     / 0             |
| 0       0                     | 0000:01:00.0    | 0            1437 / 21527                            |
+===============================+=================+======================================================+
"""  # noqa: E501


def write_onnx(path, spec, *, opset=11, nodes=None, types=None):
    """A file with the inputs of a policy and an operator on each."""
    kinds = [*(o.dtype for o in spec.observations), "float32"]
    shapes = [*(o.shape for o in spec.observations), (spec.action.noise_size,)]
    proto = {"uint8": TensorProto.UINT8, "float32": TensorProto.FLOAT}
    inputs = [
        helper.make_tensor_value_info(name, proto[kind], ["batch", *shape])
        for name, kind, shape in zip(input_names(spec), kinds, shapes)
    ]
    outputs = [
        helper.make_tensor_value_info(f"out{i}", i_.type.tensor_type.elem_type, None)
        for i, i_ in enumerate(inputs)
    ]
    chain = [helper.make_node("Identity", [i.name], [f"out{n}"]) for n, i in enumerate(inputs)]
    graph = helper.make_graph([*(nodes or []), *chain], "policy", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    onnx.save(model, str(path))
    return path


def install(folder, name, text):
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(text)
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file
