"""Small models on disk, written by other libraries than the one under test."""

from __future__ import annotations

import json

import numpy as np
from safetensors.numpy import save_file

from msrl_accel.lm.config import LMConfig

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB = 4, 2, 8, 24, 300

HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ARCHITECTURES = {
    "llama": {},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "tie_word_embeddings": True,
    },
}


def hf_config(architecture="llama", **changes):
    return {**HF_CONFIG, **ARCHITECTURES[architecture], **changes}


def random_arrays(config, seed=0):
    """A weight of every name and shape."""
    rng = np.random.default_rng(seed)
    shapes = LMConfig.from_dict(config).weight_shapes()
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_folder(folder, config=None, arrays=None):
    """A model folder whose safetensors the `safetensors` package wrote."""
    config = hf_config() if config is None else config
    arrays = random_arrays(config) if arrays is None else arrays
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(arrays, folder / "model.safetensors")
    return arrays


GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def to_llama_cpp(name, array, architecture):
    """Name and content of a weight as llama.cpp's conversion script stores it."""
    if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = HEADS if "q_proj" in name else KV_HEADS
        array = (
            array.reshape(heads, 2, array.shape[0] // heads // 2, array.shape[1])
            .swapaxes(1, 2)
            .reshape(array.shape)
        )
    name = name.replace("model.layers.", "blk.")
    for theirs, its in GGUF_NAMES.items():
        name = name.replace(theirs, its)
    return name, array


def write_gguf(
    path,
    architecture="llama",
    arrays=None,
    *,
    metadata=None,
    leave_out=(),
    quantise=False,
    extra=(),
    theta=10000.0,
):
    """A GGUF file of the model of `hf_config(architecture)`, by the `gguf` package."""
    import gguf

    config = hf_config(architecture)
    arrays = random_arrays(config) if arrays is None else arrays
    writer = gguf.GGUFWriter(path, architecture)
    numbers = {
        "block_count": 2,
        "context_length": 64,
        "embedding_length": HIDDEN,
        "feed_forward_length": 40,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "rope.dimension_count": HEAD_DIM,
    }
    for key, value in {**numbers, **(metadata or {})}.items():
        if key not in leave_out:
            add = writer.add_string if isinstance(value, str) else writer.add_uint32
            add(f"{architecture}.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(theta)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(7)
    writer.add_bos_token_id(1)
    for name, array in [*(to_llama_cpp(n, a, architecture) for n, a in arrays.items()), *extra]:
        if name in leave_out:
            continue
        if quantise and array.ndim == 2 and array.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return arrays
