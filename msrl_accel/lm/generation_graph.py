"""Prefill and the decoding loop, compiled as one graph."""

from __future__ import annotations

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from msrl_accel.lm.decode import Decoder
from msrl_accel.lm.model import CausalLM
from msrl_accel.lm.sampling import Sampler
from msrl_accel.networks import Weights


class GenerationGraph(nn.Cell):
    """Prefill and the whole decoding loop as one graph, on the model's own Parameters.

    Every prompt is read once and its keys and values go to all rows that continue it. Rows that
    are done go on until all are, or `limit` tokens are drawn; what they draw then means nothing.

    construct:
        prompts [M, P] int32, padded on the right; prompt_lengths [M] int32, at least 1;
        prompt_index [N] int32: the prompt of each row; idle [N] float32: 1 for rows to ignore;
        is_eos [V] float32: 1 for tokens that end a row; limit: scalar int32, 1 to `steps`;
        temperature, top_p: float32 scalars; noise_table, noise_index: see `Noise`.
    returns tokens [steps, N] int32, log-probabilities [steps, N] float32 of the distribution
    sampled from, kept [steps, N, K] int32 (see `Sampler`).

    Args:
        model: whose weights are used.
        prompts, prompt_length, rows, steps: M, P, N and the most new tokens.
        top_k, top_p: see `Sampler`.
        decoder: of another graph with the same prompt_length, rows and steps, to share its cache:
            only one of the two runs at a time.
    """

    def __init__(
        self,
        model: CausalLM,
        prompts: int,
        prompt_length: int,
        rows: int,
        steps: int,
        top_k: int = 0,
        top_p: bool = False,
        decoder: Decoder | None = None,
    ) -> None:
        super().__init__(auto_prefix=False)
        c = model.config
        self.model = model
        self.config = c
        self.decoder = Decoder(c, rows, prompt_length, steps) if decoder is None else decoder
        self.sampler = Sampler(c.vocab_size, top_k, top_p)
        self.rows = rows
        self.slots = Tensor(np.arange(prompt_length, dtype=np.int32).reshape(1, -1))
        self.places = Tensor(np.repeat(self.slots.asnumpy(), prompts, axis=0))
        self.row_starts = Tensor(np.arange(prompts, dtype=np.int32) * prompt_length)
        kept = max(1, self.sampler.n_kept)
        self.tokens = _buffer("generation.tokens", (steps, rows), np.int32)
        self.probabilities = _buffer("generation.probabilities", (steps, rows), np.float32)
        self.kept = _buffer("generation.kept", (steps, rows, kept), np.int32)
        self.write = ops.ScatterUpdate()
        self.linear = ops.MatMul(transpose_b=True)

    def prefill(self, prompts: Tensor, lengths: Tensor, prompt_index: Tensor) -> Tensor:
        """Fill the cache; hidden states [H, N] of the last prompt tokens, before the final norm."""
        model, weights = self.model, self.model.weights
        segments = ops.cast(self.slots < lengths.reshape((-1, 1)), mstype.int32) - 1
        tables = model.tables(self.places, segments, None)
        x = ops.gather(weights[0], prompts.reshape((-1,)), 0)
        for layer in range(self.config.n_layers):
            x, keys, values = model.block(x, model.layer_weights(weights, layer), tables)
            self.decoder.start_layer(layer, keys, values, prompt_index)
        last = ops.gather(x, self.row_starts + lengths - 1, 0)
        return ops.transpose(ops.gather(last, prompt_index, 0), (1, 0))

    def sample(self, x, scale, step, table, index, top_p):  # type: ignore[no-untyped-def]
        """Hidden states [H, N] -> token [N]; records it with its probability at `step`."""
        weights = self.model.weights
        normed = ops.transpose(self.decoder.normed(x, scale), (1, 0))
        logits = self.linear(normed, self.model.projection(weights))
        token, probability, kept = self.sampler(logits, table, ops.gather(index, step, 0), top_p)
        place = step.reshape((1,))
        self.write(self.tokens, place, token.reshape((1, -1)))
        self.write(self.probabilities, place, probability.reshape((1, -1)))
        if self.sampler.n_kept > 0:
            self.write(self.kept, place, kept.reshape((1, self.rows, -1)))
        return token

    def construct(
        self,
        prompts: Tensor,
        prompt_lengths: Tensor,
        prompt_index: Tensor,
        idle: Tensor,
        is_eos: Tensor,
        limit: Tensor,
        temperature: Tensor,
        top_p: Tensor,
        noise_table: Tensor,
        noise_index: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        model = self.model
        weights = model.weights
        x = self.prefill(prompts, prompt_lengths, prompt_index)
        layers: Weights = ()
        for layer in range(self.config.n_layers):
            layers = (*layers, self.decoder.fuse(model.layer_weights(weights, layer)))
        scale = weights[1 + self.config.n_layers * model.per_layer] * (1.0 / temperature)
        scale = scale.reshape((-1, 1))
        step = Tensor(0, mstype.int32)
        token = self.sample(x, scale, step, noise_table, noise_index, top_p)
        done = ops.maximum(idle, ops.gather(is_eos, token, 0))
        positions = ops.gather(prompt_lengths, prompt_index, 0)
        self.decoder.start_rows(positions)
        step = step + 1
        while ops.logical_and(step < limit, done.sum() < self.rows):
            x = ops.transpose(ops.gather(weights[0], token, 0), (1, 0))
            x = self.decoder(x, layers, positions, step - 1)
            token = self.sample(x, scale, step, noise_table, noise_index, top_p)
            done = ops.maximum(done, ops.gather(is_eos, token, 0))
            positions = positions + 1
            step = step + 1
        return self.tokens.value(), ops.log(self.probabilities.value()), self.kept.value()


def _buffer(name: str, shape: tuple[int, ...], dtype: type) -> Parameter:
    return Parameter(Tensor(np.zeros(shape, dtype)), name=name, requires_grad=False)
