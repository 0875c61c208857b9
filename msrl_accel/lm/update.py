"""One optimiser step of a language model on packed sequences: policy loss or supervised loss.

    packer = Packer(token_budget=2048)
    update = LMUpdate(model, loss_settings("grpo"), AdamWOptions())
    batches = packer.pack(sequences)
    old, _ = update.log_probs(batches, sequences.tokens.shape)
    advantage, weight = weigh_tokens(settings, rewards, groups, sequences.mask, max_length)
    result = update.step(batches, Columns(weight, advantage, old), learning_rate=1e-5)

Weights and advantages belong to the whole batch, so the step is the same however the batch was cut
into micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mindspore import Tensor, nn
from mindspore import dtype as mstype

from msrl_accel.errors import LMError
from msrl_accel.lm.adamw import AdamW, AdamWOptions, DeviceAdamW, HostAdamW
from msrl_accel.lm.gradients import (
    N_BATCH,
    BatchTensors,
    LayerByLayer,
    Sums,
    WholeModel,
    WholeModelStep,
)
from msrl_accel.lm.losses import LossSettings, PolicyLoss, SupervisedLoss
from msrl_accel.lm.model import CausalLM
from msrl_accel.lm.packing import PADDING, MicroBatch
from msrl_accel.networks import Weights

LARGE_MODEL = 30_000_000
"""Parameters from which on memory and compilation matter more than a third of the time."""


class Columns(NamedTuple):
    """What the loss needs of each token, [N, L] as the packed sequences; float32."""

    weight: np.ndarray
    """`token_weights` or `weigh_tokens` of the whole batch; 0 where a token has no loss."""
    advantage: np.ndarray | None = None
    """Needed by policy losses, as is `old`."""
    old: np.ndarray | None = None
    """Log-probabilities the ratio is taken to."""
    reference: np.ndarray | None = None
    """Log-probabilities of the reference model, where there is a KL term."""
    kept: np.ndarray | None = None
    """[N, L, n] int32: tokens that top-k or top-p sampling kept; None: the whole vocabulary."""


class StepResult(NamedTuple):
    """What a step saw before it changed the weights."""

    loss: float
    log_probs: np.ndarray
    """[N, L]; 0 where a token has no loss."""
    entropies: np.ndarray
    """[N, L], nats."""
    grad_norm: float
    """Before clipping; not finite: the weights were left as they are."""


class LMUpdate:
    """Forward, backward, clip and AdamW on a model's weights.

    Args:
        model: whose weights are trained, in place.
        loss: a policy loss; None for the supervised loss, the weighted sum of -log pi.
        options: constants of AdamW.
        temperature: of sampling; logits are divided by it.
        recompute: compute activations again, layer by layer (see `lm.gradients`): memory and
            compilation of one layer, for a third more time. None: for large models.
        offload: keep the optimiser's moments in host arrays. None: for large models.
        offload_folder: keep them in memory-mapped files there.
    """

    def __init__(
        self,
        model: CausalLM,
        loss: LossSettings | None,
        options: AdamWOptions,
        *,
        temperature: float = 1.0,
        recompute: bool | None = None,
        offload: bool | None = None,
        offload_folder: Path | None = None,
    ) -> None:
        large = sum(w.size for w in model.weights) >= LARGE_MODEL
        self.model = model
        self.settings = loss
        self.temperature = Tensor(temperature, mstype.float32)
        cell: nn.Cell = SupervisedLoss() if loss is None else PolicyLoss(loss)
        offloaded = offload_folder is not None or (large if offload is None else offload)
        self.optimizer: AdamW = (
            HostAdamW(model.weights, options, offload_folder)
            if offloaded
            else DeviceAdamW(model.weights, options)
        )
        self.gradients: WholeModel | LayerByLayer
        if large if recompute is None else recompute:
            self.gradients = LayerByLayer(model, cell)
        elif isinstance(self.optimizer, DeviceAdamW):
            self.gradients = WholeModelStep(model, cell, self.optimizer)
        else:
            self.gradients = WholeModel(model, cell)

    def log_probs(
        self,
        batches: Sequence[MicroBatch],
        shape: tuple[int, ...],
        kept: np.ndarray | None = None,
        weights: Weights | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities and entropies [N, L] of the packed tokens; 0 where there is no loss.

        Args:
            batches: what the packer gave.
            shape: (N, L) of the sequences.
            kept: as in `Columns`.
            weights: of another model of this shape (`frozen_weights`); default the trained ones.
        """
        weights = self.trained_weights() if weights is None else weights
        results = np.zeros((2, *shape), np.float32)
        for batch in batches:
            found = self.gradients.log_probs(weights, self._tensors(batch, kept), kept is not None)
            for values, array in zip(found, results):
                batch.scatter(values.asnumpy(), array)
        return results[0], results[1]

    def step(
        self, batches: Sequence[MicroBatch], columns: Columns, learning_rate: float
    ) -> StepResult:
        """One step down the loss of all micro-batches together."""
        self._check(columns)
        weights = self.trained_weights()
        log_probs, entropies = (np.zeros(columns.weight.shape, np.float32) for _ in range(2))
        loss = norm = 0.0
        sums: Sums = []
        for i, batch in enumerate(batches):
            inputs = (
                weights,
                self._tensors(batch, columns.kept),
                columns.kept is not None,
                _loss_inputs(batch, columns),
                sums,
            )
            is_last = i == len(batches) - 1
            if is_last and isinstance(self.gradients, WholeModelStep):
                result, norm = self.gradients.step(*inputs, learning_rate)
            else:
                result, sums = self.gradients.gradients(*inputs)
                norm = self.optimizer.step(sums, learning_rate) if is_last else 0.0
            loss += float(result.loss.asnumpy())
            batch.scatter(result.log_prob.asnumpy(), log_probs)
            batch.scatter(result.entropy.asnumpy(), entropies)
        return StepResult(loss, log_probs, entropies, norm)

    def trained_weights(self) -> Weights:
        """The model's weights as tensors that share memory with its Parameters.

        A graph compiles anew for every Parameter it is given, not for tensors.
        """
        return tuple(Tensor(w) for w in self.model.weights)

    def frozen_weights(self, arrays: Mapping[str, np.ndarray]) -> Weights:
        """Arrays by name, of a reference model, for `log_probs`.

        They are not copied: memory-mapped arrays stay on disk until they are used.

        Raises:
            LMError: a name is missing or a shape differs.
        """
        for spec in self.model.weight_specs:
            found = arrays[spec.name].shape if spec.name in arrays else "missing"
            if found != spec.shape:
                raise LMError(
                    f"reference model: weight {spec.name!r} is {found}, this model's is "
                    f"{spec.shape}; use a reference of the same architecture"
                )
        return tuple(Tensor.from_numpy(arrays[s.name]) for s in self.model.weight_specs)

    def state(self) -> dict[str, Any]:
        """Of the optimiser; weights are the model's."""
        return self.optimizer.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.optimizer.restore(state)

    def _check(self, columns: Columns) -> None:
        if self.settings is None:
            return
        missing = [name for name in ("advantage", "old") if getattr(columns, name) is None]
        if self.settings.kl_in_loss and columns.reference is None:
            missing.append("reference")
        if missing:
            raise LMError(f"the policy loss needs the column(s) {', '.join(missing)}")

    def _tensors(self, batch: MicroBatch, kept: np.ndarray | None) -> BatchTensors:
        rows = np.zeros((len(batch.slots), 1), np.int32) if kept is None else batch.gather(kept)
        fields = [*map(_tensor, batch[: N_BATCH - 2]), self.temperature, _tensor(rows)]
        return BatchTensors(*fields)


