"""Log-probabilities and gradients of a micro-batch, in compiled graphs.

Two ways to the same numbers. `WholeModel` is one graph of all layers: fast, but compilation grows
with depth, and every activation is kept. `LayerByLayer` compiles one layer and runs it for each; it
keeps only the layers' inputs and computes the rest again in the backward pass. (On CPU,
recomputation within one graph saves no memory: operators run as soon as their inputs are there, so
the second forward pass runs early.)

Weights are arguments everywhere: the same graphs serve a policy and its reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Union

import numpy as np
from mindspore import Tensor, nn, ops

from msrl_accel.lm.adamw import ClippedAdamW, DeviceAdamW, Scalars
from msrl_accel.lm.losses import TokenInputs
from msrl_accel.lm.model import CausalLM
from msrl_accel.lm.packing import NO_PROMPTS
from msrl_accel.networks import Weights

Sums = list[Union[Tensor, np.ndarray]]
"""Gradients added up over micro-batches, one a weight; empty before the first."""


class BatchTensors(NamedTuple):
    """A `MicroBatch` as tensors, and how its tokens were sampled."""

    tokens: Tensor
    positions: Tensor
    segments: Tensor
    prompts: Tensor
    prompt_index: Tensor
    prompt_lengths: Tensor
    sources: Tensor
    targets: Tensor
    temperature: Tensor
    kept: Tensor
    """[K, n] int32: what top-k or top-p sampling kept; not read unless `restricted`."""


N_BATCH = len(BatchTensors._fields)
N_INPUTS = len(TokenInputs._fields)
N_SCALARS = len(Scalars._fields)


def shared_prompts(prompts: Tensor, *of_rows: Tensor) -> tuple[Tensor, ...] | None:
    """The argument `shared` of `CausalLM.forward`; None where no prompt is shared."""
    return None if prompts.shape == NO_PROMPTS else (prompts, *of_rows)


class BackwardResult(NamedTuple):
    """What a backward pass tells besides gradients."""

    loss: Tensor
    log_prob: Tensor
    """[K]"""
    entropy: Tensor
    """[K]"""


class Forward(nn.Cell):
    """construct(*BatchTensors, *weights) -> log-probability [K], entropy [K]."""

    def __init__(self, model: CausalLM, restricted: bool) -> None:
        super().__init__(auto_prefix=False)
        self.model, self.restricted = model, restricted

    def log_probs(self, weights, batch):  # type: ignore[no-untyped-def]
        tokens, positions, segments = batch[:3]
        sources, targets, temperature, kept = batch[6:]
        shared = shared_prompts(*batch[3:6])
        hidden = self.model.forward(weights, tokens, positions, segments, shared)
        if not self.restricted:
            kept = None
        return self.model.target_log_probs(weights, hidden, sources, targets, temperature, kept)

    def construct(self, *arguments):  # type: ignore[no-untyped-def]
        return self.log_probs(arguments[N_BATCH:], arguments[:N_BATCH])


class Backward(Forward):
    """construct(*BatchTensors, *TokenInputs, *weights, *sums) -> loss, log-probability [K],
    entropy [K], and the gradient of each weight, added to `sums`.
    """

    def __init__(self, model: CausalLM, loss: nn.Cell, restricted: bool) -> None:
        super().__init__(model, restricted)
        self.loss = loss
        self.n = len(model.weights)
        self.gradient = ops.value_and_grad(self.value, 0, None, has_aux=True)

    def value(self, weights, batch, inputs):  # type: ignore[no-untyped-def]
        log_prob, entropy = self.log_probs(weights, batch)
        return self.loss(log_prob, *inputs), log_prob, ops.stop_gradient(entropy)

    def accumulate(self, arguments):  # type: ignore[no-untyped-def]
        batch, inputs = arguments[:N_BATCH], arguments[N_BATCH : N_BATCH + N_INPUTS]
        start = N_BATCH + N_INPUTS
        weights, sums = arguments[start : start + self.n], arguments[start + self.n :]
        results, gradients = self.gradient(weights, batch, inputs)
        total: Weights = ()
        for i in range(self.n):
            total = (*total, sums[i] + gradients[i])
        return results, total

    def construct(self, *arguments):  # type: ignore[no-untyped-def]
        results, total = self.accumulate(arguments)
        return (*results, *total)


class BackwardAndStep(Backward):
    """construct(*Scalars, the arguments of `Backward`) -> loss, log-probability [K], entropy [K],
    norm of the gradient; the optimiser's step is done.

    Weights may share memory with the Parameters that the step changes: all are read by then, since
    it needs the norm of all gradients.
    """

    def __init__(
        self, model: CausalLM, loss: nn.Cell, restricted: bool, optimizer: ClippedAdamW
    ) -> None:
        super().__init__(model, loss, restricted)
        self.optimizer = optimizer

    def construct(self, *arguments):  # type: ignore[no-untyped-def]
        results, total = self.accumulate(arguments[N_SCALARS:])
        return (*results, self.optimizer(*arguments[:N_SCALARS], *total))


class WholeModel:
    """One graph of the whole model for each shape of micro-batch."""

    def __init__(self, model: CausalLM, loss: nn.Cell) -> None:
        self.forward = {r: Forward(model, r) for r in (False, True)}
        self.backward = {r: Backward(model, loss, r) for r in (False, True)}
        self.model = model

    @cached_property
    def zeros(self) -> Sums:
        """Sums before the first micro-batch; who asks for log-probabilities alone needs none."""
        return [Tensor(np.zeros(w.shape, np.float32)) for w in self.model.weights]

    def log_probs(
        self, weights: Weights, batch: BatchTensors, restricted: bool
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy [K]; `restricted`: over the kept tokens only."""
        result: tuple[Tensor, Tensor] = self.forward[restricted](*batch, *weights)
        return result

    def gradients(
        self,
        weights: Weights,
        batch: BatchTensors,
        restricted: bool,
        inputs: Sequence[Tensor],
        sums: Sums,
    ) -> tuple[BackwardResult, Sums]:
        """Results, and `sums` with the gradients added.

        Args:
            weights: in the order of the model's.
            batch: the micro-batch.
            restricted: take probabilities over the kept tokens only.
            inputs: the fields of `TokenInputs`.
            sums: of the micro-batches before.
        """
        graph = self.backward[restricted]
        loss, log_prob, entropy, *sums = graph(*batch, *inputs, *weights, *(sums or self.zeros))
        return BackwardResult(loss, log_prob, entropy), sums


