"""Where generation and training part: which completion, positions and tokens, and which layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype

from msrl_accel.lm.adamw import AdamWOptions
from msrl_accel.lm.generation import Generator
from msrl_accel.lm.generation_graph import GenerationGraph
from msrl_accel.lm.model import CausalLM
from msrl_accel.lm.packing import Packer, Sequences
from msrl_accel.lm.parity import ParityError, differences, parity
from msrl_accel.lm.rollout import Rollout
from msrl_accel.lm.sampling import Noise, noise_shapes
from msrl_accel.lm.tokenizer import Tokenizer
from msrl_accel.lm.update import LMUpdate

_SHOWN = 8
"""Positions named one by one."""
_FORCED = 1e9
"""Noise that makes sampling take a token whatever its logit."""
_LOWEST = -80.0
"""Log-probabilities below are not told apart: the probability is no float32 any more."""


def check_parity(
    rollout: Rollout,
    log_probs: np.ndarray,
    gate: float,
    *,
    model: CausalLM,
    generator: Generator,
    tokenizer: Tokenizer,
    temperature: float,
) -> None:
    """Raise `ParityError`, naming the culprit, where the two differ by more than `gate`.

    Args:
        rollout: what was generated, with the log-probabilities of generation.
        log_probs: of training [N, L].
        model: what is trained.
        generator: what generated.
        tokenizer, temperature: of both.
    """
    sampled, mask = rollout.completions, rollout.mask
    found = parity(log_probs, sampled.log_probs, mask)
    if found.max <= gate:
        return
    distance = np.abs(differences(log_probs, sampled.log_probs, mask))
    row = int(distance.max(axis=1).argmax())
    length = int(sampled.lengths[row])
    tokens = sampled.tokens[row, :length]
    prompt = rollout.prompts[sampled.prompt_index[row]]
    pair = _Pair(model, generator.model, prompt, tokens, temperature)
    lines = [
        f"generation and training disagree by {found.max:.3g} in a log-probability, more than "
        f"parity_gate = {gate:g}; worst is completion {row}, {rollout.texts[row]!r}, of the prompt "
        f"{rollout.asked[row].prompt!r}",
        _describe_tokens(tokens, tokenizer, log_probs[row], sampled.log_probs[row], gate),
        pair.describe(gate),
    ]
    raise ParityError("\n".join(lines))


def _describe_tokens(
    tokens: np.ndarray,
    tokenizer: Tokenizer,
    log_probs: np.ndarray,
    rollout_log_probs: np.ndarray,
    gate: float,
) -> str:
    n = len(tokens)
    distance = differences(log_probs[:n], rollout_log_probs[:n], np.ones(n, bool))
    bad = np.flatnonzero(np.abs(distance) > gate).tolist()
    lines = [f"positions: {len(bad)} of its {n} tokens differ"]
    for i in bad[:_SHOWN]:
        text = tokenizer.decode([tokens[i]], skip_special_tokens=False)
        lines.append(
            f"  position {i}: token {tokens[i]} {text!r}, {rollout_log_probs[i]:.6f} in "
            f"generation, {log_probs[i]:.6f} in training"
        )
    if len(bad) > _SHOWN:
        lines.append(f"  and {len(bad) - _SHOWN} more, the last at position {bad[-1]}")
    return "\n".join(lines)


@dataclass
class _Pair:
    """One completion in training and in generation, which can be cut short after any layer."""

    model: CausalLM
    generating: CausalLM
    prompt: np.ndarray
    tokens: np.ndarray
    temperature: float

    def describe(self, gate: float) -> str:
        if self.generating is not self.model:
            ours, theirs = self.model.arrays(), self.generating.arrays()
            unequal = [name for name in ours if not np.array_equal(ours[name], theirs[name])]
            if unequal:
                worst = max(unequal, key=lambda name: np.abs(theirs[name] - ours[name]).max())
                return (
                    f"weights: generation has other ones: {len(unequal)} of {len(ours)}, most "
                    f"different {worst}, by up to {np.abs(theirs[worst] - ours[worst]).max():.3g}"
                )
        layer = self.first_different_layer(gate)
        if layer is None:
            return (
                "layer: none: computed alone and on the whole vocabulary, this completion agrees; "
                "look at packing and at what top_k and top_p keep"
            )
        return (
            f"layer: the weights are the same; the two part in layer {layer} (model.layers.{layer})"
        )

    def first_different_layer(self, gate: float) -> int | None:
        """The layer that makes the difference; None where there is none any more."""

        def differ(n_layers: int) -> bool:
            ours, theirs = self.training(n_layers), self.generation(n_layers)
            return parity(ours, theirs, np.ones(len(ours), bool)).max > gate

        n_layers = self.model.config.n_layers
        if not differ(n_layers):
            return None
        low, high = 0, n_layers  # they agree with `low` layers, and differ with `high`
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if differ(middle) else (middle, high)
        return high - 1

    def training(self, n_layers: int) -> np.ndarray:
        """Log-probabilities [L] from the first layers, as training computes them."""
        model = _first_layers(self.model, n_layers)
        length = len(self.tokens)
        update = LMUpdate(model, None, AdamWOptions(), temperature=self.temperature, offload=True)
        sequences = Sequences(
            [self.prompt],
            np.zeros(1, np.int32),
            self.tokens[None],
            np.array([length]),
            np.ones((1, length), bool),
        )
        batches = Packer(len(self.prompt) + length).pack(sequences)
        log_probs: np.ndarray = np.maximum(update.log_probs(batches, (1, length))[0][0], _LOWEST)
        return log_probs

    def generation(self, n_layers: int) -> np.ndarray:
        """As `training`, from the graph that generates, made to draw these tokens."""
        model = _first_layers(self.generating, n_layers)
        length, vocab_size = len(self.tokens), model.config.vocab_size
        graph = GenerationGraph(model, 1, len(self.prompt), 1, length)
        noise = forcing_noise(self.tokens, vocab_size)
        inputs = (
            self.prompt[None],
            np.array([len(self.prompt)], np.int32),
            np.zeros(1, np.int32),
            np.zeros(1, np.float32),
            np.zeros(vocab_size, np.float32),
        )
        _, log_probs, _ = graph(
            *map(Tensor, inputs),
            Tensor(length, mstype.int32),
            Tensor(self.temperature, mstype.float32),
            Tensor(1.0, mstype.float32),
            *map(Tensor, noise),
        )
        generated: np.ndarray = np.maximum(log_probs.asnumpy()[:, 0], _LOWEST)
        return generated


def _first_layers(model: CausalLM, n_layers: int) -> CausalLM:
    """A model of the first layers, with the final norm and the head of the whole."""
    if n_layers == model.config.n_layers:
        return model
    short = CausalLM(replace(model.config, n_layers=n_layers), seed=None)
    short.load_arrays(model.arrays())
    return short


def forcing_noise(tokens: np.ndarray, vocab_size: int) -> Noise:
    """Noise of one row that makes sampling draw `tokens` [L]; log-probabilities do not see it."""
    (_, width), shape = noise_shapes(len(tokens), 1, vocab_size)
    table = np.zeros((len(tokens) + 1, width), np.float32)
    index = np.zeros(shape, np.int32)
    for t, token in enumerate(tokens.tolist()):
        table[t + 1, token % width] = _FORCED
        index[t, 0, token // width] = t + 1
    return Noise(table, index)
