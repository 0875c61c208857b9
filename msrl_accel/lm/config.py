"""Shape and constants of a decoder-only language model, read from and written as config.json.

Keys are those of Hugging Face transformers; both its older (`rope_theta`, `rope_scaling`) and its
newer (`rope_parameters`) spelling of rotary embeddings are read, the older is written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msrl_accel.errors import LMError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_ROPE_SCALING_KEYS = {
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


@dataclass(frozen=True)
class LMConfig:
    """A Llama, Qwen2 (2.5) or Qwen3 decoder.

    Raises:
        LMError: a field has an impossible value; the message names it.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    # None, or {"rope_type": "linear" | "llama3", ...} with the keys of Hugging Face.
    rope_scaling: Mapping[str, Any] | None = field(default=None, hash=False)
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    max_positions: int = 2048
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    bos_id: int | None = None

    def __post_init__(self) -> None:
        check_architecture(self.architecture)
        for name in _COUNTS:
            check_count(name, getattr(self, name))
        for name in ("rope_theta", "rms_norm_eps"):
            value = getattr(self, name)
            if not _is_number(value) or value <= 0:
                raise LMError(f"{name} must be a positive number, not {value!r}")
        if self.n_heads % self.n_kv_heads:
            raise LMError(
                f"n_heads={self.n_heads} must be a multiple of n_kv_heads={self.n_kv_heads}"
            )
        if self.head_dim % 2:
            raise LMError(
                f"head_dim={self.head_dim} must be even: rotary embeddings turn pairs of numbers"
            )
        for token in self.eos_ids:
            _check_id("eos_ids", token, self.vocab_size)
        for name in ("pad_id", "bos_id"):
            if getattr(self, name) is not None:
                _check_id(name, getattr(self, name), self.vocab_size)
        if self.rope_scaling is not None:
            object.__setattr__(self, "rope_scaling", read_rope_scaling(self.rope_scaling))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LMConfig:
        """The model that the content of a Hugging Face config.json describes.

        Raises:
            LMError: a key is missing or has an impossible value, or the model is of a kind not
                supported here (architecture, rotary scaling, sliding window, quantised weights).
        """
        if not isinstance(values, Mapping):
            raise LMError(f"a model configuration is a JSON object, not {type(values).__name__}")
        architecture = _read_architecture(values)
        _refuse_unsupported(values)
        for key in _REQUIRED:
            if values.get(key) is None:
                raise LMError(f"the model configuration lacks {key}")
            check_count(key, values[key])
        theta, scaling = _read_rope(values)
        n_heads = values["num_attention_heads"]
        return cls(
            architecture=architecture,
            vocab_size=values["vocab_size"],
            hidden_size=values["hidden_size"],
            intermediate_size=values["intermediate_size"],
            n_layers=values["num_hidden_layers"],
            n_heads=n_heads,
            n_kv_heads=_get(values, "num_key_value_heads", n_heads),
            head_dim=_read_head_dim(architecture, values),
            rope_theta=theta,
            rope_scaling=scaling,
            rms_norm_eps=_get(values, "rms_norm_eps", 1e-6),
            tie_embeddings=bool(_get(values, "tie_word_embeddings", False)),
            qkv_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            max_positions=_get(
                values, "max_position_embeddings", 2048 if architecture == "llama" else 32768
            ),
            eos_ids=read_ids(values.get("eos_token_id")),
            pad_id=_read_id(values.get("pad_token_id")),
            bos_id=_read_id(values.get("bos_token_id")),
        )

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json; `from_dict` of it gives an equal configuration."""
        eos: Any = self.eos_ids[0] if len(self.eos_ids) == 1 else list(self.eos_ids) or None
        return {
            "architectures": [ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rope_theta": self.rope_theta,
            "rope_scaling": None if self.rope_scaling is None else dict(self.rope_scaling),
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "max_position_embeddings": self.max_positions,
            "use_sliding_window": False,
            "eos_token_id": eos,
            "pad_token_id": self.pad_id,
            "bos_token_id": self.bos_id,
        }

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight by its Hugging Face name, in the order of the forward pass.

        Matrices are [outputs, inputs]. With tied embeddings there is no `lm_head.weight`.
        """
        hidden, ffn = self.hidden_size, self.intermediate_size
        queries, keys = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
        for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            layer[f"self_attn.{name}.weight"] = (rows, hidden)
            if self.qkv_bias:
                layer[f"self_attn.{name}.bias"] = (rows,)
        if self.qk_norm:
            layer["self_attn.q_norm.weight"] = (self.head_dim,)
            layer["self_attn.k_norm.weight"] = (self.head_dim,)
        layer["self_attn.o_proj.weight"] = (hidden, queries)
        layer["post_attention_layernorm.weight"] = (hidden,)
        layer["mlp.gate_proj.weight"] = (ffn, hidden)
        layer["mlp.up_proj.weight"] = (ffn, hidden)
        layer["mlp.down_proj.weight"] = (hidden, ffn)
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden)
        }
        for index in range(self.n_layers):
            shapes.update({f"model.layers.{index}.{name}": layer[name] for name in layer})
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    @property
    def n_parameters(self) -> int:
        """Count of trainable numbers; tied embeddings count once."""
        return sum(math.prod(shape) for shape in self.weight_shapes().values())


