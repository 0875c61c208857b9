"""Tokenizers from folders and GGUF files, and the character tokenizer."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrl_accel.envs.text import built_in_characters
from msrl_accel.errors import LMError
from msrl_accel.lm.config import tiny_config
from msrl_accel.lm.tokenizer import CharTokenizer, Tokenizer

tokenizers = pytest.importorskip("tokenizers")

CORPUS = [
    "The quick brown fox jumps over the lazy dog. 12 + 34 = 46",
    "the the them then there 100 200 it's don't we'll I'M\n\n\tindent",
    "Ünïcode, 日本語 and emoji 🎉🎉 in the text",
]
TEXTS = [
    *CORPUS,
    "",
    " leading and trailing  ",
    "2024-12-31 1234567 3.14159",
    "a\r\nb\n\n\nc \t d",
    "<|im_start|>user\nhi<|im_end|>",
    "IT'S a\u00a0no\u2003break \ufeff bom e\u0301",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"

SPLIT = {
    "llama-bpe": r"\p{N}{1,3}",
    "qwen2": r"\p{N}",
}


def pre_tokenizer(name):
    """The pre-tokenizers that the models' own tokenizer.json hold."""
    pre = tokenizers.pre_tokenizers
    if name == "gpt-2":
        return pre.ByteLevel(add_prefix_space=False)
    if name == "smollm":
        return pre.Sequence(
            [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
        )
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + SPLIT[name] + r"|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return pre.Sequence(
        [
            pre.Split(tokenizers.Regex(pattern), "isolated"),
            pre.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def trained(name="smollm"):
    """A small byte-level BPE, as the library itself trains it."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    if name == "qwen2":
        backend.normalizer = tokenizers.normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizer(name)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    return backend


def write_folder(folder, backend=None, **files):
    """A model folder's tokenizer; each of `files` becomes `<name>.json`."""
    (backend or trained()).save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


SETTINGS = {
    "eos_token": "<|im_end|>",
    "bos_token": {"content": "<|im_start|>", "lstrip": False},
    "pad_token": "<|endoftext|>",
    "chat_template": TEMPLATE,
}


def write_gguf(path, backend, pre, **changes):
    """The metadata that llama.cpp's conversion writes for a byte-level BPE."""
    gguf = pytest.importorskip("gguf")
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 1,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
        **changes,
    }
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            add = writer.add_string if isinstance(value, str) else writer.add_uint32
            add(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def test_a_folder(tmp_path):
    backend = trained()
    tokenizer = Tokenizer.load(write_folder(tmp_path, backend, tokenizer_config=SETTINGS))
    for text in TEXTS:
        assert tokenizer.encode(text) == backend.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.pad_id) == ((2,), 1, 0)
    assert tokenizer.vocab_size == backend.get_vocab_size()


def test_every_end_token_counts(tmp_path):
    folder = write_folder(
        tmp_path,
        tokenizer_config=SETTINGS,
        generation_config={"eos_token_id": [2, 0]},
        config={"eos_token_id": 5},
    )
    assert Tokenizer.load(folder).eos_ids == (2, 0, 5)


@pytest.mark.parametrize(
    ("files", "pad"),
    [
        ({"tokenizer_config": {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"}}, 0),
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, 2),
        ({"special_tokens_map": {"pad_token": {"content": "<|im_start|>"}}}, 1),
        ({"generation_config": {"pad_token_id": 7, "eos_token_id": 3}}, 7),
        ({"config": {"eos_token_id": [3, 4], "pad_token_id": None}}, 3),
        ({}, 0),
    ],
)
def test_the_padding_token_is_found(tmp_path, files, pad):
    assert Tokenizer.load(write_folder(tmp_path, **files)).pad_id == pad


def test_special_tokens_of_a_whole_text(tmp_path):
    backend = trained()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        "<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    tokenizer = Tokenizer.load(write_folder(tmp_path, backend))
    plain = tokenizer.encode("the fox")
    assert tokenizer.encode("the fox", add_special_tokens=True) == [1, *plain]
    assert tokenizer.decode([1, *plain, 2]) == "the fox"
    assert tokenizer.decode([1, *plain], skip_special_tokens=False) == "<|im_start|>the fox"


def test_stored_truncation_and_padding_have_no_effect(tmp_path):
    backend = trained()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer.load(write_folder(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode(CORPUS[0])) == CORPUS[0]


def test_chat(tmp_path):
    tokenizer = Tokenizer.load(write_folder(tmp_path, tokenizer_config=SETTINGS))
    messages = [{"role": "user", "content": "the fox"}]
    assert tokenizer.chat_text(messages) == "<|im_start|>the fox<|im_end|>"
    assert tokenizer.chat(messages) == [1, *tokenizer.encode("the fox"), 2]


def test_where_the_template_stands(tmp_path):
    folder = write_folder(tmp_path)
    with pytest.raises(LMError, match="no chat template"):
        Tokenizer.load(folder).chat([])
    several = [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
    write_folder(tmp_path, tokenizer_config={"chat_template": several})
    assert Tokenizer.load(folder).chat_text([]) == "D"
    (folder / "chat_template.jinja").write_text("newer {{ add_generation_prompt }}")
    assert Tokenizer.load(folder).chat_text([], False) == "newer False"


def test_saved_tokenizers_load_equal(tmp_path):
    (tmp_path / "a").mkdir()
    first = Tokenizer.load(write_folder(tmp_path / "a", tokenizer_config=SETTINGS))
    first.save(tmp_path / "b")
    second = Tokenizer.load(tmp_path / "b")
    for text in TEXTS:
        assert second.encode(text) == first.encode(text)
    assert (second.eos_ids, second.bos_id, second.pad_id) == ((2,), 1, 0)
    assert second.chat_template == TEMPLATE
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_bad_folders(tmp_path):
    with pytest.raises(LMError, match=r"has no tokenizer\.json.*save_pretrained"):
        Tokenizer.load(tmp_path)
    whole = trained().to_str()
    for content in ("", "{", whole[: len(whole) // 2], '{"model": 3}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(LMError, match=r"tokenizer\.json is damaged"):
            Tokenizer.load(tmp_path)
    write_folder(tmp_path, tokenizer_config={"eos_token": "<absent>"})
    with pytest.raises(LMError, match="eos_token is '<absent>'"):
        Tokenizer.load(tmp_path)
    write_folder(tmp_path, tokenizer_config={}, config={"eos_token_id": ["2"]})
    with pytest.raises(LMError, match="integers, not '2'"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("nonsense")
    with pytest.raises(LMError, match="not JSON"):
        Tokenizer.load(tmp_path)
    with pytest.raises(LMError, match="no language model at"):
        Tokenizer.load(tmp_path / "absent")


def test_bad_input(tmp_path):
    tokenizer = Tokenizer.load(write_folder(tmp_path))
    for text in (None, 3, "\ud800", ["a"]):
        with pytest.raises(LMError, match="cannot be tokenized"):
            tokenizer.encode(text)
    with pytest.raises(LMError, match="negative"):
        tokenizer.decode([-1])
    assert tokenizer.decode([10**6]) == ""


def test_a_tokenizer_of_another_model(tmp_path):
    tokenizer = Tokenizer.load(write_folder(tmp_path))
    size = tokenizer.vocab_size
    tokenizer.check_fits(tiny_config(size))
    with pytest.raises(LMError, match=f"{size} tokens, the model only {size - 1}"):
        tokenizer.check_fits(tiny_config(size - 1))


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_gguf_tokenizers_are_those_they_were_made_from(tmp_path, pre):
    backend = trained(pre)
    write_gguf(tmp_path / "m.gguf", backend, pre)
    tokenizer = Tokenizer.load(tmp_path / "m.gguf")
    for text in TEXTS:
        assert tokenizer.encode(text) == backend.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == backend.decode(backend.encode(text).ids)
    assert (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.pad_id) == ((2, 1), 1, 0)
    assert tokenizer.chat_text([{"content": "x"}]) == "<|im_start|>x<|im_end|>"


def test_gguf_tokenizers_begin_texts_as_they_say(tmp_path):
    for pre, says, begins in [
        ("smollm", True, True),
        ("smollm", None, False),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ]:
        write_gguf(tmp_path / "m.gguf", trained(pre), pre, **{"tokenizer.ggml.add_bos_token": says})
        ids = Tokenizer.load(tmp_path / "m.gguf").encode("the", add_special_tokens=True)
        assert (ids[0] == 1) is begins


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.model": "llama"}, "'llama'.*Hugging Face folder"),
        ({"tokenizer.ggml.pre": "tekken"}, "'tekken'.*gpt-2, smollm"),
        ({"tokenizer.ggml.pre": None}, "None"),
        ({"tokenizer.ggml.model": None}, r"lacks tokenizer\.ggml\.model"),
        ({"tokenizer.ggml.merges": ["zz qq"]}, "damaged tokenizer"),
        ({"tokenizer.ggml.merges": ["zz"]}, "damaged tokenizer"),
        ({"tokenizer.ggml.merges": [1, 2]}, "damaged tokenizer"),
    ],
)
def test_gguf_tokenizers_that_cannot_be_built(tmp_path, changes, words):
    write_gguf(tmp_path / "m.gguf", trained(), "smollm", **changes)
    with pytest.raises(LMError, match=words):
        Tokenizer.load(tmp_path / "m.gguf")


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("model"), tokenizer_config=SETTINGS)
    return Tokenizer.load(folder)


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
@settings(max_examples=200)
def test_any_text_returns_from_byte_level_tokens(byte_level, text):
    assert byte_level.decode(byte_level.encode(text), skip_special_tokens=False) == text


TASKS = CharTokenizer.for_tasks()
VISIBLE = "".join(map(chr, range(32, 127)))


@given(text=st.text(st.sampled_from("\n" + VISIBLE)))
def test_any_text_of_the_alphabet_returns_from_characters(text):
    ids = TASKS.encode(text)
    assert len(ids) == len(text)
    assert TASKS.decode([*ids, *TASKS.eos_ids, TASKS.pad_id]) == text


def test_the_character_tokenizer():
    tokenizer = CharTokenizer("ab<eos>")
    assert (tokenizer.pad_id, tokenizer.eos_ids, tokenizer.vocab_size) == (0, (1,), 9)
    assert tokenizer.encode("ba") == [3, 2]
    assert tokenizer.encode("<eos>") == [4, 5, 6, 7, 8]
    with pytest.raises(LMError, match="'c' is not in the alphabet"):
        tokenizer.encode("abc")
    with pytest.raises(LMError, match="no chat template"):
        tokenizer.chat([])
    for alphabet in ("", "aa"):
        with pytest.raises(LMError, match="alphabet"):
            CharTokenizer(alphabet)


def test_the_character_tokenizer_knows_the_built_in_tasks():
    characters = built_in_characters()
    assert len(TASKS.encode(characters)) == len(characters)


def test_the_character_tokenizer_comes_back_from_disk(tmp_path):
    tokenizer = CharTokenizer.for_tasks()
    tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    text = "12 + 3 = <eos>\n" + VISIBLE
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert (loaded.eos_ids, loaded.pad_id) == (tokenizer.eos_ids, tokenizer.pad_id)
    with pytest.raises(LMError, match="alphabet"):
        loaded.encode("é")


@pytest.fixture(scope="module")
def smollm2():
    pytest.importorskip("gguf")
    try:
        return Tokenizer.load("smollm2")
    except LMError as error:
        pytest.skip(str(error))


def test_smollm2(smollm2):
    text = "What is the capital of France?"
    # Ids of transformers' own reading of the published tokenizer.json.
    assert smollm2.encode(text) == [1780, 314, 260, 3575, 282, 4649, 47]
    assert (smollm2.eos_ids, smollm2.bos_id, smollm2.vocab_size) == ((2,), 1, 49152)
    assert smollm2.chat_text([{"role": "user", "content": text}]).endswith(
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_smollm2_against_llama_cpp(smollm2):
    llama_cpp = pytest.importorskip("llama_cpp")
    from msrl_accel.lm.sources import find_source

    reference = llama_cpp.Llama(str(find_source("smollm2")), vocab_only=True, verbose=False)
    for text in TEXTS:
        expected = reference.tokenize(text.encode(), add_bos=False, special=True)
        assert smollm2.encode(text) == expected
        assert smollm2.decode(expected, skip_special_tokens=False) == text
