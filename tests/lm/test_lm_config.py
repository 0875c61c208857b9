"""config.json of published models, in the spellings of several transformers versions."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_files import VOCAB, hf_config

from msrl_accel.errors import LMError
from msrl_accel.lm.config import LMConfig, tiny_config

# As published, without keys that do not bear on the computation.
QWEN2_5 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
LLAMA_3_2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}


# Parameters as the models' cards count them.
@pytest.mark.parametrize(
    ("published", "parameters"),
    [(QWEN2_5, 494_032_768), (QWEN3, 596_049_920), (LLAMA_3_2, 1_235_814_400)],
)
def test_published_models_have_their_published_size(published, parameters):
    config = LMConfig.from_dict(published)
    assert config.n_parameters == parameters
    assert LMConfig.from_dict(config.to_dict()) == config


def test_every_architecture_has_its_own_layers():
    qwen2, qwen3, llama = map(LMConfig.from_dict, (QWEN2_5, QWEN3, LLAMA_3_2))
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.head_dim) == (True, False, 64)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    assert (llama.qkv_bias, llama.qk_norm) == (False, False)
    assert llama.eos_ids == (128001, 128008, 128009)
    assert llama.rope_scaling == LLAMA_3_2["rope_scaling"]
    assert qwen2.weight_shapes()["model.layers.23.self_attn.k_proj.bias"] == (128,)
    assert qwen3.weight_shapes()["model.layers.0.self_attn.q_norm.weight"] == (128,)
    assert "lm_head.weight" not in qwen3.weight_shapes()


def test_newer_spelling_of_rotary_embeddings():
    old = LLAMA_3_2
    new = {k: v for k, v in old.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {"rope_theta": 500000.0, **old["rope_scaling"]}
    assert LMConfig.from_dict(new) == LMConfig.from_dict(old)
    plain = {**hf_config(), "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}
    assert LMConfig.from_dict(plain).rope_theta == 5.0
    assert LMConfig.from_dict(plain).rope_scaling is None


def test_older_spelling_of_the_kind_of_scaling():
    config = LMConfig.from_dict(hf_config(rope_scaling={"type": "linear", "factor": 2.0}))
    assert config.rope_scaling == {"rope_type": "linear", "factor": 2.0}


def test_defaults_of_the_format():
    short = hf_config()
    for key in ("num_key_value_heads", "head_dim", "rope_theta", "rms_norm_eps", "eos_token_id"):
        del short[key]
    config = LMConfig.from_dict({**short, "num_attention_heads": 3, "pad_token_id": -1})
    assert (config.n_kv_heads, config.head_dim) == (3, 8)
    assert (config.rope_theta, config.rms_norm_eps) == (10000.0, 1e-6)
    assert (config.eos_ids, config.pad_id) == ((), None)


def test_token_zero_as_end():
    config = LMConfig.from_dict(hf_config(eos_token_id=0, pad_token_id=0))
    assert config.to_dict()["eos_token_id"] == 0
    assert LMConfig.from_dict(config.to_dict()) == config


def test_the_tiny_model_has_a_million_parameters():
    assert 0.9e6 < tiny_config(98).n_parameters < 1.1e6
    assert LMConfig.from_dict(tiny_config(98, eos_ids=(1,)).to_dict()) == tiny_config(
        98, eos_ids=(1,)
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "'mamba'.*llama, qwen2"),
        ({"model_type": None, "architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel'"),
        ({"model_type": None, "architectures": None}, "None.*supported: llama"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"hidden_size": "24"}, "hidden_size.*'24'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "n_heads=4.*n_kv_heads=3"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"head_dim": None, "num_attention_heads": 5, "num_key_value_heads": 5}, "hidden_size=24"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"eos_token_id": VOCAB}, "eos_ids"),
        ({"eos_token_id": [2, "x"]}, "eos_ids.*'x'"),
        ({"pad_token_id": -3}, "pad_id"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'.*linear, llama3"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "linear, llama3"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_scaling": {**LLAMA_3_2["rope_scaling"], "high_freq_factor": 1.0}}, "high_freq"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"use_sliding_window": True}, "sliding"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(change, words):
    with pytest.raises(LMError, match=words):
        LMConfig.from_dict(hf_config(**change))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats(0, 2) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
)


@given(
    key=st.sampled_from([*QWEN3, "rope_parameters", "layer_types", "partial_rotary_factor"]),
    value=JSON,
)
def test_any_value_is_read_or_refused(key, value):
    with contextlib.suppress(LMError):
        config = LMConfig.from_dict({**QWEN3, key: value})
        assert LMConfig.from_dict(config.to_dict()) == config


def test_only_an_object_is_a_configuration():
    with pytest.raises(LMError, match="list"):
        LMConfig.from_dict([])
