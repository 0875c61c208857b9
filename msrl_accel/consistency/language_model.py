"""Whether the exported graphs of a language model generate as training computes.

Every graph runs the same calls as the training Cell that generates: tokens must be equal, and
log-probabilities but for the last bits, since how a product with one row is added depends on where
in memory the matrix lies. The tokens it drew are then given to the training graph, which reads
whole rows at once (teacher forcing): its log-probabilities may differ by rounding alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Tensor

from msrl_accel.consistency.lm_report import GraphResult, LanguageModelReport
from msrl_accel.errors import BundleError, LMError, MsrlError
from msrl_accel.export.bundle import REFERENCE
from msrl_accel.export.lm_bundle import GraphShape, LanguageModelBundle
from msrl_accel.export.lm_reference import CALLS, INPUTS, Generated, Inputs, call, inputs_of
from msrl_accel.export.manifest import arrays_digest
from msrl_accel.files import PathLike
from msrl_accel.lm.adamw import AdamWOptions
from msrl_accel.lm.generation import Completions
from msrl_accel.lm.generation_graph import GenerationGraph
from msrl_accel.lm.model import CausalLM
from msrl_accel.lm.packing import Packer, Sequences
from msrl_accel.lm.parity import Parity, parity
from msrl_accel.lm.update import LMUpdate
from msrl_accel.lm.weights import load_model
from msrl_accel.networks import set_parameter
from msrl_accel.run import Run
from msrl_accel.runtime.language_model import ExportedGenerator
from msrl_accel.runtime.mindir import load_cell

TOLERANCE = 1e-4
"""Of log-probabilities of generation and of training, which add in another order."""
SAME_CELL = 1e-5
"""Of those of an exported graph and of the Cell that it is the export of."""
DAMAGE = 1e-4
"""What the control adds to one matrix."""

Graphs = Mapping[GraphShape, GenerationGraph]


def check_language_model(
    bundle: LanguageModelBundle | PathLike,
    *,
    run: Run | str | Path | None = None,
    controls: bool = True,
) -> LanguageModelReport:
    """Compare every graph of a bundle with the training Cell.

    Args:
        bundle: an exported language model, or its folder.
        run: the run it is from: the checkpoint of the bundle's version is then the baseline; else
            the weights in the bundle.
        controls: whether to prove too that damage is seen: positions off by one, and one matrix
            changed by `DAMAGE`.

    Raises:
        BundleError: the bundle is damaged. ConfigError, CheckpointError: no such run or checkpoint.
    """
    if not isinstance(bundle, LanguageModelBundle):
        bundle = LanguageModelBundle.open(bundle)
    if run is None:
        model, origin = _own_model(bundle), "with the bundle's weights"
    else:
        run = run if isinstance(run, Run) else Run(run)
        model, origin = run.language_model(bundle.version).model, f"of {run.path}"
    check = _Check(bundle, model, {})
    results = check.results()
    return LanguageModelReport(
        str(bundle.path),
        f"the training graph, {origin}",
        results,
        check.controls() if controls else {},
    )


def compare_graphs(
    bundle: LanguageModelBundle, model: CausalLM, graphs: Graphs
) -> dict[str, GraphResult]:
    """The results alone, for a bundle that is being written.

    Args:
        model: what was exported.
        graphs: the training Cells that were exported.
    """
    return _Check(bundle, model, graphs).results()


def _own_model(bundle: LanguageModelBundle) -> CausalLM:
    from msrl_accel.config import RuntimeConfig
    from msrl_accel.device import set_up

    set_up(RuntimeConfig())
    try:
        config, arrays = load_model(bundle.path)
    except LMError as error:
        raise BundleError(f"{bundle.path} holds no usable model: {error}") from error
    if arrays_digest(arrays) != bundle.manifest["weights"]["sha256"]:
        raise BundleError(
            f"{bundle.path} has other weights than the manifest: export the bundle again"
        )
    model = CausalLM(config, seed=None)
    model.load_arrays(arrays)
    return model


class _Check:
    """The training graphs and the calls."""

    def __init__(self, bundle: LanguageModelBundle, model: CausalLM, graphs: Graphs) -> None:
        self.bundle, self.model, self.graphs = bundle, model, dict(graphs)
        self.reference = bundle.reference()
        self.update = LMUpdate(model, None, AdamWOptions(), offload=True)
        longest = max(shape.prompt_tokens for shape in bundle.shapes) + bundle.max_new_tokens
        self.packer = Packer(max(2048, longest))

    def results(self) -> dict[str, GraphResult]:
        results = {REFERENCE: GraphResult()}
        for shape in self.bundle.shapes:
            self.add_recorded(shape, results[REFERENCE])
            try:
                cell = load_cell(self.bundle.file(shape))
                results[shape.file] = self.compare(shape, cell)
                results[shape.file].problems[:0] = unequal_weights(cell, self.model)
            except (MsrlError, RuntimeError, ValueError, TypeError) as error:
                results[shape.file] = GraphResult(problems=[str(error).strip().split("\n")[0]])
        recorded = results[REFERENCE]
        recorded.judge("those recorded", recorded.max_difference, TOLERANCE)
        return results

    def controls(self) -> dict[str, GraphResult]:
        """Results of damaged graphs of the most rows, by kind of damage."""
        shape = max(self.bundle.shapes)
        cell = load_cell(self.bundle.file(shape))
        matrix = f"model.layers.{self.model.config.n_layers // 2}.mlp.down_proj.weight"
        with _changed(cell, matrix):
            changed = self.compare(shape, cell)
        return {
            "positions off by one": self.compare(shape, self.shifted(shape)),
            f"{matrix} + {DAMAGE:g}": changed,
        }

    def compare(self, shape: GraphShape, graph: Callable[..., Any]) -> GraphResult:
        """A graph against the training Cell of its shape, and against the training graph."""
        result, sampled = GraphResult(), self.inputs(shape)
        for name in CALLS:
            inputs = inputs_of(name, sampled)
            found, expected = call(graph, inputs), call(self.graph(shape), inputs)
            result.add(found, expected, np.ones(found.tokens.shape, bool), name)
            agreement = self.agreement(inputs, found)
            if result.training is None or agreement.max > result.training.max:
                result.training = agreement
        self.compare_ends(shape, graph, result)
        result.judge("the training Cell's", result.max_difference, SAME_CELL)
        assert result.training is not None
        result.judge("the training graph's", result.training.max, TOLERANCE)
        return result

    def compare_ends(
        self, shape: GraphShape, graph: Callable[..., Any], result: GraphResult
    ) -> None:
        """Compare completions that end at stop tokens."""
        ours, theirs = self.complete(shape, graph), self.complete(shape, self.graph(shape))
        longest = max(ours.tokens.shape[1], theirs.tokens.shape[1])
        found, expected = _padded(ours, longest), _padded(theirs, longest)
        result.add(found, expected, _inside(theirs, longest), "until a stop token")

    def add_recorded(self, shape: GraphShape, result: GraphResult) -> None:
        """Compare what the training Cell generates here with what it did when exported."""
        sampled = self.inputs(shape)
        for name in CALLS:
            found = call(self.graph(shape), inputs_of(name, sampled))
            tokens, log_probs = (
                self.recorded(shape, f"{name}/{output}") for output in ("tokens", "log_probs")
            )
            recorded = Generated(tokens, log_probs, found.kept)
            result.add(found, recorded, np.ones(tokens.shape, bool), f"{shape.file}, {name}")

    def inputs(self, shape: GraphShape) -> Inputs:
        """Of the sampled reference call."""
        return {name: self.recorded(shape, name) for name in INPUTS}

    def recorded(self, shape: GraphShape, name: str) -> np.ndarray:
        """An array of the bundle's reference file."""
        if f"{shape.file}/{name}" not in self.reference:
            raise BundleError(
                f"{self.bundle.path / REFERENCE} has no {name} of {shape.file}: "
                "export the bundle again"
            )
        return self.reference[f"{shape.file}/{name}"]

    def graph(self, shape: GraphShape) -> GenerationGraph:
        """The training Cell of a shape."""
        if shape not in self.graphs:
            self.graphs[shape] = self.new_graph(shape)
        return self.graphs[shape]

    def new_graph(self, shape: GraphShape) -> GenerationGraph:
        sampling, steps = self.bundle.sampling, self.bundle.max_new_tokens
        n, length = shape
        top_k, top_p = sampling["top_k"], sampling["top_p"] < 1.0
        return GenerationGraph(self.model, n, length, n, steps, top_k, top_p)

    def shifted(self, shape: GraphShape) -> GenerationGraph:
        """A graph that decodes every token at the position before its own."""
        graph = self.new_graph(shape)
        for table in ("cos", "sin"):
            values = getattr(graph.decoder, table).asnumpy()
            setattr(graph.decoder, table, Tensor(np.roll(values, 1, axis=0)))
        return graph

    def complete(self, shape: GraphShape, graph: Callable[..., Any]) -> Completions:
        """Sampled completions of the reference prompts but one, which end at stop tokens."""
        generator = ExportedGenerator(self.bundle, self.model.config, lambda _: graph, [shape])
        inputs = self.inputs(shape)
        prompts = [p[:n] for p, n in zip(inputs["prompts"], inputs["prompt_lengths"])]
        return generator.generate(
            prompts[: max(1, len(prompts) - 1)],
            rng=np.random.default_rng(1),
            eos_ids=self.bundle.manifest["stop_ids"],
            **self.bundle.sampling,
        )

    def agreement(self, inputs: Inputs, generated: Generated) -> Parity:
        """Of the training graph's log-probabilities of the tokens with those of generation."""
        n, steps = generated.tokens.shape
        everything = np.ones((n, steps), bool)
        prompts = [p[:k] for p, k in zip(inputs["prompts"], inputs["prompt_lengths"])]
        sequences = Sequences(
            prompts, inputs["prompt_index"], generated.tokens, np.full(n, steps), everything
        )
        sampling = self.bundle.sampling
        self.update.temperature = Tensor(inputs["temperature"])
        cut = sampling["top_k"] > 0 or sampling["top_p"] < 1.0
        log_probs, _ = self.update.log_probs(
            self.packer.pack(sequences), (n, steps), generated.kept if cut else None
        )
        return parity(log_probs, generated.log_probs, everything)


