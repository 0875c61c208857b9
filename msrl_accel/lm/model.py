"""Decoder-only language models of the Llama, Qwen2.5 and Qwen3 layouts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype

from msrl_accel.errors import LMError
from msrl_accel.lm.config import LMConfig
from msrl_accel.lm.head import LogProbHead, no_kept
from msrl_accel.lm.layers import MASKED, Block, initial_weight, layer_order
from msrl_accel.lm.operators import RMSNorm
from msrl_accel.lm.rope import rope_tables
from msrl_accel.networks import Weights, WeightSpec, set_parameter


class CausalLM(nn.Cell):
    """A decoder whose weights are arguments of its methods; it also holds one set of them.

    The same methods run on its own Parameters (rollout, export) and on the slices of the one
    vector that an optimiser steps. `weights` follow `weight_specs`: embedding, layers, final norm,
    and, where embeddings are not tied, `lm_head.weight`; names are those of Hugging Face.

    A row of tokens may hold several segments (packing): a token sees the tokens of its segment up
    to itself, and the prompt that its row continues, where prompts are shared. Segment -1 marks
    padding.

    Args:
        config: the model.
        seed: of the initial weights; None leaves them zero, to be loaded.
        recompute: compute the activations of a layer again in the backward pass, which needs
            memory for one layer's instead of all and takes about a third longer.
    """

    def __init__(self, config: LMConfig, seed: int | None = 0, recompute: bool = False) -> None:
        super().__init__(auto_prefix=False)
        self.config = config
        self.weight_specs = [
            WeightSpec(name, shape, _initialiser(config, name, shape, seed))
            for name, shape in config.weight_shapes().items()
        ]
        rng = np.random.default_rng([0 if seed is None else seed, 0])
        self.weights = ParameterTuple(
            [Parameter(Tensor(s.initial(rng)), name=s.name) for s in self.weight_specs]
        )
        self.per_layer = len(layer_order(config))
        self.block = Block(config)
        if recompute:
            self.block.recompute()
        self.norm = RMSNorm(config.rms_norm_eps)
        self.linear = ops.MatMul(transpose_b=True)
        self.head = LogProbHead(config.vocab_size, restricted=False)
        self.restricted_head = LogProbHead(config.vocab_size, restricted=True)
        cos, sin = rope_tables(config, config.max_positions)
        self.cos, self.sin = Tensor(cos), Tensor(sin)

    def layer_weights(self, weights: Weights, layer: int) -> Weights:
        start = 1 + layer * self.per_layer
        return weights[start : start + self.per_layer]

    def projection(self, weights: Weights) -> Tensor:
        """Matrix [V, H] from hidden states to logits."""
        return weights[0] if self.config.tie_embeddings else weights[-1]

    def forward(
        self,
        weights: Weights,
        tokens: Tensor,
        positions: Tensor,
        segments: Tensor,
        shared: tuple[Tensor, ...] | None = None,
    ) -> Tensor:
        """Hidden states [M * P + R * T, H] after the final norm, of shared prompts before rows'.

        Args:
            tokens, positions, segments: [R, T] int32.
            shared: prompts [M, P], and of each row the one it continues [R] and how many of that
                one's tokens it sees [R]; all int32. None: rows hold all they see.
        """
        c = self.config
        x = self.embedded(weights[0], tokens, shared)
        tables = self.tables(positions, segments, shared)
        for layer in range(c.n_layers):
            x, _, _ = self.block(x, self.layer_weights(weights, layer), tables)
        return self.norm(x, weights[1 + c.n_layers * self.per_layer])

    def embedded(
        self, embedding: Tensor, tokens: Tensor, shared: tuple[Tensor, ...] | None
    ) -> Tensor:
        """[M * P + R * T, H]"""
        return ops.gather(embedding, self.flat(tokens, shared), 0)

    def flat(self, tokens: Tensor, shared: tuple[Tensor, ...] | None) -> Tensor:
        """All tokens [M * P + R * T], those of shared prompts first."""
        of_rows = tokens.reshape((-1,))
        return of_rows if shared is None else ops.concat((shared[0].reshape((-1,)), of_rows))

    def tables(
        self, positions: Tensor, segments: Tensor, shared: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, ...]:
        """What all layers need of the places of tokens.

        Cosines and sines of queries, then of keys [N, heads, head_dim / 2], attention bias of rows
        [R * kv, group * T, P + T]; where prompts are shared, their bias [M * kv, group * P, P] and
        the prompt of each row [R]. Written out for every head: on CPU one broadcast costs more
        than all the additions.
        """
        c = self.config
        flat = positions.reshape((-1,))
        if shared is not None:
            n_prompts, length = shared[0].shape
            places = np.tile(np.arange(length, dtype=np.int32), n_prompts)
            flat = ops.concat((Tensor(places), flat))
        cos = ops.gather(self.cos, flat, 0).reshape((flat.shape[0], 1, -1))
        sin = ops.gather(self.sin, flat, 0).reshape((flat.shape[0], 1, -1))
        # The scale of the scores is in the queries' turns.
        scale = c.head_dim**-0.5
        turns = (
            ops.tile(cos * scale, (1, c.n_heads, 1)),
            ops.tile(sin * scale, (1, c.n_heads, 1)),
            ops.tile(cos, (1, c.n_kv_heads, 1)),
            ops.tile(sin, (1, c.n_kv_heads, 1)),
        )
        seen = self.seen_in_row(segments)
        if shared is None:
            return (*turns, self.bias(seen))
        prompts, prompt_index, prompt_lengths = shared
        n_prompts, length = prompts.shape
        rows, width = segments.shape
        slots = Tensor(np.arange(length, dtype=np.int32).reshape((1, 1, -1)))
        of_prompt = ops.tile(slots < prompt_lengths.reshape((rows, 1, 1)), (1, width, 1))
        earlier = Tensor(np.tri(length, dtype=np.bool_)[None].repeat(n_prompts, 0))
        return (
            *turns,
            self.bias(ops.concat((of_prompt, seen), 2)),
            self.bias(earlier),
            prompt_index,
        )

    def seen_in_row(self, segments: Tensor) -> Tensor:
        """Which tokens (columns) each token sees [R, T, T]: those of its segment up to itself."""
        rows, length = segments.shape
        same = segments.reshape((rows, length, 1)) == segments.reshape((rows, 1, length))
        return ops.logical_and(same, Tensor(np.tri(length, dtype=np.bool_)[None]))

    def bias(self, seen: Tensor) -> Tensor:
        """seen [B, T, S] -> 0 or MASKED, for every head [B * kv, group * T, S]."""
        c = self.config
        rows, length, columns = seen.shape
        bias = ops.select(seen, Tensor(0.0, mstype.float32), Tensor(MASKED, mstype.float32))
        bias = ops.tile(bias.reshape((rows, 1, length, columns)), (1, c.n_heads, 1, 1))
        return bias.reshape((rows * c.n_kv_heads, -1, columns))

    def target_log_probs(
        self,
        weights: Weights,
        hidden: Tensor,
        sources: Tensor,
        targets: Tensor,
        temperature: Tensor,
        kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probability [K] of given tokens, and the entropy [K] of their distributions.

        The vocabulary is projected on for these K only.

        Args:
            hidden: [N, H], from `forward`.
            sources: [K] int32, places of the hidden states that predict.
            targets: [K] int32, the tokens predicted.
            temperature: scalar above 0; logits are divided by it.
            kept: [K, n] int32, the tokens that top-k or top-p sampling kept when it drew the
                target; unused places repeat one of them. None: the whole vocabulary.
        """
        rows = ops.gather(hidden, sources, 0)
        projection = self.projection(weights)
        if kept is None:
            kept = no_kept(sources.shape[0])
            return self.head(rows, projection, targets, temperature, kept)  # type: ignore[no-any-return]
        return self.restricted_head(rows, projection, targets, temperature, kept)  # type: ignore[no-any-return]

    def token_log_probs(
        self,
        weights: Weights,
        tokens: Tensor,
        positions: Tensor,
        segments: Tensor,
        temperature: Tensor,
        kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probability [B, T] of each token given those before it in its segment, and entropy.

        Both are 0 at a segment's first token and at padding. `kept` is [B, T, n]; the other
        arguments are those of `forward` and `target_log_probs`.
        """
        rows, length = tokens.shape
        hidden = self.forward(weights, tokens, positions, segments)
        flat_segments = segments.reshape((-1,))
        places = Tensor(np.arange(rows * length, dtype=np.int32))
        before = Tensor(np.maximum(np.arange(rows * length, dtype=np.int32) - 1, 0))
        has_before = ops.logical_and(
            ops.logical_and(
                flat_segments >= 0, flat_segments == ops.gather(flat_segments, before, 0)
            ),
            places % length > 0,
        )
        if kept is not None:
            kept = kept.reshape((rows * length, -1))
        log_probs, entropy = self.target_log_probs(
            weights, hidden, before, tokens.reshape((-1,)), temperature, kept
        )
        zeros = ops.zeros_like(log_probs)
        return (
            ops.select(has_before, log_probs, zeros).reshape((rows, length)),
            ops.select(has_before, entropy, zeros).reshape((rows, length)),
        )

    def construct(self, tokens: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        """Logits [B, T, V] on the Cell's own weights."""
        hidden = self.forward(self.weights, tokens, positions, segments)
        logits = self.linear(hidden, self.projection(self.weights))
        return logits.reshape((*tokens.shape, self.config.vocab_size))

    def arrays(self) -> dict[str, np.ndarray]:
        """Copies of every weight, by name."""
        return {p.name: p.asnumpy().copy() for p in self.weights}

    def load_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Set every weight.

        Raises:
            LMError: a name is missing or a shape differs.
        """
        for p in self.weights:
            if p.name not in arrays:
                raise LMError(f"weight {p.name!r} is missing; the weights are of another model")
            shape = tuple(arrays[p.name].shape)
            if shape != tuple(p.shape):
                raise LMError(
                    f"weight {p.name!r} has shape {shape}, this model needs {tuple(p.shape)}"
                )
        for p in self.weights:
            set_parameter(p, arrays[p.name])


def _initialiser(config, name, shape, seed):  # type: ignore[no-untyped-def]
    if seed is None:
        return lambda rng: np.zeros(shape, np.float32)
    return lambda rng: initial_weight(config, name, shape, rng)
