"""MindIR for MindSpore Lite: every operator the writer knows, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from lite_helpers import needs_lite

from msrl_accel.export.lite import REWRITES, SIGNATURES, UNCHANGED, write_lite_mindir
from msrl_accel.export.lite_writer import LiteExportError
from msrl_accel.runtime.lite_worker import ChildEngine

BATCHES = (1, 2, 5)


@pytest.fixture(scope="module")
def cells(graph_mode):
    """Small graphs that together use every operator of the tables."""
    from mindspore import Parameter, Tensor, mint, nn, ops
    from mindspore import dtype as mstype

    rng = np.random.default_rng(0)

    def weight(name, *shape):
        return Parameter(Tensor(rng.normal(size=shape).astype(np.float32)), name=name)

    class Elementwise(nn.Cell):
        def construct(self, x):
            y = ops.abs(x) + 0.5
            numbers = (
                *(ops.exp(x * 0.1), ops.log(y), ops.neg(x), ops.sqrt(y), ops.rsqrt(y)),
                *(x * x, ops.square(x), ops.sin(x), ops.cos(x), ops.div(x, y), ops.pow(y, 1.5)),
                *(ops.maximum(x, 0.3), ops.minimum(x, 0.3), x - y, ops.clamp(x, -0.5, 0.7)),
                *(ops.clamp(x, max=0.2), ops.clamp(x, min=-0.2), ops.RealDiv()(y, x + 20.0)),
            )
            truths = (x > 0.5, x >= 0.5, ops.less(x, y), x <= 0.5, ops.equal(x, x))
            floats = ()
            for truth in truths:
                floats = (*floats, ops.cast(truth, mstype.float32))
            return (*numbers, *floats, ops.select(x > 0.0, x, y))

    class Activations(nn.Cell):
        """Each on a layer that others read too, and on large numbers."""

        def __init__(self):
            super().__init__()
            self.w, self.b = weight("w", 6, 4), weight("b", 6)
            self.matmul, self.bias_add = ops.MatMul(transpose_b=True), ops.BiasAdd()

        def construct(self, x):
            layer = self.bias_add(self.matmul(x, self.w), self.b)
            single = self.bias_add(self.matmul(x, self.w), self.b * 2.0)
            return (
                *(layer, ops.relu(layer), ops.sigmoid(layer), ops.tanh(layer), ops.silu(layer)),
                *(ops.relu(single), ops.softplus(layer), ops.softplus(layer * 100.0)),
            )

    class Shapes(nn.Cell):
        def __init__(self):
            super().__init__()
            self.w = weight("w", 5, 4)
            self.argmax = ops.Argmax(-1, mstype.int32)

        def construct(self, x):
            n = x.shape[0]
            halves = ops.split(x, 2, 1)
            index = self.argmax(x)
            return (
                *(ops.concat((x, x), 1), ops.stack([x, -x], 1), x.expand_dims(1), halves[1]),
                *(x.reshape((n, 2, 2)), x.reshape((-1, 2)), ops.tile(x, (1, 3)), index),
                *(ops.slice(x, (0, 1), (n, 2)), ops.transpose(x.reshape((n, 2, 2)), (0, 2, 1))),
                *(ops.gather(self.w, index, 0), ops.squeeze(x.reshape((n, 4, 1)), 2), index),
                ops.one_hot(index, 4, Tensor(1.0, mstype.float32), Tensor(0.0, mstype.float32)),
            )

    class Products(nn.Cell):
        def __init__(self):
            super().__init__()
            self.w, self.b, self.stacked = weight("w", 6, 4), weight("b", 6), weight("s", 2, 4, 3)
            self.batch_matmul = ops.BatchMatMul()
            self.norm = nn.LayerNorm((4,))
            self.mean, self.sum, self.max = ops.ReduceMean(), ops.ReduceSum(True), ops.ReduceMax()
            self.linear = mint.nn.Linear(4, 3)

        def construct(self, x):
            pair = ops.tile(x.expand_dims(0), (2, 1, 1))
            return (
                *(ops.dense(x, self.w, self.b), ops.dense(x, self.w), self.linear(x)),
                *(self.batch_matmul(pair, self.stacked), self.norm(x), ops.softmax(x, -1)),
                *(
                    ops.log_softmax(x, -1),
                    ops.ReduceMean()(x, -1),
                    self.sum(x, -1),
                    self.max(x, -1),
                ),
            )

    class Images(nn.Cell):
        def __init__(self):
            super().__init__()
            self.w = weight("w", 8, 3, 3, 3)
            self.conv = ops.Conv2D(8, 3)
            self.matmul, self.v = ops.MatMul(transpose_b=True), weight("v", 2, 108)

        def construct(self, image):
            flat = ops.cast(image.reshape((image.shape[0], 108)), mstype.float32) * (1.0 / 255.0)
            x = ops.transpose(ops.cast(image, mstype.float32) * (1.0 / 255.0), (0, 3, 1, 2))
            return self.conv(x, self.w), self.matmul(flat, self.v)

    vector = rng.normal(size=(max(BATCHES), 4)).astype(np.float32)
    image = rng.integers(0, 256, (max(BATCHES), 6, 6, 3), np.uint8)
    vectors = (Elementwise, Activations, Shapes, Products)
    return {**{cell.__name__: (cell(), vector) for cell in vectors}, "Images": (Images(), image)}


def export(cell, inputs, path):
    import mindspore
    from mindspore import Tensor

    tensors = [Tensor(x) if isinstance(x, np.ndarray) else x for x in inputs]
    mindspore.export(cell, *tensors, file_name=str(path), file_format="MINDIR")
    return path


def operators(path):
    from mindspore.train import mind_ir_pb2

    model = mind_ir_pb2.ModelProto.FromString(path.read_bytes())
    return {p.op_type for p in model.primitives}, model.mind_ir_version


@needs_lite
@pytest.mark.parametrize("name", ["Elementwise", "Activations", "Shapes", "Products", "Images"])
def test_the_graph_computes_the_same_at_every_batch_size(name, cells, tmp_path):
    from mindspore import Tensor

    cell, x = cells[name]
    source = export(cell, [x[:1]], tmp_path / "source.mindir")
    target = tmp_path / "target.mindir"
    write_lite_mindir(source, target, level=1)
    assert operators(target)[1] == 1
    engine = ChildEngine(target.read_bytes())
    for n in BATCHES:
        outputs = engine.run([x[:n]])
        expected = [np.array(o.asnumpy()) for o in cell(Tensor(x[:n]))]
        assert len(outputs) == len(expected)
        for i, (output, reference) in enumerate(zip(outputs, expected)):
            assert output.shape == reference.shape, f"output {i}"
            assert output.dtype == reference.dtype, f"output {i}"
            np.testing.assert_allclose(output, reference, rtol=1e-5, atol=1e-5, err_msg=f"{i}")
    engine.close()


def test_the_graphs_above_use_every_operator_of_the_tables(cells, tmp_path):
    used = set()
    for name, (cell, x) in cells.items():
        used |= operators(export(cell, [x[:2]], tmp_path / f"{name}.mindir"))[0]
    assert {*SIGNATURES, *REWRITES, *UNCHANGED} - used == set()


def test_an_unknown_operator_is_refused_by_name_and_place(graph_mode, tmp_path):
    from mindspore import nn, ops

    class Inner(nn.Cell):
        def construct(self, x):
            return ops.erf(x)

    class Outer(nn.Cell):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def construct(self, x):
            return ops.tanh(self.inner(x))

    source = export(Outer(), [np.ones((2, 3), np.float32)], tmp_path / "source.mindir")
    with pytest.raises(LiteExportError, match=r"operator Erf at 'Default/inner-Inner"):
        write_lite_mindir(source, tmp_path / "target.mindir", level=1)
    assert not (tmp_path / "target.mindir").exists()


def test_control_flow_is_refused(graph_mode, tmp_path):
    from mindspore import nn

    class Loop(nn.Cell):
        def construct(self, x):
            while x.sum() < 10.0:
                x = x + 1.0
            return x

    source = export(Loop(), [np.ones((2, 3), np.float32)], tmp_path / "source.mindir")
    with pytest.raises(LiteExportError, match="control flow"):
        write_lite_mindir(source, tmp_path / "target.mindir", level=1)


def test_a_dynamic_batch_is_refused_with_the_remedy(graph_mode, tmp_path):
    from mindspore import Tensor, nn
    from mindspore import dtype as mstype

    source = export(
        nn.Dense(3, 2), [Tensor(shape=(None, 3), dtype=mstype.float32)], tmp_path / "source.mindir"
    )
    with pytest.raises(LiteExportError, match="dynamic shape; export at a fixed batch size"):
        write_lite_mindir(source, tmp_path / "target.mindir", level=1)


def test_a_newer_lite_gets_the_file_as_it_is(graph_mode, tmp_path):
    from mindspore import nn

    source = export(nn.Dense(3, 2), [np.ones((2, 3), np.float32)], tmp_path / "source.mindir")
    write_lite_mindir(source, tmp_path / "target.mindir", level=None)
    assert (tmp_path / "target.mindir").read_bytes() == source.read_bytes()
    with pytest.raises(LiteExportError, match="version 2 cannot be written"):
        write_lite_mindir(source, tmp_path / "target.mindir", level=2)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "source.mindir").write_bytes(b"\xff\xfe no MindIR")
    with pytest.raises(LiteExportError, match="not a MindIR file"):
        write_lite_mindir(tmp_path / "source.mindir", tmp_path / "target.mindir", level=1)
