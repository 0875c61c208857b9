"""A language model to train: from disk, or made from nothing for a task."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from msrl_accel.errors import ConfigError
from msrl_accel.files import PathLike, write_text_atomic
from msrl_accel.lm.config import LMConfig, tiny_config
from msrl_accel.lm.sources import read_json
from msrl_accel.lm.tokenizer import CharTokenizer, Tokenizer
from msrl_accel.lm.weights import CONFIG, load_model


class OpenedModel(NamedTuple):
    """What is needed to build a model and to talk with it."""

    config: LMConfig
    tokenizer: Tokenizer
    arrays: dict[str, np.ndarray] | None
    """Weights by name; None for a model that starts from nothing, or whose weights come later."""


def open_model(
    source: str | None, *, positions: int = 0, characters: str = "", weights: bool = True
) -> OpenedModel:
    """The model that `source` names, or for None a small one that knows nothing.

    Args:
        source: a folder, a .gguf file, "smollm2", or None.
        positions: tokens a sequence may have.
        characters: what the tokenizer of a new model must know besides the visible ASCII.
        weights: whether to keep the weights.

    Raises:
        LMError: there is no usable model.
        ConfigError: the model is not made for so many positions.
    """
    if source is None:
        characters_only = CharTokenizer.for_tasks(characters)
        config = tiny_config(
            characters_only.vocab_size,
            eos_ids=characters_only.eos_ids,
            pad_id=characters_only.pad_id,
            max_positions=max(positions, 64),
        )
        return OpenedModel(config, characters_only, None)
    config, arrays = load_model(source)
    tokenizer = Tokenizer.load(source)
    tokenizer.check_fits(config)
    if positions > config.max_positions:
        raise ConfigError(
            f"max_prompt_tokens + max_new_tokens = {positions}: {source} is made for at most "
            f"{config.max_positions}; lower them"
        )
    config = replace(config, eos_ids=tokenizer.eos_ids or config.eos_ids, pad_id=tokenizer.pad_id)
    return OpenedModel(config, tokenizer, arrays if weights else None)


def save_description(folder: PathLike, opened: OpenedModel) -> None:
    """Write configuration and tokenizer, without weights, for a run that will be resumed."""
    opened.tokenizer.save(folder)
    write_text_atomic(Path(folder) / CONFIG, json.dumps(opened.config.to_dict(), indent=2) + "\n")


def load_description(folder: PathLike) -> OpenedModel:
    """Inverse of `save_description`; the weights come later.

    Raises:
        LMError: a file is missing or damaged.
    """
    config = LMConfig.from_dict(read_json(Path(folder) / CONFIG))
    return OpenedModel(config, Tokenizer.load(folder), None)
