"""The bundle of a language model: a folder with its graphs, its weights, and what proves it.

transformers opens the folder too: it holds config.json, model.safetensors and the tokenizer.
Opening it as a bundle needs NumPy alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from msrl_accel.export.bundle import (
    MANIFEST,
    check_files_on_disk,
    read_manifest,
    read_reference,
)
from msrl_accel.export.manifest import (
    LANGUAGE_MODEL_KIND,
    check_files,
    check_kind,
    check_types,
    check_weights_and_parity,
    damaged,
    parse_header,
)
from msrl_accel.files import PathLike

_TYPES: Mapping[str, tuple[type, ...]] = {
    "graphs": (list,),
    "max_new_tokens": (int,),
    "inputs": (list,),
    "outputs": (list,),
    "noise": (dict,),
    "greedy": (str,),
    "stop_ids": (list,),
    "prompt": (dict,),
    "sampling": (dict,),
    "weights": (dict,),
    "config": (dict,),
    "seed": (int,),
    "versions": (dict,),
    "reference": (dict,),
    "files": (dict,),
    "parity": (dict,),
}


class GraphShape(NamedTuple):
    """What an exported graph is made for."""

    rows: int
    """Completions generated side by side, and most prompts they continue."""
    prompt_tokens: int
    """Longest prompt."""

    @property
    def file(self) -> str:
        return f"generate_{self.rows}x{self.prompt_tokens}.mindir"


class LanguageModelBundle:
    """A validated bundle of a language model; open one with `LanguageModelBundle.open`.

    Attributes:
        path: the folder.
        manifest: what it says of itself, validated.
        shapes: of its graphs.
        max_new_tokens: the longest completion.
        sampling: temperature, top_k and top_p it was trained with; the last two are in the graph.
        version: of the weights; the step of the checkpoint they are from.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        self.shapes = [GraphShape(g["rows"], g["prompt_tokens"]) for g in manifest["graphs"]]
        self.max_new_tokens: int = manifest["max_new_tokens"]
        self.sampling: dict[str, Any] = manifest["sampling"]
        self.version: int = manifest["weights"]["version"]

    @classmethod
    def open(cls, path: PathLike, *, verify: bool = True) -> LanguageModelBundle:
        """Open a bundle; arguments and errors are those of `Bundle.open`."""
        folder = Path(path)
        manifest = parse(read_manifest(folder), folder / MANIFEST)
        check_files_on_disk(folder, manifest, verify)
        return cls(folder, manifest)

    def file(self, shape: GraphShape) -> Path:
        """The graph of a shape."""
        return self.path / shape.file

    def reference(self) -> dict[str, np.ndarray]:
        """Fixed prompts and noise, and what the training Cell generated from them.

        Keys: `prompts` [R, P] int32 and `prompt_lengths` [R], `noise_table` and `noise_index` of R
        rows, and for each graph and call `GRAPH/CALL/tokens` and `GRAPH/CALL/log_probs` [S, R'].

        Raises:
            BundleError: the file is damaged or not what the manifest describes.
        """
        return read_reference(self.path, self.manifest)

    @property
    def passed(self) -> bool:
        """Whether every graph generated as the training Cell did when it was exported."""
        return bool(self.manifest["parity"]["passed"])

    def __repr__(self) -> str:
        shapes = ", ".join(shape.file for shape in self.shapes)
        verdict = "" if self.passed else ", parity check FAILED"
        return f"LanguageModelBundle({str(self.path)!r}: {shapes}, version {self.version}{verdict})"


def is_language_model(path: PathLike) -> bool:
    """Whether a bundle holds a language model.

    Raises:
        BundleError: it is no bundle.
    """
    folder = Path(path)
    manifest = parse_header(read_manifest(folder), folder / MANIFEST)
    return bool(manifest["kind"] == LANGUAGE_MODEL_KIND)


def parse(data: bytes, where: Path) -> dict[str, Any]:
    """Read and validate a manifest of a language model.

    Raises:
        BundleError: it is no manifest, of a newer schema, or a field is missing or cannot be.
    """
    manifest = parse_header(data, where)
    check_kind(manifest, LANGUAGE_MODEL_KIND, where)
    check_types(manifest, _TYPES, where)
    check_files(manifest, where)
    check_weights_and_parity(manifest, where)
    if not manifest["graphs"]:
        raise damaged(where, "graphs", manifest["graphs"])
    for graph in manifest["graphs"]:
        _check_graph(graph, manifest, where)
    rows, prompt_tokens = ({g[k] for g in manifest["graphs"]} for k in ("rows", "prompt_tokens"))
    if len(manifest["graphs"]) != len(rows) * len(prompt_tokens):
        raise damaged(where, "graphs", manifest["graphs"])
    _check_sampling(manifest, where)
    if manifest["max_new_tokens"] < 1:
        raise damaged(where, "max_new_tokens", manifest["max_new_tokens"])
    ids = manifest["stop_ids"]
    if not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise damaged(where, "stop_ids", ids)
    return manifest


def _check_graph(graph: Any, manifest: Mapping[str, Any], where: Path) -> None:
    sizes = [graph.get(k) for k in ("rows", "prompt_tokens")] if isinstance(graph, dict) else [None]
    if not all(type(size) is int and size >= 1 for size in sizes):
        raise damaged(where, "graphs", graph)
    file = GraphShape(*sizes).file
    if graph.get("file") != file or file not in manifest["files"]:
        raise damaged(where, "graphs", graph)


def _check_sampling(manifest: Mapping[str, Any], where: Path) -> None:
    sampling, prompt = manifest["sampling"], manifest["prompt"]
    temperature, top_k, top_p = (sampling.get(k) for k in ("temperature", "top_k", "top_p"))
    ok = type(top_k) is int and top_k >= 0
    ok = ok and all(type(x) in (int, float) and x > 0 for x in (temperature, top_p))
    if not ok or top_p > 1 or len(sampling) != 3:
        raise damaged(where, "sampling", sampling)
    system = prompt.get("system_prompt")
    if prompt.get("style") not in ("plain", "chat") or not isinstance(system, (str, type(None))):
        raise damaged(where, "prompt", prompt)