def _tensor(array: np.ndarray) -> Tensor:
    return Tensor.from_numpy(np.ascontiguousarray(array))


def _loss_inputs(batch: MicroBatch, columns: Columns) -> tuple[Tensor, ...]:
    """The fields of `TokenInputs`."""
    weight = batch.gather(columns.weight)
    absent = np.zeros_like(weight)
    old, reference, advantage = (
        absent if column is None else batch.gather(column)
        for column in (columns.old, columns.reference, columns.advantage)
    )
    has_loss = (batch.slots != PADDING) & (weight > 0)
    counts = np.bincount(batch.sequence[has_loss], minlength=len(weight))
    share = np.where(has_loss, 1.0 / np.maximum(counts[batch.sequence], 1), 0.0)
    fields = (old, reference, advantage, weight)
    return (
        *(_tensor(x.astype(np.float32, copy=False)) for x in fields),
        _tensor(batch.sequence),
        _tensor(share.astype(np.float32)),
    )


def policy_metrics(
    settings: LossSettings, columns: Columns, result: StepResult
) -> dict[str, float]:
    """What a step saw, over the tokens with a loss.

    loss; grad_norm; entropy; ratio_max; ratio_error = max |r - 1|, 0 in a first step on the
    policy's own samples; approx_kl = mean((r - 1) - log r) to the old policy; clip_fraction, the
    share of tokens whose gradient the clip stopped; and kl, the mean of k3 to the reference.
    """
    assert columns.advantage is not None and columns.old is not None
    chosen = columns.weight > 0
    log_prob = result.log_probs[chosen].astype(np.float64)
    log_ratio = log_prob - columns.old[chosen]
    advantage = columns.advantage[chosen]
    if settings.ratio == "sequence":
        rows = np.nonzero(chosen)[0]
        means = np.bincount(rows, log_ratio) / np.maximum(np.bincount(rows), 1)
        log_ratio = means[rows]
    ratio = np.exp(np.clip(log_ratio, -20, 20))
    metrics = {
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "entropy": _mean(result.entropies[chosen]),
        "ratio_max": float(ratio.max(initial=0.0)),
        "ratio_error": float(np.abs(ratio - 1).max(initial=0.0)),
        "approx_kl": _mean(ratio - 1 - log_ratio),
        "clip_fraction": _mean(_stopped(settings, ratio, advantage)),
    }
    if columns.reference is not None:
        d = np.clip(log_prob - columns.reference[chosen], -20, 20)
        metrics["kl"] = _mean(np.exp(-d) - 1 + d)
    return metrics


def _stopped(settings: LossSettings, ratio: np.ndarray, advantage: np.ndarray) -> np.ndarray:
    """Which tokens have no gradient because of the clip; for cispo, a smaller one."""
    if settings.clip == "none":
        return np.zeros(ratio.shape, bool)
    if settings.clip == "cispo":
        capped: np.ndarray = ratio > settings.cispo_cap
        return capped
    above = (ratio > 1 + settings.clip_high) & (advantage > 0)
    below = (ratio < 1 - settings.clip_low) & (advantage < 0)
    stopped: np.ndarray = above | below
    if settings.clip == "dual":
        stopped = stopped | ((ratio > settings.dual_clip) & (advantage < 0))
    return stopped


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else 0.0
