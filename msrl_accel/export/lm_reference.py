"""How the graph of a language model is called, and fixed calls that prove it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from mindspore import Tensor

from msrl_accel.export.lm_bundle import GraphShape
from msrl_accel.lm.config import LMConfig
from msrl_accel.lm.sampling import draw_noise

CALLS = ("greedy", "sampled", "hot")
"""The reference calls of every graph; none ends a row early. The hot one is sampled too, at `HEAT`
times the temperature: where a trained model is sure of its tokens, their log-probabilities hardly
see a small change of its weights.
"""
HEAT = 3.0
REFERENCE_SEED = 20_000

Inputs = dict[str, np.ndarray]

INPUTS: Mapping[str, tuple[str, tuple[str, ...], str]] = {
    "prompts": ("int32", ("rows", "prompt_tokens"), "token ids, padded on the right by anything"),
    "prompt_lengths": ("int32", ("rows",), "tokens of each prompt, at least 1"),
    "prompt_index": ("int32", ("rows",), "which of the prompts each row continues"),
    "idle": ("float32", ("rows",), "1 for rows to ignore, else 0"),
    "is_eos": ("float32", ("vocabulary",), "1 for the tokens of stop_ids, else 0"),
    "limit": ("int32", (), "most new tokens, 1 to max_new_tokens"),
    "temperature": ("float32", (), "the logits are divided by it"),
    "top_p": ("float32", (), "as in sampling; 1 where that has 1"),
    "noise_table": ("float32", ("R", "W"), "see noise"),
    "noise_index": ("int32", ("max_new_tokens", "rows", "B"), "see noise"),
}
"""Of the graph, in order: dtype, shape, meaning."""
OUTPUTS: Mapping[str, tuple[str, tuple[str, ...], str]] = {
    "tokens": (
        "int32",
        ("max_new_tokens", "rows"),
        "what was drawn; it means nothing after a row's first stop token, or from limit on",
    ),
    "log_probs": (
        "float32",
        ("max_new_tokens", "rows"),
        "log-probability of each token in the distribution it was drawn from",
    ),
    "kept": (
        "int32",
        ("max_new_tokens", "rows", "K"),
        "the tokens that top_k and top_p kept; nothing where sampling has neither",
    ),
}
NOISE = {
    "law": "gumbel",
    "how": "For every number u uniform in the open interval (0, 1) the noise is -log(-log(u)). The "
    "token of step t in row n is the argmax of logits / temperature + noise, where the noise is "
    "the rows noise_index[t, n] of noise_table one after the other, cut to the vocabulary. Fill "
    "the table with fresh noise for every call; where it has a row for each place of the index, "
    "number them, else draw row numbers at random.",
}
GREEDY = "Feed zeros as noise_table and noise_index: every token is then the likeliest one."


class Generated(NamedTuple):
    """Outputs of one call, rows first."""

    tokens: np.ndarray
    log_probs: np.ndarray
    kept: np.ndarray


def describe_tensors(
    tensors: Mapping[str, tuple[str, tuple[str, ...], str]],
) -> list[dict[str, Any]]:
    """Tensors as the manifest has them."""
    return [
        {"name": name, "dtype": dtype, "shape": list(shape), "what": what}
        for name, (dtype, shape, what) in tensors.items()
    ]


def call(graph: Callable[..., Any], inputs: Inputs) -> Generated:
    """Run a graph, the training Cell or an exported one."""
    outputs = graph(*[Tensor(inputs[name]) for name in INPUTS])
    return Generated(*(o.asnumpy().swapaxes(0, 1) for o in outputs))


def reference_inputs(
    shape: GraphShape,
    config: LMConfig,
    steps: int,
    sampling: Mapping[str, Any],
    prompts: Sequence[np.ndarray],
) -> Inputs:
    """Inputs of the sampled call: `prompts`, then random ones up to the longest."""
    rng = np.random.default_rng([REFERENCE_SEED, *shape])
    lengths = rng.integers(1, shape.prompt_tokens + 1, shape.rows).astype(np.int32)
    lengths[-1] = shape.prompt_tokens
    tokens = rng.integers(0, config.vocab_size, (shape.rows, shape.prompt_tokens)).astype(np.int32)
    for row, prompt in enumerate(prompts[: (shape.rows + 1) // 2]):
        tokens[row, : len(prompt)] = prompt
        lengths[row] = len(prompt)
    noise = draw_noise(rng, steps, shape.rows, config.vocab_size)
    return {
        "prompts": tokens,
        "prompt_lengths": lengths,
        "prompt_index": np.arange(shape.rows, dtype=np.int32),
        "idle": np.zeros(shape.rows, np.float32),
        "is_eos": np.zeros(config.vocab_size, np.float32),
        "limit": np.array(steps, np.int32),
        "temperature": np.array(sampling["temperature"], np.float32),
        "top_p": np.array(sampling["top_p"], np.float32),
        "noise_table": noise.table,
        "noise_index": noise.index,
    }


def inputs_of(name: str, sampled: Inputs) -> Inputs:
    """Inputs of one of `CALLS`, given those of the sampled one."""
    if name == "greedy":
        zeros = {key: np.zeros_like(sampled[key]) for key in ("noise_table", "noise_index")}
        return {**sampled, **zeros}
    if name == "hot":
        hot = np.array(HEAT * sampled["temperature"], np.float32)
        return {**sampled, "temperature": hot}
    return sampled


def record(shape: GraphShape, inputs: Inputs, graph: Callable[..., Any]) -> dict[str, np.ndarray]:
    """What the reference file holds of one graph."""
    arrays = {f"{shape.file}/{name}": value for name, value in inputs.items()}
    for name in CALLS:
        found = call(graph, inputs_of(name, inputs))
        arrays[f"{shape.file}/{name}/tokens"] = found.tokens
        arrays[f"{shape.file}/{name}/log_probs"] = found.log_probs
    return arrays
