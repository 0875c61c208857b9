"""Weights of language models from and to disk, by their Hugging Face names, float32 in memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from msrl_accel.errors import LMError
from msrl_accel.files import PathLike, staged_folder, write_bytes_synced
from msrl_accel.lm.config import LMConfig, read_ids
from msrl_accel.lm.gguf import read_gguf
from msrl_accel.lm.safetensors_io import (
    DTYPES,
    ITEM_BYTES,
    read_safetensors,
    write_safetensors,
)
from msrl_accel.lm.sources import find_source, read_json, read_json_if_present

if TYPE_CHECKING:
    from msrl_accel.lm.tokenizer import Tokenizer

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# The size at which Hugging Face too begins a new file.
MAX_SHARD_BYTES = 5_000_000_000
# What `save_model` writes, and so may replace.
_OURS = re.compile(
    r"(generation_|tokenizer_)?config\.json|tokenizer\.json"
    r"|model(-\d+-of-\d+)?\.safetensors(\.index\.json)?"
)
# Constants that old files store as if they were weights.
_DERIVED = "rotary_emb.inv_freq"


def load_model(source: PathLike) -> tuple[LMConfig, dict[str, np.ndarray]]:
    """Configuration and float32 weights of a model on disk.

    Args:
        source: a folder (config.json and safetensors, in one file or sharded with an index), a
            `.gguf` file, or "smollm2".

    Returns:
        The configuration, its `eos_ids` joined with those of generation_config.json, and the
        arrays by Hugging Face name in the order of `LMConfig.weight_shapes`. Tied embeddings are
        there once.

    Raises:
        LMError: nothing usable is there; a file is damaged, cut off or of a kind not supported; a
            tensor is missing, unexpected, of the wrong shape, or not finite. Pickled weights
            (.bin, .pth) are never opened.
    """
    path = find_source(source)
    config, arrays = _read_folder(path) if path.is_dir() else read_gguf(path)
    return config, _checked(config, arrays, path)


def save_model(
    folder: PathLike,
    config: LMConfig,
    arrays: Mapping[str, np.ndarray],
    tokenizer: Tokenizer,
    dtype: str = "float32",
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a folder that `load_model`, `Tokenizer.load` and transformers read.

    A folder that holds a model already is replaced as a whole, and stays as it was on failure.

    Args:
        dtype: "float32", "float16" or "bfloat16", of the numbers on disk.

    Raises:
        LMError: `arrays` do not fit `config`, a number does not fit `dtype`, `folder` holds
            something else than a model, or cannot be written.
    """
    target = Path(folder).resolve()
    if dtype not in DTYPES:
        raise LMError(f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    tokenizer.check_fits(config)
    arrays = _checked(config, arrays, "the model")
    _check_target(target)
    try:
        with staged_folder(target) as staging:
            _write_weights(staging, arrays, dtype, max_shard_bytes)
            _write_json(staging / CONFIG, {**config.to_dict(), "torch_dtype": dtype})
            _write_json(staging / GENERATION_CONFIG, _generation_config(config))
            tokenizer.save(staging)
    except OSError as error:
        raise LMError(
            f"cannot write {target}: {error.strerror or error}; free disk space, or choose "
            "another folder"
        ) from error


def _read_folder(folder: Path) -> tuple[LMConfig, dict[str, np.ndarray]]:
    config = LMConfig.from_dict(
        with_generation_eos(
            read_json(folder / CONFIG), read_json_if_present(folder / GENERATION_CONFIG)
        )
    )
    arrays: dict[str, np.ndarray] = {}
    for file in _weight_files(folder):
        arrays.update(read_safetensors(file))
    return config, arrays


def with_generation_eos(config: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json with the end tokens of generation_config.json added."""
    ids = read_ids(config.get("eos_token_id")) + read_ids(generation.get("eos_token_id"))
    return {**config, "eos_token_id": list(dict.fromkeys(ids))}


def _weight_files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        names = read_json(folder / INDEX).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise LMError(f"{folder / INDEX} has no weight_map")
        return [_shard(folder, name) for name in dict.fromkeys(names.values())]
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pth", ".pt"))
    if pickled:
        raise LMError(
            f"{folder} holds pickled weights ({pickled[0]}), which can run code when opened: "
            "where you trust them, convert them with transformers, "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other_folder)"
        )
    raise LMError(f"{folder} has neither {SINGLE} nor {INDEX}")


def _shard(folder: Path, name: Any) -> Path:
    # A plain name cannot leave the folder. (Links may: caches keep the files elsewhere.)
    if not isinstance(name, str) or Path(name).name != name or "\\" in name:
        raise LMError(f"{folder / INDEX} names {name!r}, which is not a file of its folder")
    if not name.endswith(".safetensors"):
        raise LMError(f"{folder / INDEX} names {name!r}, which is not a safetensors file")
    if not (folder / name).is_file():
        raise LMError(f"{folder} lacks {name}, which {INDEX} names: fetch it again")
    return folder / name


def _checked(
    config: LMConfig, arrays: Mapping[str, np.ndarray], source: Any
) -> dict[str, np.ndarray]:
    """The arrays in the order of the configuration, when they are exactly those it asks for."""
    shapes = config.weight_shapes()
    left = {name: a for name, a in arrays.items() if not name.endswith(_DERIVED)}
    if config.tie_embeddings and "lm_head.weight" in left:
        _check_tie(left.pop("lm_head.weight"), left.get("model.embed_tokens.weight"), source)
    missing = [name for name in shapes if name not in left]
    if missing:
        raise LMError(f"{source} lacks {_some(missing)}, which its configuration asks for")
    surplus = [name for name in left if name not in shapes]
    if surplus:
        raise LMError(f"{source} has {_some(surplus)}, which its configuration has no place for")
    for name, shape in shapes.items():
        if left[name].shape != shape:
            raise LMError(
                f"{source} has {name} of shape {left[name].shape}; its configuration "
                f"asks for {shape}"
            )
        if not np.isfinite(left[name]).all():
            raise LMError(f"{source} has NaN or infinity in {name}")
    return {name: np.asarray(left[name], np.float32) for name in shapes}


def _check_tie(head: np.ndarray, embedding: np.ndarray | None, source: Any) -> None:
    if embedding is not None and not np.array_equal(head, embedding):
        raise LMError(
            f"{source} has an lm_head.weight that differs from the embeddings, though its "
            "configuration ties them: set tie_word_embeddings to false"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _check_target(target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise LMError(f"{target} is a file: choose another folder")
    foreign = sorted(path.name for path in target.iterdir() if not _OURS.fullmatch(path.name))
    if foreign:
        raise LMError(
            f"{target} would be replaced, but holds more than a model written here "
            f"({_some(foreign)}): choose another folder"
        )


def _write_weights(
    folder: Path, arrays: Mapping[str, np.ndarray], dtype: str, max_shard_bytes: int
) -> None:
    shards = list(_split(arrays, ITEM_BYTES[dtype], max_shard_bytes))
    if len(shards) == 1:
        write_safetensors(folder / SINGLE, shards[0], dtype)
        return
    names = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / file, shard, dtype)
        names.update(dict.fromkeys(shard, file))
    total = sum(array.size for array in arrays.values()) * ITEM_BYTES[dtype]
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": names})


def _split(
    arrays: Mapping[str, np.ndarray], item_bytes: int, max_bytes: int
) -> Iterator[dict[str, np.ndarray]]:
    shard: dict[str, np.ndarray] = {}
    filled = 0
    for name, array in arrays.items():
        size = array.size * item_bytes
        if shard and filled + size > max_bytes:
            yield shard
            shard, filled = {}, 0
        shard[name] = array
        filled += size
    yield shard


def _generation_config(config: LMConfig) -> dict[str, Any]:
    content = config.to_dict()
    return {key: content[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_bytes_synced(path, json.dumps(content, indent=2).encode("utf-8") + b"\n")
