"""Hugging Face transformers reads what is written here and writes what is read here.

Runs only where torch and transformers are installed.
"""

from __future__ import annotations

import numpy as np
import pytest
from model_files import hf_config, random_arrays

from msrl_accel.errors import LMError
from msrl_accel.lm.config import LMConfig
from msrl_accel.lm.sources import find_source
from msrl_accel.lm.tokenizer import CharTokenizer, Tokenizer
from msrl_accel.lm.weights import load_model, save_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS = {
    "llama": hf_config(),
    "llama3": hf_config(rope_scaling=LLAMA3, rope_theta=100.0),
    "linear": hf_config(rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "tied": hf_config(tie_word_embeddings=True, eos_token_id=[1, 4], pad_token_id=0),
    "qwen2": hf_config("qwen2"),
    "qwen3": hf_config("qwen3"),
}
TOKENS = torch.arange(40)[None] % 37
CHAT = (
    "{%- set ns = namespace(last=0) -%}\n"
    "{%- for m in messages -%}\n"
    "    {%- if loop.index0 == 3 %}{% break %}{% endif -%}\n"
    "    {%- set ns.last = loop.index -%}\n"
    "{{ m.role }}:\n"
    "    {% generation %}\n{{ m.content | trim }}\n{% endgeneration %}\n"
    "{%- endfor %}\n"
    "{{ tools | tojson(indent=1) }}{{ ns.last }}{{ eos_token }}\n"
)


def theirs(name):
    """A model with random weights of transformers' own making, in float32."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**VARIANTS[name])
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", VARIANTS)
def test_their_folders_are_read(tmp_path, name):
    model = theirs(name)
    model.save_pretrained(tmp_path)
    config, arrays = load_model(tmp_path)
    assert config == LMConfig.from_dict(VARIANTS[name])
    for key, value in model.state_dict().items():
        if key != "lm_head.weight" or not config.tie_embeddings:
            assert np.array_equal(arrays[key], value.numpy())


@pytest.mark.parametrize("name", VARIANTS)
def test_their_outputs_on_what_is_written(tmp_path, name):
    model = theirs(name)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    config, arrays = load_model(tmp_path / "theirs")
    save_model(tmp_path / "ours", config, arrays, CharTokenizer.for_tasks(), max_shard_bytes=30_000)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert again.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
    ends = again.generation_config.eos_token_id
    assert tuple(ends if isinstance(ends, list) else [ends]) == config.eos_ids


def test_half_precision(tmp_path):
    config = LMConfig.from_dict(hf_config())
    arrays = random_arrays(hf_config())
    for dtype in ("float16", "bfloat16"):
        save_model(tmp_path / dtype, config, arrays, CharTokenizer.for_tasks(), dtype)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / dtype, dtype="auto")
        assert model.dtype == getattr(torch, dtype)
        for name, value in model.state_dict().items():
            expected = torch.from_numpy(arrays[name]).to(model.dtype)
            assert torch.equal(value, expected)
        model.save_pretrained(tmp_path / f"{dtype}_back")
        for name, array in load_model(tmp_path / f"{dtype}_back")[1].items():
            assert np.array_equal(array, model.state_dict()[name].float().numpy())


def test_the_character_tokenizer(tmp_path):
    ours = CharTokenizer.for_tasks()
    ours.save(tmp_path)
    for read in (transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast):
        tokenizer = read.from_pretrained(tmp_path)
        text = "12 + 34 = 46\nDon't [x] { y }"
        assert tokenizer(text).input_ids == ours.encode(text)
        assert tokenizer.decode(ours.encode(text)) == text
        assert (tokenizer.pad_token_id, (tokenizer.eos_token_id,)) == (ours.pad_id, ours.eos_ids)


def chat_tokenizer(folder):
    """A byte-level tokenizer with a chat template, saved by transformers."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<end>", "<pad>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the user and the assistant"], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", pad_token="<pad>"
    )
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return tokenizer


def test_chat_templates(tmp_path):
    theirs = chat_tokenizer(tmp_path / "theirs")
    ours = Tokenizer.load(tmp_path / "theirs")
    ours.save(tmp_path / "ours")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    messages = [
        {"role": "user", "content": " Is 1 < 2 & é? "},
        {"role": "assistant", "content": "Yes <end>\n"},
    ] * 2
    tools = [{"name": "add", "about": "<b>é</b>"}]
    expected = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
    assert ours.chat_text(messages, False, tools=tools) == expected
    assert again.apply_chat_template(messages, tools=tools, tokenize=False) == expected
    ids = theirs.apply_chat_template(messages, tools=tools, return_dict=False)
    assert ours.chat(messages, False, tools=tools) == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert (ours.eos_ids, ours.pad_id) == ((theirs.eos_token_id,), theirs.pad_token_id)


def test_a_gguf_file(tmp_path):
    """The weights and tokenizer of SmolLM2 as transformers reads them from the same file."""
    pytest.importorskip("gguf")
    try:
        path = find_source("smollm2")
    except LMError as error:
        pytest.skip(str(error))
    where = {"gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, dtype=torch.float32, **where
    )
    _, arrays = load_model(path)
    state = model.state_dict()
    assert all(np.array_equal(array, state[name].numpy()) for name, array in arrays.items())
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **where)
    for text in ("Hello  world 1234\n\n", "Ünï 🎉 日本語\tbar's", "<|im_start|>user\n"):
        assert Tokenizer.load(path).encode(text) == tokenizer(text).input_ids