def tiny_config(
    vocab_size: int,
    *,
    eos_ids: tuple[int, ...] = (),
    pad_id: int | None = None,
    bos_id: int | None = None,
    max_positions: int = 512,
) -> LMConfig:
    """A Llama of about a million parameters for training from nothing on short character texts."""
    return LMConfig(
        architecture="llama",
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        n_layers=5,
        n_heads=4,
        n_kv_heads=2,
        head_dim=32,
        rms_norm_eps=1e-5,
        tie_embeddings=True,
        max_positions=max_positions,
        eos_ids=eos_ids,
        pad_id=pad_id,
        bos_id=bos_id,
    )


def check_architecture(architecture: Any) -> None:
    """Raise LMError, with the supported list, where `architecture` is not in it."""
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise LMError(
            f"language models of the architecture {architecture!r} are not supported; "
            f"supported: {supported}"
        )


def check_count(name: str, value: Any) -> None:
    """Raise LMError where `value` is no positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LMError(f"{name} must be a positive integer, not {value!r}")


def read_rope_scaling(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """`rope_scaling` of config.json with its kind under `rope_type`; None for plain RoPE."""
    if not isinstance(raw, Mapping):
        raise LMError(f"rope_scaling is a JSON object or null, not {raw!r}")
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in _ROPE_SCALING_KEYS:
        supported = ", ".join(_ROPE_SCALING_KEYS)
        raise LMError(f"rope_scaling of the kind {kind!r} is not supported; supported: {supported}")
    scaling: dict[str, Any] = {"rope_type": kind}
    for key in _ROPE_SCALING_KEYS[kind]:
        value: Any = raw.get(key)
        if not _is_number(value) or value <= 0:
            raise LMError(f"rope_scaling[{key!r}] must be a positive number, not {value!r}")
        scaling[key] = value
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        raise LMError("rope_scaling['high_freq_factor'] must be above 'low_freq_factor'")
    return scaling


def read_ids(raw: Any) -> tuple[int, ...]:
    """`eos_token_id` of a configuration, which may be null, a number or a list of numbers."""
    if raw is None:
        return ()
    return tuple(raw) if isinstance(raw, (list, tuple)) else (raw,)


_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "head_dim",
    "max_positions",
)


def _check_id(name: str, token: Any, vocab_size: int) -> None:
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
        raise LMError(f"{name} holds {token!r}, which is not a token of 0 to {vocab_size - 1}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _get(values: Mapping[str, Any], key: str, default: Any) -> Any:
    value = values.get(key)
    return default if value is None else value


def _read_id(raw: Any) -> Any:
    # -1 is how the first Llama configurations say "none".
    return None if raw == -1 else raw


def _read_architecture(values: Mapping[str, Any]) -> str:
    heads = _get(values, "architectures", [])
    if not isinstance(heads, list):
        raise LMError(f"architectures must be a list of names, not {heads!r}")
    kind: Any = values.get("model_type")
    if kind is None and heads:
        kind = next((k for k, name in ARCHITECTURES.items() if name == heads[0]), heads[0])
    check_architecture(kind)
    if heads and ARCHITECTURES[kind] not in heads:
        raise LMError(
            f"the model is a {heads[0]}, not a language model; expected {ARCHITECTURES[kind]}"
        )
    return str(kind)


def _read_head_dim(architecture: str, values: Mapping[str, Any]) -> Any:
    if values.get("head_dim") is not None:
        return values["head_dim"]
    if architecture == "qwen3":
        return 128
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if hidden % heads:
        raise LMError(f"hidden_size={hidden} must be a multiple of num_attention_heads={heads}")
    return hidden // heads


def _read_rope(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any] | None]:
    parameters = _rope_parameters(values)
    theta = parameters.get("rope_theta", _get(values, "rope_theta", 10000.0))
    scaling = values.get("rope_scaling") or parameters or None
    return theta, None if scaling is None else read_rope_scaling(scaling)


def _rope_parameters(values: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = _get(values, "rope_parameters", {})
    if not isinstance(parameters, Mapping):
        raise LMError(f"rope_parameters is a JSON object or null, not {parameters!r}")
    return parameters


def _refuse_unsupported(values: Mapping[str, Any]) -> None:
    """Refuse what would change the computation and is not implemented."""
    activation = _get(values, "hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise LMError(f"hidden_act {activation!r} is not supported; supported: silu")
    for key in ("attention_bias", "mlp_bias"):
        if values.get(key):
            raise LMError(f"{key}=true is not supported")
    if values.get("quantization_config"):
        raise LMError(
            "quantised weights are not supported; use the unquantised model or a GGUF file"
        )
    partial = _rope_parameters(values).get(
        "partial_rotary_factor", _get(values, "partial_rotary_factor", 1.0)
    )
    if partial != 1.0:
        raise LMError(f"partial_rotary_factor={partial!r} is not supported; supported: 1")
    layers = _get(values, "layer_types", [])
    full = isinstance(layers, list) and all(kind == "full_attention" for kind in layers)
    if values.get("use_sliding_window") or not full:
        raise LMError("sliding-window attention is not supported; every layer must see all tokens")