def unequal_weights(cell: Any, model: CausalLM) -> list[str]:
    """A sentence where a graph holds other weights than the model."""
    held = {p.name: p for p in cell.get_parameters()}
    distance = {}
    for name, array in model.arrays().items():
        other = held[name].asnumpy() if name in held else None
        if other is None or other.shape != array.shape:
            return [f"the graph has no weight {name!r} of the model's shape"]
        if not np.array_equal(other, array):
            distance[name] = float(np.abs(other - array).max())
    if not distance:
        return []
    worst = max(distance, key=distance.__getitem__)
    return [
        f"the graph holds other weights than training: {len(distance)} differ, most {worst}, by "
        f"up to {distance[worst]:.2g}"
    ]


@contextmanager
def _changed(cell: Any, name: str) -> Iterator[None]:
    """A graph with `DAMAGE` added to every number of one matrix."""
    (weight,) = (p for p in cell.get_parameters() if p.name == name)
    original = weight.asnumpy().copy()
    set_parameter(weight, original + np.float32(DAMAGE))
    try:
        yield
    finally:
        set_parameter(weight, original)


def _inside(completions: Completions, longest: int) -> np.ndarray:
    inside: np.ndarray = np.arange(longest) < completions.lengths[:, None]
    return inside


def _padded(completions: Completions, longest: int) -> Generated:
    """Completions [N, `longest`]; after their ends no token."""
    tokens = np.full((len(completions.lengths), longest), -1, np.int32)
    log_probs = np.zeros(tokens.shape, np.float32)
    inside = _inside(completions, longest)
    width = completions.tokens.shape[1]
    tokens[:, :width] = np.where(inside[:, :width], completions.tokens, -1)
    log_probs[:, :width] = completions.log_probs
    return Generated(tokens, log_probs, np.zeros((0,)))
