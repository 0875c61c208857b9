"""The operators of a decoder with their gradients in closed form.

Derived gradients are correct too, but have up to twice the operators. On CPU a product of two
tensors of one shape takes a third of the time of one that broadcasts, so vectors are written out
(`Tile`), and sums over short axes are products with ones.
"""

from __future__ import annotations

import numpy as np
from mindspore import Tensor, nn, ops

FEW_ROWS = 256
"""Up to here a broadcast costs less than the operator that avoids it, as in decoding."""


class RMSNorm(nn.Cell):
    """x / sqrt(mean(x^2) + epsilon) * weight over the last axis (Zhang & Sennrich 2019).

    construct(x [N, H], weight [H]) -> [N, H]
    """

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.matmul = ops.MatMul()
        self.tile = ops.Tile()

    def inverse_rms(self, x: Tensor) -> Tensor:
        inverse = ops.rsqrt((x * x).mean(-1, keep_dims=True) + self.epsilon)
        if x.shape[0] <= FEW_ROWS:
            return inverse
        return self.tile(inverse, (1, x.shape[1]))

    def on_rows(self, weight: Tensor, rows: int) -> Tensor:
        if rows <= FEW_ROWS:
            return weight
        return self.tile(weight.reshape((1, -1)), (rows, 1))

    def construct(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * self.inverse_rms(x) * self.on_rows(weight, x.shape[0])

    def bprop(self, x, weight, out, dout):  # type: ignore[no-untyped-def]
        """With n = x / rms and g = dout * weight: dx = (g - n mean(g n)) / rms."""
        rows, size = x.shape
        inverse_rms = self.inverse_rms(x)
        normed = x * inverse_rms
        product = dout * normed
        weight_grad = self.matmul(ops.ones((1, rows), x.dtype), product)
        mean = self.matmul(product, weight.reshape((-1, 1)) * (1.0 / size))
        g = dout * self.on_rows(weight, rows)
        dx = inverse_rms * (g - normed * self.tile(mean, (1, size)))
        return dx, weight_grad.reshape((-1,))


class Rotate(nn.Cell):
    """Turns pairs (i, i + D / 2) of x [..., D] by cosines and sines [..., D / 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = ops.Split(-1, 2)
        self.concat = ops.Concat(-1)

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = self.halves(x)
        return self.concat((first * cos - second * sin, second * cos + first * sin))

    def bprop(self, x, cos, sin, out, dout):  # type: ignore[no-untyped-def]
        first, second = self.halves(dout)
        dx = self.concat((first * cos + second * sin, second * cos - first * sin))
        return dx, ops.zeros_like(cos), ops.zeros_like(sin)


class Cut(nn.Cell):
    """construct(x [N, ...], n) -> all but the last n of x, the last n."""

    def construct(self, x: Tensor, n: int) -> tuple[Tensor, Tensor]:
        first = x.shape[0] - n
        rest = x.shape[1:]
        zeros = (0,) * len(rest)
        return ops.slice(x, (0, *zeros), (first, *rest)), ops.slice(x, (first, *zeros), (n, *rest))

    def bprop(self, x, n, out, dout):  # type: ignore[no-untyped-def]
        return ops.concat(dout), 0


class Swap(nn.Cell):
    """construct(x [A, B, C, D]) -> [A, C, B, D], by taking rows of a table.

    A compiled transpose keeps 8 to 16 bytes for each number it moves as long as its graph lives,
    and in a graph of many layers each has its own.
    """

    def swap(self, x: Tensor) -> Tensor:
        a, b, c, d = x.shape
        order = np.arange(a * b * c, dtype=np.int32).reshape((a, b, c)).swapaxes(1, 2)
        rows = ops.gather(x.reshape((-1, d)), Tensor(order.reshape(-1)), 0)
        return rows.reshape((a, c, b, d))

    def construct(self, x: Tensor) -> Tensor:
        return self.swap(x)

    def bprop(self, x, out, dout):  # type: ignore[no-untyped-def]
        return (self.swap(dout),)


class SwiGLU(nn.Cell):
    """silu(gate) * up, with silu(x) = x sigmoid(x) (Shazeer 2020, arXiv:2002.05202)."""

    def construct(self, gate: Tensor, up: Tensor) -> Tensor:
        return gate * ops.sigmoid(gate) * up

    def bprop(self, gate, up, out, dout):  # type: ignore[no-untyped-def]
        """silu' = silu + s (1 - silu), with s = sigmoid(gate); times up: out + s (up - out)."""
        sigmoid = ops.sigmoid(gate)
        return dout * (out + sigmoid * (up - out)), dout * (gate * sigmoid)


class Attention(nn.Cell):
    """softmax(q k^T + bias) v; q [M, S, D], k and v [M, T, D], bias [M, S, T]."""

    def __init__(self) -> None:
        super().__init__()
        self.matmul = ops.MatMul()
        self.product = ops.BatchMatMul()
        self.product_ta = ops.BatchMatMul(transpose_a=True)
        self.product_tb = ops.BatchMatMul(transpose_b=True)
        self.softmax = ops.Softmax(-1)

    def probabilities(self, q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
        return self.softmax(self.product_tb(q, k) + bias)

    def construct(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return self.product(self.probabilities(q, k, bias), v)

    def bprop(self, q, k, v, bias, out, dout):  # type: ignore[no-untyped-def]
        """dscores = p (dp - sum(p dp)), and sum(p dp) = sum(out dout), over the shorter axis."""
        p = self.probabilities(q, k, bias)
        size, length = q.shape[-1], k.shape[1]
        total = self.matmul((out * dout).reshape((-1, size)), ops.ones((size, length), q.dtype))
        dscores = p * (self.product_tb(dout, v) - total.reshape(p.shape))
        return (
            self.product(dscores, k),
            self.product_ta(dscores, q),
            self.product_ta(p, dout),
            ops.zeros_like(bias),
        )
