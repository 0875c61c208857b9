"""A decoder in plain NumPy, float64: one sequence at a time, one head at a time."""

from __future__ import annotations

import math

import numpy as np


def rms_norm(x, weight, epsilon):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon) * weight


def frequency(config, pair):
    """Radians that one position turns pair `pair` of a head."""
    base = 1.0 / config.rope_theta ** (2.0 * pair / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return base
    if scaling["rope_type"] == "linear":
        return base / scaling["factor"]
    wavelength = 2.0 * math.pi / base
    original = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if wavelength > original / low:
        return base / scaling["factor"]
    if wavelength < original / high:
        return base
    smooth = (original / wavelength - low) / (high - low)
    return (1.0 - smooth) * base / scaling["factor"] + smooth * base


def rotated(config, vector, position):
    """One head's vector, its pairs (i, i + d/2) turned as complex numbers."""
    half = config.head_dim // 2
    turn = np.exp(1j * position * np.array([frequency(config, i) for i in range(half)]))
    pairs = (vector[:half] + 1j * vector[half:]) * turn
    return np.concatenate([pairs.real, pairs.imag])


def logits(config, arrays, tokens):
    """Logits [T, V] of one sequence of tokens that starts at position 0."""
    w = {name: np.asarray(a, np.float64) for name, a in arrays.items()}
    x = w["model.embed_tokens.weight"][np.asarray(tokens)]
    d, group = config.head_dim, config.n_heads // config.n_kv_heads
    for layer in range(config.n_layers):
        p = f"model.layers.{layer}."
        h = rms_norm(x, w[p + "input_layernorm.weight"], config.rms_norm_eps)
        projected = {}
        for name in "qkv":
            y = h @ w[p + f"self_attn.{name}_proj.weight"].T
            if config.qkv_bias:
                y = y + w[p + f"self_attn.{name}_proj.bias"]
            y = y.reshape(len(tokens), -1, d)
            if config.qk_norm and name != "v":
                y = rms_norm(y, w[p + f"self_attn.{name}_norm.weight"], config.rms_norm_eps)
            if name != "v":
                y = np.array(
                    [[rotated(config, head, t) for head in row] for t, row in enumerate(y)]
                )
            projected[name] = y
        mixed = np.zeros((len(tokens), config.n_heads, d))
        for head in range(config.n_heads):
            keys, values = projected["k"][:, head // group], projected["v"][:, head // group]
            for t in range(len(tokens)):
                scores = keys[: t + 1] @ projected["q"][t, head] / math.sqrt(d)
                weights = np.exp(scores - scores.max())
                mixed[t, head] = weights @ values[: t + 1] / weights.sum()
        x = x + mixed.reshape(len(tokens), -1) @ w[p + "self_attn.o_proj.weight"].T
        h = rms_norm(x, w[p + "post_attention_layernorm.weight"], config.rms_norm_eps)
        gate = h @ w[p + "mlp.gate_proj.weight"].T
        up = h @ w[p + "mlp.up_proj.weight"].T
        x = x + (gate / (1.0 + np.exp(-gate)) * up) @ w[p + "mlp.down_proj.weight"].T
    x = rms_norm(x, w["model.norm.weight"], config.rms_norm_eps)
    head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    return x @ w[head].T


def log_softmax(x):
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def token_log_probs(config, arrays, tokens, temperature=1.0, kept=None):
    """Log-probability and entropy [T] of each token given those before; 0 for the first.

    kept: for each token the list of tokens that the softmax runs over.
    """
    z = logits(config, arrays, tokens) / temperature
    log_probs, entropies = np.zeros(len(tokens)), np.zeros(len(tokens))
    for t in range(1, len(tokens)):
        support = sorted(set(range(config.vocab_size) if kept is None else kept[t]))
        every = log_softmax(z[t - 1, support])
        log_probs[t] = every[support.index(tokens[t])]
        entropies[t] = -(np.exp(every) * every).sum()
    return log_probs, entropies