class WholeModelStep(WholeModel):
    """Gradients of the last micro-batch and the optimiser's step in one graph, too."""

    def __init__(self, model: CausalLM, loss: nn.Cell, optimizer: DeviceAdamW) -> None:
        super().__init__(model, loss)
        self.optimizer = optimizer
        self.last = {r: BackwardAndStep(model, loss, r, optimizer.graph) for r in (False, True)}

    def step(
        self,
        weights: Weights,
        batch: BatchTensors,
        restricted: bool,
        inputs: Sequence[Tensor],
        sums: Sums,
        learning_rate: float,
    ) -> tuple[BackwardResult, float]:
        """As `gradients`, and the step with them; returns the norm before clipping."""
        scalars = self.optimizer.scalars(learning_rate).tensors()
        *results, norm = self.last[restricted](
            *scalars, *batch, *inputs, *weights, *(sums or self.zeros)
        )
        found = float(norm.asnumpy())
        self.optimizer.count(found)
        return BackwardResult(*results), found


class Tables(nn.Cell):
    """construct(the first six of `BatchTensors`, embedding) -> embedded tokens [N, H], and what
    all layers need.
    """

    def __init__(self, model: CausalLM) -> None:
        super().__init__(auto_prefix=False)
        self.model = model

    def construct(self, tokens, positions, segments, *prompts_and_embedding):  # type: ignore[no-untyped-def]
        shared = shared_prompts(*prompts_and_embedding[:3])
        x = self.model.embedded(prompts_and_embedding[3], tokens, shared)
        return (x, *self.model.tables(positions, segments, shared))


