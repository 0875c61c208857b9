"""The layers of a decoder as functions of explicit weights, for whole rows of tokens.

Activations are matrices [N, features] with N = rows * tokens, since products of matrices are what
a CPU does best.
"""

from __future__ import annotations

import numpy as np
from mindspore import Tensor, nn, ops

from msrl_accel.lm.config import LMConfig
from msrl_accel.lm.operators import Attention, Cut, RMSNorm, Rotate, Swap, SwiGLU
from msrl_accel.networks import Dense, Weights

MASKED = -1e30
"""Added to the score of a token that must not be seen; finite, so that no difference is NaN."""


class Block(nn.Cell):
    """One decoder layer; holds no weights, so that all layers share it.

    Tokens are rows [R, T], and before them prompts [M, P] that rows continue: a prompt is computed
    once, however many rows see its keys and values.
    """

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = config.n_heads, config.n_kv_heads
        self.head_dim = config.head_dim
        self.qkv_bias, self.qk_norm = config.qkv_bias, config.qk_norm
        self.order = layer_order(config)
        self.norm = RMSNorm(config.rms_norm_eps)
        self.linear = ops.MatMul(transpose_b=True)
        self.dense = Dense()
        self.rotate = Rotate()
        self.cut = Cut()
        self.swap = Swap()
        self.attention = Attention()
        self.swiglu = SwiGLU()

    def project(self, x: Tensor, weights: Weights, name: str) -> Tensor:
        weight = weights[self.order[f"{name}.weight"]]
        if self.qkv_bias:
            return self.dense(x, weight, weights[self.order[f"{name}.bias"]])
        return self.linear(x, weight)

    def vectors(self, x: Tensor, weights: Weights, name: str) -> Tensor:
        """Projection to [N, heads, head_dim], normalised where the architecture does so."""
        y = self.project(x, weights, f"self_attn.{name}_proj")
        if self.qk_norm:
            y = self.norm(
                y.reshape((-1, self.head_dim)), weights[self.order[f"self_attn.{name}_norm.weight"]]
            )
        return y.reshape((x.shape[0], -1, self.head_dim))

    def by_head(self, x: Tensor, rows: int) -> Tensor:
        """[B * T, heads, head_dim] -> [B, heads, T, head_dim]"""
        return self.swap(x.reshape((rows, -1, x.shape[1], self.head_dim)))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """Attention [B * T, n_heads * head_dim] of q [B * T, n_heads, head_dim].

        k and v are [B, kv, S, head_dim], bias [B * kv, group * T, S]. The queries that share a key
        head are rows of one product: keys are never repeated.
        """
        rows, _, seen, d = k.shape
        kv = rows * self.n_kv_heads
        y = self.attention(
            self.by_head(q, rows).reshape((kv, -1, d)),
            k.reshape((kv, seen, d)),
            v.reshape((kv, seen, d)),
            bias,
        )
        y = self.swap(y.reshape((rows, self.n_heads, -1, d)))
        return y.reshape((-1, self.n_heads * d))

    def attend(
        self, x: Tensor, weights: Weights, tables: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [N, H] normed -> [N, n_heads * head_dim], keys and values of the rows."""
        q_cos, q_sin, k_cos, k_sin, bias = tables[:5]
        q = self.rotate(self.vectors(x, weights, "q"), q_cos, q_sin)
        k = self.rotate(self.vectors(x, weights, "k"), k_cos, k_sin)
        v = self.project(x, weights, "self_attn.v_proj").reshape(k.shape)
        kv, group = self.n_kv_heads, self.n_heads // self.n_kv_heads
        rows = bias.shape[0] // kv
        if len(tables) == 5:
            k, v = self.by_head(k, rows), self.by_head(v, rows)
            return self.mix(q, k, v, bias), k, v
        prompt_bias, prompt_index = tables[5:]
        n_prompts = prompt_bias.shape[0] // kv
        places = rows * (bias.shape[1] // group)
        prompt_q, q = self.cut(q, places)
        prompt_k, k = self.cut(k, places)
        prompt_v, v = self.cut(v, places)
        prompt_k = self.by_head(prompt_k, n_prompts)
        prompt_v = self.by_head(prompt_v, n_prompts)
        k = self.behind(prompt_k, prompt_index, self.by_head(k, rows))
        v = self.behind(prompt_v, prompt_index, self.by_head(v, rows))
        mixed = (self.mix(prompt_q, prompt_k, prompt_v, prompt_bias), self.mix(q, k, v, bias))
        return ops.concat(mixed), k, v

    def behind(self, shared: Tensor, prompt_index: Tensor, own: Tensor) -> Tensor:
        """Keys or values [R, kv, P + T, head_dim]: each row's own behind its prompt's.

        shared: [M, kv, P, head_dim]; own: [R, kv, T, head_dim].
        """
        kv, length, d = shared.shape[1:]
        prompts = ops.gather(shared.reshape((-1, kv * length * d)), prompt_index, 0)
        return ops.concat((prompts.reshape((-1, kv, length, d)), own), 2)

    def construct(
        self, x: Tensor, weights: Weights, tables: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output [N, H], and the keys and values that the rows attended to.

        Args:
            x: [N, H], the tokens of the shared prompts, where there are any, before those of rows.
            weights: of the layer.
            tables: `CausalLM.tables`.
        """
        order = self.order
        h = self.norm(x, weights[order["input_layernorm.weight"]])
        h, k, v = self.attend(h, weights, tables)
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
