"""Small models and rows of tokens that the language model tests share."""

from __future__ import annotations

import numpy as np

from msrl_accel.lm.config import LMConfig

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

VARIANTS = {
    "llama": {"n_kv_heads": 4, "tie_embeddings": False},
    "llama_linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {"rope_theta": 100.0, "rope_scaling": LLAMA3_SCALING},
    "qwen2": {"architecture": "qwen2", "qkv_bias": True, "n_kv_heads": 1},
    "qwen3": {"architecture": "qwen3", "qk_norm": True, "head_dim": 12, "tie_embeddings": False},
}


def tiny(variant="llama_linear", **changes):
    fields = {
        "architecture": "llama",
        "vocab_size": 23,
        "hidden_size": 32,
        "intermediate_size": 48,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 8,
        "tie_embeddings": True,
        "max_positions": 128,
        "eos_ids": (1,),
        "pad_id": 0,
    }
    return LMConfig(**{**fields, **VARIANTS[variant], **changes})


def random_arrays(config, seed=0, scale=0.3):
    """Weights far from their initial values, so that every part of the model matters."""
    rng = np.random.default_rng(seed)
    return {
        name: (
            scale * rng.standard_normal(shape) + (1.0 if name.endswith("norm.weight") else 0.0)
        ).astype(np.float32)
        for name, shape in config.weight_shapes().items()
    }


def packed(rows, length):
    """Rows of segments (lists of tokens) -> tokens, positions, segments [B, T] int32."""
    tokens = np.zeros((len(rows), length), np.int32)
    positions = np.zeros_like(tokens)
    segments = np.full_like(tokens, -1)
    for b, row in enumerate(rows):
        start = 0
        for s, segment in enumerate(row):
            end = start + len(segment)
            tokens[b, start:end] = segment
            positions[b, start:end] = np.arange(len(segment))
            segments[b, start:end] = s
            start = end
    return tokens, positions, segments
