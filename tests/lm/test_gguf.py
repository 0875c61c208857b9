"""GGUF files: kinds of tensors, scaling, damage."""

from __future__ import annotations

import numpy as np
import pytest
from model_files import HEAD_DIM, hf_config, random_arrays, write_gguf

from msrl_accel.errors import LMError
from msrl_accel.lm.config import LMConfig
from msrl_accel.lm.sources import find_source
from msrl_accel.lm.weights import load_model

gguf = pytest.importorskip("gguf")


def test_quantised_tensors_come_dequantised(tmp_path):
    arrays = random_arrays(hf_config())
    write_gguf(tmp_path / "m.gguf", arrays=arrays, quantise=True)
    # Of these matrices only o_proj has rows of whole blocks of 32.
    name = "model.layers.1.self_attn.o_proj.weight"
    read = load_model(tmp_path / "m.gguf")[1][name]
    assert not np.array_equal(read, arrays[name])
    step = np.abs(arrays[name]).max(axis=1, keepdims=True) / 127
    assert (np.abs(read - arrays[name]) <= step * 0.6).all()


def test_half_precision_tensors(tmp_path):
    arrays = {n: a.astype(np.float16) for n, a in random_arrays(hf_config()).items()}
    write_gguf(tmp_path / "m.gguf", arrays=arrays)
    for name, array in load_model(tmp_path / "m.gguf")[1].items():
        assert array.dtype == np.float32
        assert np.array_equal(array, arrays[name])


def test_tied_embeddings_are_those_without_a_head(tmp_path):
    write_gguf(tmp_path / "m.gguf", leave_out=("output.weight",))
    config, arrays = load_model(tmp_path / "m.gguf")
    assert config.tie_embeddings
    assert "lm_head.weight" not in arrays


def test_linear_scaling(tmp_path):
    write_gguf(tmp_path / "m.gguf", metadata={"rope.scaling.type": "linear"})
    with pytest.raises(LMError, match=r"lacks llama\.rope\.scaling\.factor"):
        load_model(tmp_path / "m.gguf")
    write_gguf(
        tmp_path / "n.gguf", metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 4}
    )
    assert load_model(tmp_path / "n.gguf")[0].rope_scaling == {
        "rope_type": "linear",
        "factor": 4.0,
    }


def llama3_factors():
    """As in llama.cpp's conversion script, for theta 500000 and a head of 8."""
    factors = []
    for pair in range(HEAD_DIM // 2):
        wave = 2 * np.pi * 500000.0 ** (2 * pair / HEAD_DIM)
        if wave < 8192 / 4:
            factors.append(1.0)
        elif wave > 8192 / 1:
            factors.append(32.0)
        else:
            smooth = (8192 / wave - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / 32.0 + smooth))
    return np.array(factors, np.float32)


def test_the_scaling_of_llama_3_is_recognised_by_its_factors(tmp_path):
    factors = llama3_factors()
    assert factors.max() == 32.0
    write_gguf(tmp_path / "m.gguf", theta=500000.0, extra=[("rope_freqs.weight", factors)])
    assert load_model(tmp_path / "m.gguf")[0].rope_scaling == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_other_factors_are_refused(tmp_path):
    odd = np.array([1, 2, 3, 4], np.float32)
    write_gguf(tmp_path / "m.gguf", extra=[("rope_freqs.weight", odd)])
    with pytest.raises(LMError, match="rotary"):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "mamba"}, "'mamba'.*llama, qwen2, qwen3"),
        ({"metadata": {"rope.scaling.type": "yarn", "rope.scaling.factor": 2}}, "'yarn'"),
        ({"metadata": {"rope.dimension_count": 4}}, "rope.dimension_count=4"),
        ({"metadata": {"attention.head_count": 0}}, "head_count"),
        ({"metadata": {"embedding_length": "many"}}, "embedding_length.*'many'"),
        ({"metadata": {"expert_count": 8}}, "mixture of experts"),
        ({"metadata": {"block_count": 3}}, r"lacks model\.layers\.2\."),
        ({"metadata": {"feed_forward_length": 41}}, r"gate_proj.*\(41, 24\)"),
        ({"leave_out": ("block_count",)}, r"lacks llama\.block_count"),
        ({"leave_out": ("token_embd.weight",)}, r"token_embd\.weight"),
        ({"leave_out": ("blk.0.ffn_up.weight",)}, r"layers\.0\.mlp\.up_proj\.weight"),
        ({"extra": [("blk.0.attn_sinks.weight", np.ones(4, np.float32))]}, "attn_sinks"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(tmp_path, changes, words):
    architecture = changes.pop("architecture", "llama")
    arrays = random_arrays(hf_config())
    write_gguf(tmp_path / "m.gguf", "llama", arrays, **changes)
    if architecture != "llama":
        rename_architecture(tmp_path / "m.gguf", architecture)
    with pytest.raises(LMError, match=words):
        load_model(tmp_path / "m.gguf")


def rename_architecture(path, name):
    content = path.read_bytes()
    assert content.count(b"\x05\x00\x00\x00\x00\x00\x00\x00llama") == 1
    path.write_bytes(
        content.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0" + name.encode())
    )


def test_a_file_cut_anywhere_is_refused(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    content = (tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [0, 3, 4, 8, 23, 24, 40, 100, 500, 1000, 1500, 2000, 5000, len(content) - 40]:
        cut.write_bytes(content[:size])
        with pytest.raises(LMError, match="cut off"):
            load_model(cut)


def test_another_file_with_the_suffix(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(LMError, match="no GGUF file"):
        load_model(tmp_path / "m.gguf")


def test_smollm2():
    try:
        find_source("smollm2")
    except LMError as error:
        pytest.skip(str(error))
    config, arrays = load_model("smollm2")
    assert config.n_parameters == 134_515_008
    assert (config.n_layers, config.rope_theta, config.rms_norm_eps) == (30, 100000.0, 1e-5)
    assert config.eos_ids == (2,)
    assert LMConfig.from_dict(config.to_dict()) == config
    assert arrays["model.layers.29.self_attn.k_proj.weight"].shape == (192, 576)
