"""The tokenizer inside a GGUF file: byte-level BPE, as its metadata describes it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrl_accel.errors import LMError
from msrl_accel.lm.gguf import GGUFFile
from msrl_accel.lm.tokenizer import Tokenizer, fast_settings, import_tokenizers

if TYPE_CHECKING:
    import tokenizers

_KEY = "tokenizer.ggml."
# Kinds of tokens, as llama.cpp numbers them.
_CONTROL, _USER_DEFINED = 3, 4
# How text falls into words before pairs are merged, by the name in `tokenizer.ggml.pre`.
_SPLIT_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLIT_QWEN2 = _SPLIT_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SPLITS = {"llama-bpe": _SPLIT_LLAMA3, "qwen2": _SPLIT_QWEN2}
_PRE = ("gpt-2", "smollm", *_SPLITS)


def load_gguf_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a GGUF file.

    Raises:
        LMError: the file is damaged, or its tokenizer is of a kind not supported.
    """
    file = GGUFFile(path)
    kind, pre = file.need(_KEY + "model"), file.get(_KEY + "pre")
    if kind != "gpt2":
        raise LMError(
            f"{path} has a tokenizer of the kind {kind!r}, which is not supported (gpt2 is): "
            "use the model's Hugging Face folder"
        )
    if pre not in _PRE:
        raise LMError(
            f"{path} splits text by {pre!r}, which is not supported; supported: {', '.join(_PRE)}"
        )
    tokens = file.need(_KEY + "tokens")
    backend = _build(file, tokens, pre)

    def token(role: str) -> str | None:
        number = file.get(f"{_KEY}{role}_token_id")
        return tokens[number] if number is not None and number < len(tokens) else None

    bos = token("bos")
    add_bos = file.get(_KEY + "add_bos_token")
    if bos is not None and (pre == "llama-bpe" if add_bos is None else add_bos):
        backend.post_processor = import_tokenizers().processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokens.index(bos))]
        )
    settings = fast_settings(token("padding"), token("eos"), bos)
    settings["chat_template"] = file.get("tokenizer.chat_template")
    end_of_turn = file.get(_KEY + "eot_token_id")
    return Tokenizer(backend, settings, eos_ids=[] if end_of_turn is None else [end_of_turn])


def _build(file: GGUFFile, tokens: list[str], pre: str) -> tokenizers.Tokenizer:
    library = import_tokenizers()
    pairs, kinds = file.need(_KEY + "merges"), file.need(_KEY + "token_type")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    try:
        merges = [tuple(pair.split(" ")) for pair in pairs]
        model = library.models.BPE(
            vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe"
        )
    except Exception as error:  # The library raises Exception itself.
        raise LMError(f"{file.path} has a damaged tokenizer: {error}") from error
    backend: tokenizers.Tokenizer = library.Tokenizer(model)
    if pre == "qwen2":
        backend.normalizer = library.normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(library, pre)
    backend.decoder = library.decoders.ByteLevel()
    for special, kind in ((True, _CONTROL), (False, _USER_DEFINED)):
        added = [
            library.AddedToken(token, special=special, normalized=False)
            for token, its_kind in zip(tokens, kinds)
            if its_kind == kind
        ]
        backend.add_special_tokens(added) if special else backend.add_tokens(added)
    return backend


def _pre_tokenizer(library: Any, pre: str) -> Any:
    split = library.pre_tokenizers
    if pre == "gpt-2":
        return split.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        return split.Sequence(
            [split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False)]
        )
    pattern = library.Regex(_SPLITS[pre])
    return split.Sequence(
        [
            split.Split(pattern, behavior="isolated"),
            split.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
