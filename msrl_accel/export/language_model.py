"""Export of a run's language model: the generation graph as MindIR, and what else it needs."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Tensor

from msrl_accel.algorithms.language_model import LanguageModelConfig
from msrl_accel.envs.text import make_task
from msrl_accel.errors import ConfigError, EnvError, ExportError
from msrl_accel.export.bundle import MANIFEST, REFERENCE, describe_arrays, staged
from msrl_accel.export.lm_bundle import GraphShape, LanguageModelBundle, parse
from msrl_accel.export.lm_reference import (
    GREEDY,
    INPUTS,
    NOISE,
    OUTPUTS,
    describe_tensors,
    record,
    reference_inputs,
)
from msrl_accel.export.manifest import LANGUAGE_MODEL_KIND, SCHEMA, arrays_digest, file_entry
from msrl_accel.export.mindir import export_cell
from msrl_accel.export.write import GateError, package_versions, write_reference
from msrl_accel.files import write_bytes_synced
from msrl_accel.lm.generation_graph import GenerationGraph
from msrl_accel.lm.language_model import WHOLE_DISTRIBUTION, LanguageModel
from msrl_accel.run import Run, WhichCheckpoint

ROWS = (1, 8)
LARGEST = 2**30
"""Bytes of the tensors of one MindIR file; MindSpore cuts larger ones in pieces."""


def export_language_model(
    run: Run | str | Path,
    out: str | Path | None = None,
    *,
    checkpoint: WhichCheckpoint = "last",
    rows: Sequence[int] = ROWS,
    prompt_tokens: Sequence[int] = (),
    max_new_tokens: int | None = None,
    gate: bool = True,
    force: bool = False,
) -> LanguageModelBundle:
    """Write a bundle of a run's language model, with a graph for each `rows` and `prompt_tokens`.

    Args:
        run: a run or its directory.
        out: folder to write; by default `bundle` in the run's directory.
        checkpoint: 'last', 'best', or a step.
        rows: completions generated side by side. Each graph holds the weights.
        prompt_tokens: longest prompts; default that of the run.
        max_new_tokens: longest completion; default that of the run.
        gate: whether a graph that generates other tokens, or log-probabilities, than training has
            is an error; otherwise its failure is recorded.
        force: whether a bundle that is there already is replaced.

    Raises:
        GateError: a graph differs; nothing is written.
        ExportError: a graph or the folder cannot be written; nothing is left behind.
        ConfigError, CheckpointError, LMError: no run of a language model, no such checkpoint, or a
            size that cannot be.
    """
    run = run if isinstance(run, Run) else Run(run)
    if not isinstance(run.config.algorithm, LanguageModelConfig):
        raise ConfigError(f"{run.path} trained no language model, but {run.config.algo}")
    target = Path(out) if out is not None else run.path / "bundle"
    with staged(target, force=force) as folder:
        model = run.language_model(checkpoint)
        options = run.config.algorithm
        steps = options.max_new_tokens if max_new_tokens is None else max_new_tokens
        longest = model.model.config.max_positions - steps
        lengths = prompt_tokens or (min(options.max_prompt_tokens, longest),)
        shapes = [GraphShape(n, length) for length in lengths for n in rows]
        _check_sizes(shapes, steps, longest)
        sampling = {**WHOLE_DISTRIBUTION, **options.sampling}
        _write(run, model, folder, sorted(set(shapes)), steps, sampling, gate)
    return LanguageModelBundle.open(target)


def _check_sizes(shapes: Sequence[GraphShape], steps: int, longest: int) -> None:
    if steps < 1 or longest < 1:
        raise ConfigError(
            f"max_new_tokens = {steps}: the model's {longest + steps} positions must hold a prompt "
            "too"
        )
    for rows, length in shapes:
        if rows < 1 or not 1 <= length <= longest:
            raise ConfigError(
                f"rows = {rows}, prompt_tokens = {length}: rows must be at least 1, prompts have 1 "
                f"to {longest} tokens beside max_new_tokens = {steps}"
            )


def _write(
    run: Run,
    model: LanguageModel,
    folder: Path,
    shapes: Sequence[GraphShape],
    steps: int,
    sampling: Mapping[str, Any],
    gate: bool,
) -> None:
    """Write every file of a bundle into an empty folder, the manifest last."""
    from msrl_accel.consistency.language_model import compare_graphs

    _write_model(model, folder)
    graphs, reference = {}, {}
    for shape in shapes:
        graph = GenerationGraph(
            model.model,
            shape.rows,
            shape.prompt_tokens,
            shape.rows,
            steps,
            sampling["top_k"],
            sampling["top_p"] < 1.0,
        )
        prompts = _task_prompts(run, model, shape)
        inputs = reference_inputs(shape, model.model.config, steps, sampling, prompts)
        _check_size(graph, shape)
        export_cell(graph, [Tensor(inputs[name]) for name in INPUTS], folder / shape.file)
        reference.update(record(shape, inputs, graph))
        graphs[shape] = graph
    write_reference(folder / REFERENCE, reference)
    encoder, config = model.encoder, run.config.to_dict()
    manifest = {
        "kind": LANGUAGE_MODEL_KIND,
        "schema": SCHEMA,
        "graphs": [{"file": shape.file, **shape._asdict()} for shape in shapes],
        "max_new_tokens": steps,
        "inputs": describe_tensors(INPUTS),
        "outputs": describe_tensors(OUTPUTS),
        "noise": NOISE,
        "greedy": GREEDY,
        "stop_ids": list(model.tokenizer.eos_ids),
        "prompt": {
            "style": "chat" if encoder.chat else "plain",
            "system_prompt": encoder.system_prompt,
        },
        "sampling": sampling,
        "weights": {
            "version": model.generator.version,
            "sha256": arrays_digest(model.model.arrays()),
        },
        "config": config,
        "seed": config["seed"],
        "versions": package_versions(),
        "reference": {"file": REFERENCE, "arrays": describe_arrays(reference)},
        "files": {file.name: file_entry(file) for file in sorted(folder.iterdir())},
        "parity": {"gate": gate, "passed": True, "results": {}},
    }
    results = compare_graphs(LanguageModelBundle(folder, manifest), model.model, graphs)
    failures = [f"{name}: {problem}" for name, r in results.items() for problem in r.problems]
    if failures and gate:
        raise GateError(
            "an exported graph does not generate as the trained model does: "
            + "; ".join(failures)
            + ". Nothing was written; --no-gate writes the bundle with this recorded"
        )
    content = {name: result.to_dict() for name, result in results.items()}
    manifest["parity"] = {"gate": gate, "passed": not failures, "results": content}
    data = json.dumps(manifest, indent=2, allow_nan=False).encode() + b"\n"
    parse(data, folder / MANIFEST)
    write_bytes_synced(folder / MANIFEST, data)


def _write_model(model: LanguageModel, folder: Path) -> None:
    """Configuration, weights and tokenizer, as transformers and `load_model` read them."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        model.save(Path(scratch) / "model")
        for file in (Path(scratch) / "model").iterdir():
            file.rename(folder / file.name)


def _check_size(graph: GenerationGraph, shape: GraphShape) -> None:
    size = sum(p.nbytes for p in graph.get_parameters())
    if size > LARGEST:
        raise ExportError(
            f"the graph of {shape.rows} rows and prompts of {shape.prompt_tokens} tokens would "
            f"hold {size / 2**30:.1f} GB of tensors, a MindIR file holds {LARGEST / 2**30:.0f}: "
            "use fewer rows or shorter prompts"
        )


def _task_prompts(run: Run, model: LanguageModel, shape: GraphShape) -> list[np.ndarray]:
    """Held-out problems of the task; none where it cannot be made here."""
    try:
        task = make_task(run.config.env, **run.config.env_kwargs)
        problems = model.encoder.short(task.held_out(shape.rows), shape.prompt_tokens)
    except (EnvError, ConfigError):  # its data set may be elsewhere
        return []
    return [model.encoder.prompt(problem) for problem in problems]
