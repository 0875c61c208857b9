"""The layers of a decoder as functions of explicit weights, for whole rows of tokens.

Activations are matrices [N, features] with N = rows * tokens, since products of matrices are what
a CPU does best.
"""

from __future__ import annotations

import numpy as np
from mindspore import Tensor, nn, ops

from msrl_accel.lm.config import LMConfig
from msrl_accel.lm.operators import Attention, RMSNorm, Rotate, SwiGLU
from msrl_accel.networks import Dense, Weights

MASKED = -1e30
"""Added to the score of a token that must not be seen; finite, so that no difference is NaN."""


class Block(nn.Cell):
    """One decoder layer on [B, T] tokens; holds no weights, so that all layers share it."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = config.n_heads, config.n_kv_heads
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.qkv_bias, self.qk_norm = config.qkv_bias, config.qk_norm
        self.order = layer_order(config)
        self.norm = RMSNorm(config.rms_norm_eps)
        self.linear = ops.MatMul(transpose_b=True)
        self.dense = Dense()
        self.rotate = Rotate()
        self.attention = Attention()
        self.swiglu = SwiGLU()

    def project(self, x: Tensor, weights: Weights, name: str) -> Tensor:
        weight = weights[self.order[f"{name}.weight"]]
        if self.qkv_bias:
            return self.dense(x, weight, weights[self.order[f"{name}.bias"]])
        return self.linear(x, weight)

    def heads(self, x: Tensor, weights: Weights, name: str, rows: int) -> Tensor:
        """Projection to [B, heads, T, head_dim], normalised where the architecture does so."""
        y = self.project(x, weights, f"self_attn.{name}_proj")
        if self.qk_norm and name != "v":
            y = self.norm(
                y.reshape((-1, self.head_dim)), weights[self.order[f"self_attn.{name}_norm.weight"]]
            )
        n = self.n_heads if name == "q" else self.n_kv_heads
        return ops.transpose(y.reshape((rows, -1, n, self.head_dim)), (0, 2, 1, 3))

    def attend(
        self, x: Tensor, weights: Weights, cos: Tensor, sin: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [B * T, H] normed -> [B * T, n_heads * head_dim], keys, values [B, kv, T, head_dim].

        The queries that share a key head are rows of one product: keys are never repeated.
        bias: [B * kv, group * T, T].
        """
        rows, tokens = cos.shape[0], cos.shape[2]
        kv, d = rows * self.n_kv_heads, self.head_dim
        # The scale of the scores is in the queries' table: cos and sin are the same in all layers.
        q_cos = ops.tile(cos * self.scale, (1, self.n_heads, 1, 1))
        q_sin = ops.tile(sin * self.scale, (1, self.n_heads, 1, 1))
        k_cos = ops.tile(cos, (1, self.n_kv_heads, 1, 1))
        k_sin = ops.tile(sin, (1, self.n_kv_heads, 1, 1))
        q = self.rotate(self.heads(x, weights, "q", rows), q_cos, q_sin)
        k = self.rotate(self.heads(x, weights, "k", rows), k_cos, k_sin)
        v = self.heads(x, weights, "v", rows)
        y = self.attention(
            q.reshape((kv, -1, d)), k.reshape((kv, tokens, d)), v.reshape((kv, tokens, d)), bias
        )
        y = ops.transpose(y.reshape((rows, self.n_heads, tokens, d)), (0, 2, 1, 3))
        return y.reshape((rows * tokens, self.n_heads * d)), k, v

    def construct(
        self, x: Tensor, weights: Weights, cos: Tensor, sin: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output [B * T, H], and the keys and values it attended to."""
        order = self.order
        h = self.norm(x, weights[order["input_layernorm.weight"]])
        h, k, v = self.attend(h, weights, cos, sin, bias)
        x = x + self.linear(h, weights[order["self_attn.o_proj.weight"]])
        h = self.norm(x, weights[order["post_attention_layernorm.weight"]])
        gate = self.linear(h, weights[order["mlp.gate_proj.weight"]])
        up = self.linear(h, weights[order["mlp.up_proj.weight"]])
        x = x + self.linear(self.swiglu(gate, up), weights[order["mlp.down_proj.weight"]])
        return x, k, v


def layer_order(config: LMConfig) -> dict[str, int]:
    """Name of a layer's weight -> its place among the layer's weights."""
    prefix = "model.layers.0."
    names = [name for name in config.weight_shapes() if name.startswith(prefix)]
    return {name[len(prefix) :]: i for i, name in enumerate(names)}


def initial_weight(
    config: LMConfig, name: str, shape: tuple[int, ...], rng: np.random.Generator
) -> np.ndarray:
    """Start of training from nothing; biases zero, norms one.

    Matrices are normal of deviation sqrt(2 / (5 hidden_size)) (Nguyen & Salazar 2019,
    arXiv:1910.05895), those that write to the residual stream of that divided by sqrt(2 * layers)
    (Radford et al. 2019). GPT-2's 0.02 is the same at its size, and too little for small models.
    """
    if len(shape) == 1:
        return np.full(shape, 0.0 if name.endswith(".bias") else 1.0, np.float32)
    deviation = np.sqrt(0.4 / config.hidden_size)
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        deviation /= np.sqrt(2.0 * config.n_layers)
    values: np.ndarray = rng.standard_normal(shape, np.float32) * np.float32(deviation)
    return values
