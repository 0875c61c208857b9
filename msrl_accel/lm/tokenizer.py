"""Text to token ids and back, with the chat template and the end tokens that a model comes with."""

from __future__ import annotations

import json
import string
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrl_accel.errors import LMError
from msrl_accel.files import PathLike, write_text_atomic
from msrl_accel.lm.chat import render_chat
from msrl_accel.lm.config import LMConfig, read_ids
from msrl_accel.lm.sources import EXTRA, find_source, read_json_if_present

if TYPE_CHECKING:
    import tokenizers

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
# The key of tokenizer_config.json that says so; other readers ignore it.
_CHARACTER_LEVEL = "character_level"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class Tokenizer:
    """A tokenizer of the `tokenizers` library with what a model folder says about its use.

    Args:
        backend: turns text into ids; kept, with truncation and padding switched off.
        settings: content of tokenizer_config.json: special tokens, chat template.
        eos_ids: end tokens besides the `eos_token` of the settings.
        pad_id: where the settings name no `pad_token`.

    Raises:
        LMError: a special token is not in the vocabulary, or an id is no integer.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        settings: Mapping[str, Any],
        *,
        eos_ids: Iterable[int] = (),
        pad_id: int | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._settings = dict(settings)
        self.special_tokens = _special_tokens(settings)
        own = self._special_id("eos_token")
        ids = ([] if own is None else [own]) + list(eos_ids)
        for token in (*ids, *(() if pad_id is None else (pad_id,))):
            if isinstance(token, bool) or not isinstance(token, int):
                raise LMError(f"token ids are integers, not {token!r}")
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(ids))
        self.bos_id = self._special_id("bos_token")
        self.pad_id: int = self._choose_pad(pad_id)
        self.chat_template = _chat_template(settings)
        self._alphabet: frozenset[str] | None = None
        if settings.get(_CHARACTER_LEVEL):
            self._alphabet = frozenset(t for t in backend.get_vocab() if len(t) == 1)
            # Otherwise "<eos>" in a text would become the end token.
            backend.encode_special_tokens = True

    @classmethod
    def load(cls, source: PathLike) -> Tokenizer:
        """The tokenizer of a model: a folder, a `.gguf` file, or "smollm2".

        End tokens are those of tokenizer_config.json, generation_config.json and config.json.

        Raises:
            LMError: there is none, it is damaged, or it is of a kind not supported.
        """
        path = find_source(source)
        if path.is_dir():
            return _load_folder(path)
        from msrl_accel.lm.gguf_tokenizer import load_gguf_tokenizer

        return load_gguf_tokenizer(path)

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id; the model's embedding may be larger."""
        return max(self._backend.get_vocab().values()) + 1

    def check_fits(self, config: LMConfig) -> None:
        """Raise LMError where a token id is beyond the embedding of the model."""
        if self.vocab_size > config.vocab_size:
            raise LMError(
                f"the tokenizer has {self.vocab_size} tokens, the model only "
                f"{config.vocab_size}: they do not belong together"
            )

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text.

        Names of special tokens in the text become those tokens, as in transformers.

        Args:
            add_special_tokens: begin (or end) as the model expects a whole text to, with BOS for
                instance. Leave it off for pieces of a text, and for what a chat template wrote.

        Raises:
            LMError: `text` is no valid text, or has a character outside a character vocabulary.
        """
        if self._alphabet is not None:
            foreign = sorted(set(text) - self._alphabet)
            if foreign:
                raise LMError(
                    f"the character {foreign[0]!r} is not in the alphabet of the tokenizer"
                )
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeError) as error:
            raise LMError(f"{text!r} cannot be tokenized: {error}") from error
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        try:
            text: str = self._backend.decode(
                [int(token) for token in ids], skip_special_tokens=skip_special_tokens
            )
        except OverflowError as error:
            raise LMError("token ids cannot be negative") from error
        return text

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation, as `chat_text` writes it."""
        return self.encode(self.chat_text(messages, add_generation_prompt, **variables))

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """A conversation in the words of the model's chat template.

        Args:
            messages: `{"role": "system" | "user" | "assistant", "content": text}` each.
            add_generation_prompt: end with what opens the assistant's answer.
            variables: what else the template reads, such as `tools` or `enable_thinking`.

        Raises:
            LMError: the tokenizer has no template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise LMError("the tokenizer has no chat template: give prompts as plain text")
        return render_chat(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens, **variables},
        )

    def save(self, folder: PathLike) -> None:
        """Write tokenizer.json and tokenizer_config.json, which transformers reads too.

        Raises:
            OSError: a file cannot be written.
        """
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        settings = {**self._settings, **self.special_tokens}
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template
        write_text_atomic(target / TOKENIZER, self._backend.to_str(pretty=True) + "\n")
        write_text_atomic(target / TOKENIZER_CONFIG, json.dumps(settings, indent=2) + "\n")

    def _special_id(self, kind: str) -> int | None:
        token = self.special_tokens.get(kind)
        if token is None:
            return None
        found: int | None = self._backend.token_to_id(token)
        if found is None:
            raise LMError(f"{kind} is {token!r}, which is not in the vocabulary of the tokenizer")
        return found

    def _choose_pad(self, fallback: int | None) -> int:
        for token in (self._special_id("pad_token"), fallback, *self.eos_ids):
            if token is not None:
                return token
        # Any token does: padding is masked wherever it stands.
        return 0


class CharTokenizer(Tokenizer):
    """One token a character, for small models trained from nothing: `<pad>` 0, `<eos>` 1.

    Args:
        alphabet: the characters, in the order of their ids from 2.

    Raises:
        LMError: the alphabet is empty or repeats a character.
    """

    def __init__(self, alphabet: str) -> None:
        if not alphabet or len(set(alphabet)) != len(alphabet):
            raise LMError("the alphabet of a tokenizer must hold each of its characters once")
        library = import_tokenizers()
        special = ["<pad>", "<eos>"]
        vocabulary = {token: number for number, token in enumerate([*special, *alphabet])}
        # Byte pairs without merges: single characters.
        backend = library.Tokenizer(library.models.BPE(vocab=vocabulary, merges=[]))
        backend.decoder = library.decoders.Fuse()
        backend.add_special_tokens(special)
        super().__init__(backend, {**fast_settings(*special), _CHARACTER_LEVEL: True})

    @classmethod
    def for_tasks(cls, characters: str = "") -> CharTokenizer:
        """The alphabet of the built-in tasks: newline, space, and the visible ASCII characters.

        Args:
            characters: what it must hold besides.
        """
        usual = "\n " + string.digits + string.ascii_letters + string.punctuation
        return cls(usual + "".join(sorted(set(characters) - set(usual))))


def fast_settings(
    pad_token: str | None, eos_token: str | None, bos_token: str | None = None
) -> dict[str, Any]:
    """Content of tokenizer_config.json for a tokenizer that tokenizer.json describes in full."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": bos_token,
        "eos_token": eos_token,
        "pad_token": pad_token,
    }