class Layer(nn.Cell):
    """construct(x, *weights of the layer, *tables) -> x of the next."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__(auto_prefix=False)
        self.block = model.block
        self.n = model.per_layer

    def construct(self, x, *arguments):  # type: ignore[no-untyped-def]
        return self.block(x, arguments[: self.n], arguments[self.n :])[0]


class LayerBackward(nn.Cell):
    """construct(dout, x, *weights of the layer, *tables) -> dx, *gradients of the weights.

    The layer's activations are computed again.
    """

    def __init__(self, model: CausalLM) -> None:
        super().__init__(auto_prefix=False)
        self.block = model.block
        self.n = model.per_layer
        self.gradient = ops.grad(self.product, (0, 1))

    def product(self, x, weights, tables, dout):  # type: ignore[no-untyped-def]
        """A scalar whose gradients are those of the layer times `dout`."""
        return (self.block(x, weights, tables)[0] * dout).sum()

    def construct(self, dout, x, *arguments):  # type: ignore[no-untyped-def]
        weights, tables = arguments[: self.n], arguments[self.n :]
        dx, gradients = self.gradient(x, weights, tables, dout)
        return (dx, *gradients)


class Head(nn.Cell):
    """construct(x [N, H], final norm, projection, sources, targets, temperature, kept) ->
    log-probability [K], entropy [K].
    """

    def __init__(self, model: CausalLM, restricted: bool) -> None:
        super().__init__(auto_prefix=False)
        self.norm = model.norm
        self.head = model.restricted_head if restricted else model.head

    def log_probs(self, x, norm, projection, choice):  # type: ignore[no-untyped-def]
        sources, targets, temperature, kept = choice
        rows = self.norm(ops.gather(x, sources, 0), norm)
        return self.head(rows, projection, targets, temperature, kept)

    def construct(self, x, norm, projection, *choice):  # type: ignore[no-untyped-def]
        return self.log_probs(x, norm, projection, choice)


class HeadBackward(Head):
    """construct(the arguments of `Head`, *TokenInputs) -> loss, log-probability [K], entropy [K],
    dx, gradients of final norm and projection.
    """

    def __init__(self, model: CausalLM, loss: nn.Cell, restricted: bool) -> None:
        super().__init__(model, restricted)
        self.loss = loss
        self.gradient = ops.value_and_grad(self.value, (0, 1, 2), None, has_aux=True)

    def value(self, x, norm, projection, choice, inputs):  # type: ignore[no-untyped-def]
        log_prob, entropy = self.log_probs(x, norm, projection, choice)
        return self.loss(log_prob, *inputs), log_prob, ops.stop_gradient(entropy)

    def construct(self, x, norm, projection, *arguments):  # type: ignore[no-untyped-def]
        results, gradients = self.gradient(x, norm, projection, arguments[:4], arguments[4:])
        return (*results, *gradients)


class EmbeddingBackward(nn.Cell):
    """construct(prompts, tokens, dx [N, H]) -> gradient of the embedding [V, H]."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__(auto_prefix=False)
        self.model = model

    def construct(self, prompts, tokens, dx):  # type: ignore[no-untyped-def]
        flat = self.model.flat(tokens, shared_prompts(prompts))
        return ops.unsorted_segment_sum(dx, flat, self.model.config.vocab_size)


class LayerByLayer:
    """One graph for all layers, run for each; gradients are added up on the host."""

    def __init__(self, model: CausalLM, loss: nn.Cell) -> None:
        self.model = model
        self.tables = Tables(model)
        self.layer, self.layer_backward = Layer(model), LayerBackward(model)
        self.head = {restricted: Head(model, restricted) for restricted in (False, True)}
        self.head_backward = {
            restricted: HeadBackward(model, loss, restricted) for restricted in (False, True)
        }
        self.embedding_backward = EmbeddingBackward(model)
        self.n_layers = model.config.n_layers
        self.norm = 1 + self.n_layers * model.per_layer
        self.projection = 0 if model.config.tie_embeddings else len(model.weights) - 1

    def log_probs(
        self, weights: Weights, batch: BatchTensors, restricted: bool
    ) -> tuple[Tensor, Tensor]:
        """As `WholeModel.log_probs`."""
        x, *tables = self.tables(*batch[:6], weights[0])
        for i in range(self.n_layers):
            x = self.layer(x, *self.model.layer_weights(weights, i), *tables)
        result: tuple[Tensor, Tensor] = self.head[restricted](
            x, weights[self.norm], weights[self.projection], *batch[6:]
        )
        return result

    def gradients(
        self,
        weights: Weights,
        batch: BatchTensors,
        restricted: bool,
        inputs: Sequence[Tensor],
        sums: Sums,
    ) -> tuple[BackwardResult, Sums]:
        """As `WholeModel.gradients`."""
        total: dict[int, np.ndarray] = dict(enumerate(sums))

        def add(index: int, gradient: Tensor) -> None:
            array = gradient.asnumpy()
            if index in total:
                total[index] += array
            else:
                total[index] = array

        x, *tables = self.tables(*batch[:6], weights[0])
        layer_inputs = []
        for i in range(self.n_layers):
            layer_inputs.append(x)
            x = self.layer(x, *self.model.layer_weights(weights, i), *tables)
        loss, log_prob, entropy, dx, dnorm, dprojection = self.head_backward[restricted](
            x, weights[self.norm], weights[self.projection], *batch[6:], *inputs
        )
        add(self.norm, dnorm)
        add(self.projection, dprojection)
        for i in reversed(range(self.n_layers)):
            dx, *gradients = self.layer_backward(
                dx, layer_inputs.pop(), *self.model.layer_weights(weights, i), *tables
            )
            for j, gradient in enumerate(gradients):
                add(1 + i * self.model.per_layer + j, gradient)
        add(0, self.embedding_backward(batch.prompts, batch.tokens, dx))
        return BackwardResult(loss, log_prob, entropy), [total[i] for i in range(len(weights))]
