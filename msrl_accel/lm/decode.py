"""One token for each of many rows, with keys and values cached: the inside of generation.

Activations are [features, N]: a matrix product then takes the weights as they are stored, and
sums over features are products with a row. Operators are few, since on CPU each costs some
microseconds whatever its size, and those that broadcast cost most.
"""

from __future__ import annotations

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops.auto_generate import SiLU

from msrl_accel.lm.config import LMConfig
from msrl_accel.lm.layers import MASKED, layer_order
from msrl_accel.lm.operators import RMSNorm, Swap
from msrl_accel.lm.rope import rope_tables
from msrl_accel.networks import Weights


class Decoder(nn.Cell):
    """The layers of a decoder at one new token a row, and the cache they read and write.

    A head group is the queries that share a key head, then that key and value: `g + 2` vectors of
    `head_dim`. A row's slots hold its prompt, padded on the right, then its new tokens, so that
    those of a step have the same slot in all rows. Unused slots are zero: writing is adding, the
    one way to write in place that neither copies the cache nor changes its shape.

    Args:
        config: the model.
        rows: N.
        prompt_length: slots for the prompt, P.
        steps: slots for new tokens, S.
    """

    def __init__(self, config: LMConfig, rows: int, prompt_length: int, steps: int) -> None:
        super().__init__(auto_prefix=False)
        self.config = config
        self.rows, self.prompt_length, self.steps = rows, prompt_length, steps
        self.kv, self.group = config.n_kv_heads, config.n_heads // config.n_kv_heads
        self.order = layer_order(config)
        n, slots, d = rows * self.kv, prompt_length + steps, config.head_dim
        self.keys = self._state("keys", (n, slots, d), config.n_layers)
        self.values = self._state("values", (n, slots, d), config.n_layers)
        (self.bias,) = self._state("bias", (n, self.group, slots), 1)
        self.seen = Tensor(np.full((n, self.group, 1), -MASKED, np.float32))
        self.unused = Tensor(np.zeros((n, steps, d), np.float32))
        self.unseen = Tensor(np.full((rows, steps), MASKED, np.float32))
        self.prompt_slots = Tensor(np.arange(prompt_length, dtype=np.int32).reshape((1, -1)))
        self.cos, self.sin = self._turns(*rope_tables(config, slots))
        self.swap = Tensor(np.array([1, 0], np.int32))
        self.mean = Tensor(np.full((1, config.hidden_size), 1.0 / config.hidden_size, np.float32))
        self.norm = RMSNorm(config.rms_norm_eps)
        self.swap_axes = Swap()
        self.matmul = ops.MatMul()
        self.matmul_ta = ops.MatMul(transpose_a=True)
        self.matmul_tb = ops.MatMul(transpose_b=True)
        self.scores = ops.BatchMatMul(transpose_b=True)
        self.mix = ops.BatchMatMul()
        self.softmax = ops.Softmax(-1)
        self.silu = SiLU()
        self.add_at_1 = ops.IndexAdd(1, check_index_bound=False)
        self.add_at_2 = ops.IndexAdd(2, check_index_bound=False)

    def _state(self, name: str, shape: tuple[int, ...], count: int) -> ParameterTuple:
        return ParameterTuple(
            [
                Parameter(Tensor(np.zeros(shape, np.float32)), f"cache.{name}.{i}", False)
                for i in range(count)
            ]
        )

    def _turns(self, cos: np.ndarray, sin: np.ndarray) -> tuple[Tensor, Tensor]:
        """Factors [slots, kv * (g + 2) * head_dim] of a vector and of itself with halves swapped.

        The scale of the scores is in those of the queries; values do not turn.
        """
        d = self.config.head_dim
        factors = np.zeros((2, len(cos), self.kv, self.group + 2, d), np.float32)
        factors[0] = np.concatenate([cos, cos], 1)[:, None, None]
        factors[1] = np.concatenate([-sin, sin], 1)[:, None, None]
        factors[:, :, :, : self.group] *= d**-0.5
        factors[0, :, :, -1], factors[1, :, :, -1] = 1.0, 0.0
        return tuple(Tensor(f.reshape(len(cos), -1)) for f in factors)

    def fuse(self, weights: Weights) -> Weights:
        """Weights of one layer as `construct` takes them: one matrix for queries, keys, values."""
        o, c = self.order, self.config
        fused: Weights = (
            weights[o["input_layernorm.weight"]].reshape((-1, 1)),
            self.transposed(self.grouped(weights, ".weight", c.hidden_size)),
            weights[o["self_attn.o_proj.weight"]],
            weights[o["post_attention_layernorm.weight"]].reshape((-1, 1)),
            weights[o["mlp.gate_proj.weight"]],
            weights[o["mlp.up_proj.weight"]],
            weights[o["mlp.down_proj.weight"]],
        )
        if c.qkv_bias:
            bias = self.grouped(weights, ".bias", 1).reshape((1, -1))
            fused = (*fused, ops.tile(bias, (self.rows, 1)))
        if c.qk_norm:
            q, k = weights[o["self_attn.q_norm.weight"]], weights[o["self_attn.k_norm.weight"]]
            fused = (*fused, q, k)
        return fused

    def grouped(self, weights: Weights, kind: str, columns: int) -> Tensor:
        """Projections to queries, keys and values with the rows in the order of head groups."""
        pieces = []
        for name in ("q", "k", "v"):
            w = weights[self.order[f"self_attn.{name}_proj{kind}"]]
            pieces.append(w.reshape((self.kv, -1, columns)))
        return ops.concat(pieces, 1).reshape((-1, columns))

    def transposed(self, x: Tensor) -> Tensor:
        """[R, C] -> [C, R]"""
        rows, columns = x.shape
        return self.swap_axes(x.reshape((1, rows, columns, 1))).reshape((columns, rows))

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm of x [H, N] over H, with weight [H, 1]; see `operators.RMSNorm`."""
        mean_square = self.matmul(self.mean, x * x)
        # The product of column and row writes every factor out: cheaper than two broadcasts.
        return x * self.matmul(weight, ops.rsqrt(mean_square + self.config.rms_norm_eps))

    def start_rows(self, prompt_lengths: Tensor) -> None:
        """Let every row [N] see its prompt, and no new token yet."""
        outside = ops.cast(self.prompt_slots >= prompt_lengths.reshape((-1, 1)), mstype.float32)
        bias = ops.concat((outside * MASKED, self.unseen), 1)
        bias = ops.tile(bias.reshape((self.rows, 1, -1)), (1, self.kv * self.group, 1))
        ops.assign(self.bias, bias.reshape(self.bias.shape))

    def start_layer(self, layer: int, keys: Tensor, values: Tensor, prompt_index: Tensor) -> None:
        """Put keys and values [M, kv, P, head_dim] of prompts into the cache of their rows [N]."""
        n, d, p = self.rows * self.kv, self.config.head_dim, self.prompt_length
        for cache, new in ((self.keys[layer], keys), (self.values[layer], values)):
            rows = ops.gather(new.reshape((new.shape[0], -1)), prompt_index, 0)
            ops.assign(cache, ops.concat((rows.reshape((n, p, d)), self.unused), 1))

    def attend(self, layer, qkv, extras, cos, sin, bias, slot):  # type: ignore[no-untyped-def]
        """qkv [N, kv * (g + 2) * head_dim] -> [N, n_heads * head_dim]; writes its slot."""
        c = self.config
        n, g, d = self.rows * self.kv, self.group, c.head_dim
        if c.qkv_bias:
            qkv = qkv + extras[0]
        if c.qk_norm:
            qkv = self.normed_heads(qkv, extras[-2], extras[-1])
        swapped = ops.gather(qkv.reshape((-1, 2, d // 2)), self.swap, 1).reshape(qkv.shape)
        turned = (qkv * cos + swapped * sin).reshape((n, (g + 2) * d))
        q = ops.slice(turned, (0, 0), (n, g * d)).reshape((n, g, d))
        k = ops.slice(turned, (0, g * d), (n, d)).reshape((n, 1, d))
        v = ops.slice(turned, (0, (g + 1) * d), (n, d)).reshape((n, 1, d))
        scores = self.scores(q, self.add_at_1(self.keys[layer], slot, k))
        mixed = self.mix(self.softmax(scores + bias), self.add_at_1(self.values[layer], slot, v))
        return mixed.reshape((self.rows, -1))

    def normed_heads(self, qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> Tensor:
        """Queries and keys divided by their root mean square, values as they are."""
        g, d = self.group, self.config.head_dim
        n = self.rows * self.kv
        vectors = qkv.reshape((n, (g + 2) * d))
        q = self.norm(ops.slice(vectors, (0, 0), (n, g * d)).reshape((-1, d)), q_weight)
        k = self.norm(ops.slice(vectors, (0, g * d), (n, d)), k_weight)
        v = ops.slice(vectors, (0, (g + 1) * d), (n, d))
        return ops.concat((q.reshape((n, g * d)), k, v), 1).reshape(qkv.shape)

    def construct(
        self, x: Tensor, layers: tuple[Weights, ...], positions: Tensor, step: Tensor
    ) -> Tensor:
        """Hidden states [H, N] before the final norm.

        Args:
            x: embeddings [H, N] of the new tokens.
            layers: `fuse` of each layer's weights.
            positions: [N] int32 of the new tokens.
            step: scalar int32, how many new tokens came before; each step is done once, in order.
        """
        slot = (step + self.prompt_length).reshape((1,))
        cos, sin = ops.gather(self.cos, positions, 0), ops.gather(self.sin, positions, 0)
        bias = self.add_at_2(self.bias, slot, self.seen)
        for layer in range(self.config.n_layers):
            before, qkv, out, after, gate, up, down = layers[layer][:7]
            h = self.matmul_ta(self.normed(x, before), qkv)
            h = self.attend(layer, h, layers[layer][7:], cos, sin, bias, slot)
            x = x + self.matmul_tb(out, h)
            h = self.normed(x, after)
            h = self.silu(self.matmul(gate, h)) * self.matmul(up, h)
            x = x + self.matmul(down, h)
        return x