def import_tokenizers() -> Any:
    """The `tokenizers` library, or LMError naming the extra."""
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.normalizers
        import tokenizers.pre_tokenizers
        import tokenizers.processors
    except ImportError as error:
        raise LMError(f"tokenizers need the package tokenizers; {EXTRA}") from error
    return tokenizers


def _load_folder(folder: Path) -> Tokenizer:
    file = folder / TOKENIZER
    if not file.is_file():
        raise LMError(
            f"{folder} has no {TOKENIZER}: write one with transformers, "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        )
    try:
        backend = import_tokenizers().Tokenizer.from_file(str(file))
    except Exception as error:  # The library raises Exception itself.
        raise LMError(f"{file} is damaged ({error}): fetch it again") from error
    settings = {
        **read_json_if_present(folder / "special_tokens_map.json"),
        **read_json_if_present(folder / TOKENIZER_CONFIG),
    }
    template = folder / "chat_template.jinja"
    if template.is_file():
        settings["chat_template"] = template.read_text(encoding="utf-8")
    models = [
        read_json_if_present(folder / name) for name in ("generation_config.json", "config.json")
    ]
    pads = [model["pad_token_id"] for model in models if model.get("pad_token_id") is not None]
    return Tokenizer(
        backend,
        settings,
        eos_ids=[token for model in models for token in read_ids(model.get("eos_token_id"))],
        pad_id=pads[0] if pads else None,
    )


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by their role; each is stored as text or as an object that holds it."""
    tokens = {}
    for kind in _SPECIAL:
        token = settings.get(kind)
        if isinstance(token, Mapping):
            token = token.get("content")
        if isinstance(token, str):
            tokens[kind] = token
    return tokens


def _chat_template(settings: Mapping[str, Any]) -> str | None:
    """The template, or of several the one named "default"."""
    stored = settings.get("chat_template")
    if isinstance(stored, list):
        named = [e for e in stored if isinstance(e, Mapping) and e.get("name") == "default"]
        stored = named[0].get("template") if named else None
    return stored if isinstance(stored, str) else None
