"""Language models in GGUF files (llama.cpp), plain or quantised, as float32."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from msrl_accel.errors import LMError
from msrl_accel.lm.config import LMConfig, check_architecture, check_count
from msrl_accel.lm.rope import inverse_frequencies
from msrl_accel.lm.sources import EXTRA

_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
# Llama 3's scaling; GGUF files hold the resulting factors instead, and only `factor` ever differs.
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_FETCH = "fetch it again"


class GGUFFile:
    """A GGUF file opened for reading.

    Raises:
        LMError: the file is damaged or cut off, or the `gguf` package is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        gguf = _import_gguf()
        try:
            self._reader = gguf.GGUFReader(path)
        except Exception as error:  # The package lets whatever NumPy says through.
            raise LMError(f"{path} is no GGUF file, or was cut off ({error}): {_FETCH}") from error
        if (self.get("split.count") or 1) > 1:
            raise LMError(f"{path} is one part of several: merge them with gguf-split first")

    def get(self, key: str) -> Any:
        """A value of the metadata as Python numbers, text and lists; None where absent."""
        field = self._reader.get_field(key)
        if field is None:
            return None
        try:
            return field.contents()
        except (ValueError, IndexError) as error:
            raise LMError(f"{self.path} has damaged metadata ({key}): {_FETCH}") from error

    def need(self, key: str) -> Any:
        """As `get`; LMError where absent."""
        value = self.get(key)
        if value is None:
            raise LMError(f"{self.path} lacks {key} in its metadata")
        return value

    def tensors(self) -> dict[str, np.ndarray]:
        """Every tensor by its GGUF name, dequantised to float32, [outputs, inputs]."""
        return {tensor.name: self._dequantise(tensor) for tensor in self._reader.tensors}

    def _dequantise(self, tensor: Any) -> np.ndarray:
        try:
            values = _import_gguf().dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise LMError(
                f"{self.path} stores {tensor.name} as {tensor.tensor_type.name}, "
                f"which the gguf package cannot read ({error})"
            ) from error
        # The copy frees the arrays from the mapped file.
        shape = [int(size) for size in reversed(tensor.shape)]
        return np.array(values, dtype=np.float32).reshape(shape)


def read_gguf(path: Path) -> tuple[LMConfig, dict[str, np.ndarray]]:
    """Configuration and weights by their Hugging Face names; shapes are not checked yet.

    Raises:
        LMError: the file is damaged, or of an architecture or rotary scaling not supported.
    """
    file = GGUFFile(path)
    architecture = file.need("general.architecture")
    check_architecture(architecture)
    tensors = file.tensors()
    config = _read_config(file, architecture, tensors)
    tensors.pop(_ROPE_FACTORS, None)
    arrays = {}
    for name, array in tensors.items():
        translated = _translate(name)
        if translated.endswith(("q_proj.weight", "k_proj.weight")) and architecture == "llama":
            array = _unpermute(array, config.head_dim, name)
        arrays[translated] = array
    return config, arrays


def _read_config(file: GGUFFile, architecture: str, tensors: Mapping[str, np.ndarray]) -> LMConfig:
    def need(key: str) -> Any:
        return file.need(f"{architecture}.{key}")

    def get(key: str, default: Any) -> Any:
        value = file.get(f"{architecture}.{key}")
        return default if value is None else value

    n_heads, hidden = need("attention.head_count"), need("embedding_length")
    check_count("attention.head_count", n_heads)
    check_count("embedding_length", hidden)
    head_dim = get("attention.key_length", hidden // n_heads)
    for key, expected in (("rope.dimension_count", head_dim), ("attention.value_length", head_dim)):
        if get(key, expected) != expected:
            raise LMError(f"{file.path} has {key}={get(key, None)}, which is not supported")
    if get("expert_count", 0):
        raise LMError(f"{file.path} is a mixture of experts, which is not supported")
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise LMError(f"{file.path} lacks the tensor token_embd.weight")
    ids = (file.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot"))
    config = LMConfig(
        architecture=architecture,
        vocab_size=len(embedding),
        hidden_size=hidden,
        intermediate_size=need("feed_forward_length"),
        n_layers=need("block_count"),
        n_heads=n_heads,
        n_kv_heads=get("attention.head_count_kv", n_heads),
        head_dim=head_dim,
        rope_theta=_shorten(get("rope.freq_base", 10000.0)),
        rms_norm_eps=_shorten(need("attention.layer_norm_rms_epsilon")),
        tie_embeddings="output.weight" not in tensors,
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        max_positions=need("context_length"),
        eos_ids=tuple(dict.fromkeys(token for token in ids if token is not None)),
        pad_id=file.get("tokenizer.ggml.padding_token_id"),
        bos_id=file.get("tokenizer.ggml.bos_token_id"),
    )
    return _with_scaling(config, file, tensors.get(_ROPE_FACTORS))


def _shorten(value: float) -> float:
    """The shortest decimal of a number that was stored as float32: 1e-5, not 9.99999974e-06."""
    return float(str(np.float32(value)))


def _with_scaling(config: LMConfig, file: GGUFFile, factors: np.ndarray | None) -> LMConfig:
    """The configuration with the rotary scaling that the metadata or the factors describe."""
    if factors is not None:
        scaled = replace(config, rope_scaling={"factor": float(factors.max()), **_LLAMA3})
        expected = inverse_frequencies(config) / inverse_frequencies(scaled)
        if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
            raise LMError(f"{file.path} scales rotary embeddings in a way that is not supported")
        return scaled
    key = f"{config.architecture}.rope.scaling"
    kind = file.get(f"{key}.type") or "none"
    if kind == "none":
        return config
    return replace(config, rope_scaling={"rope_type": kind, "factor": file.need(f"{key}.factor")})


def _translate(name: str) -> str:
    match = _LAYER.fullmatch(name)
    if match and match[2] in _LAYER_PARTS:
        return f"model.layers.{match[1]}.{_LAYER_PARTS[match[2]]}.{match[3]}"
    # An unknown name stays as it is: the check of all names reports it.
    return _TENSORS.get(name, name)


def _unpermute(weight: np.ndarray, head_dim: int, name: str) -> np.ndarray:
    """Rows of a head from llama.cpp's order (pairs) to that of Hugging Face (halves)."""
    if weight.ndim != 2 or len(weight) % head_dim:
        raise LMError(f"{name} has the shape {weight.shape}, not a multiple of {head_dim} rows")
    pairs = weight.reshape(-1, head_dim // 2, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def _import_gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise LMError(f"GGUF files need the package gguf; {EXTRA}") from error
    return gguf
