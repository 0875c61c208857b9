"""The operators and their closed-form gradients against NumPy and derived gradients."""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from msrl_accel.lm.operators import FEW_ROWS, Attention, RMSNorm, Rotate, Swap, SwiGLU

pytestmark = pytest.mark.usefixtures("graph_mode")


class PlainRMSNorm(nn.Cell):
    def construct(self, x, weight):
        return x / ops.sqrt((x * x).mean(-1, keep_dims=True) + 1e-5) * weight


class PlainRotate(nn.Cell):
    def construct(self, x, cos, sin):
        half = x.shape[-1] // 2
        turned = ops.concat((-x[..., half:], x[..., :half]), -1)
        return x * ops.concat((cos, cos), -1) + turned * ops.concat((sin, sin), -1)


class PlainSwiGLU(nn.Cell):
    def construct(self, gate, up):
        return gate / (1.0 + ops.exp(-gate)) * up


class PlainSwap(nn.Cell):
    def construct(self, x):
        return ops.transpose(x, (0, 2, 1, 3))


class PlainAttention(nn.Cell):
    def construct(self, q, k, v, bias):
        scores = ops.exp(ops.matmul(q, k.transpose(0, 2, 1)) + bias)
        return ops.matmul(scores / scores.sum(-1, keepdims=True), v)


class Weighted(nn.Cell):
    """A scalar whose gradient reaches every output differently."""

    def __init__(self, operator):
        super().__init__()
        self.operator = operator

    def construct(self, weight, *inputs):
        return (self.operator(*inputs) * weight).sum()


CASES = {
    "rms_norm_few_rows": (RMSNorm(1e-5), PlainRMSNorm(), [(5, 6), (6,)], 2),
    "rms_norm_many_rows": (RMSNorm(1e-5), PlainRMSNorm(), [(FEW_ROWS + 3, 6), (6,)], 2),
    "rotate": (Rotate(), PlainRotate(), [(2, 3, 4, 6), (2, 3, 4, 3), (2, 3, 4, 3)], 1),
    "swap": (Swap(), PlainSwap(), [(2, 3, 3, 5)], 1),
    "swiglu": (SwiGLU(), PlainSwiGLU(), [(5, 7), (5, 7)], 2),
    "attention": (Attention(), PlainAttention(), [(2, 6, 4), (2, 3, 4), (2, 3, 4), (2, 6, 3)], 3),
}


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients(name):
    operator, plain, shapes, n_gradients = CASES[name]
    rng = np.random.default_rng(0)
    inputs = [Tensor(rng.standard_normal(s, np.float32)) for s in shapes]
    weight = Tensor(rng.standard_normal(shapes[0], np.float32))
    positions = tuple(range(1, 1 + n_gradients))
    results = [
        ops.value_and_grad(Weighted(o), positions)(weight, *inputs) for o in (operator, plain)
    ]
    (value, gradients), (plain_value, plain_gradients) = results
    np.testing.assert_allclose(value.asnumpy(), plain_value.asnumpy(), rtol=1e-5, atol=1e-5)
    for gradient, expected in zip(gradients, plain_gradients):
        np.testing.assert_allclose(gradient.asnumpy(), expected.asnumpy(), rtol=2e-4, atol=2e-5)


def test_attention_gives_nothing_to_hidden_tokens():
    """A key hidden by the bias has no gradient, whatever its size."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 3, 4), np.float32) for _ in range(3))
    k[0, 2] = 1e4
    bias = np.where(np.tri(3, dtype=bool), 0.0, -1e30).astype(np.float32)[None]
    weight = np.array([[[1.0], [1.0], [0.0]]], np.float32) * np.ones((1, 3, 4), np.float32)
    function = ops.grad(Weighted(Attention()), (1, 2, 3))
    dq, dk, dv = function(*map(Tensor, (weight, q, k, v, bias)))
    assert np.all(dk.asnumpy()[0, 2] == 0) and np.all(dv.asnumpy()[0, 2] == 0)
    assert np.all(np.isfinite(dq.asnumpy()))
