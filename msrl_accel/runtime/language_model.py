"""An exported language model: text in, text out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from msrl_accel.config import RuntimeConfig
from msrl_accel.device import set_up
from msrl_accel.errors import BundleError, LMError
from msrl_accel.export.lm_bundle import GraphShape, LanguageModelBundle
from msrl_accel.files import PathLike
from msrl_accel.lm.config import LMConfig
from msrl_accel.lm.generation import CompletionSampler, Graph
from msrl_accel.lm.language_model import Completer
from msrl_accel.lm.opening import load_description
from msrl_accel.lm.prompts import PromptEncoder
from msrl_accel.runtime.mindir import load_cell


class ExportedGenerator(CompletionSampler):
    """Samples completions by graphs of fixed shapes: for each batch the smallest that suffices.

    Args:
        bundle: whose shapes and sampling are meant.
        config: of the model.
        load: gives the graph of a shape, when it is first needed; default the bundle's own.
        shapes: those to use; default all.
    """

    def __init__(
        self,
        bundle: LanguageModelBundle,
        config: LMConfig,
        load: Callable[[GraphShape], Graph] | None = None,
        shapes: Sequence[GraphShape] = (),
    ) -> None:
        shapes = shapes or bundle.shapes
        self.rows = sorted({shape.rows for shape in shapes})
        lengths = [shape.prompt_tokens for shape in shapes]
        super().__init__(config, bundle.max_new_tokens, lengths, self.rows[-1])
        self.version = bundle.version
        self.bundle = bundle
        self._load = load or (lambda shape: load_cell(bundle.file(shape)))
        self._cells: dict[GraphShape, Graph] = {}

    def _sizes(self, prompts: int, rows: int) -> tuple[int, int]:
        enough = next(n for n in self.rows if n >= rows)
        return enough, enough

    def _graph(self, prompts: int, length: int, rows: int, top_k: int, top_p: bool) -> Graph:
        made_for = self.bundle.sampling
        if (top_k, top_p) != (made_for["top_k"], made_for["top_p"] < 1.0):
            raise LMError(
                f"{self.bundle.path} samples with top_k = {made_for['top_k']} and "
                f"top_p {'below' if made_for['top_p'] < 1.0 else '='} 1, as it was trained: "
                "leave them out"
            )
        shape = GraphShape(rows, length)
        if shape not in self._cells:
            if shape not in self.bundle.shapes:
                raise BundleError(
                    f"{self.bundle.path} has no graph for prompts of {length} tokens: its "
                    "manifest does not fit its config.json; export it again"
                )
            self._cells[shape] = self._load(shape)
        return self._cells[shape]


class ExportedLanguageModel(Completer):
    """A bundle that answers: `load_language_model(bundle).complete(["12+34="])`.

    The first call of each shape compiles its graph.

    Attributes:
        bundle: what it is from.
        generator: takes token ids instead of text: `generator.generate(prompts, ...)`.
    """

    def __init__(self, bundle: LanguageModelBundle) -> None:
        opened = load_description(bundle.path)
        if set(opened.tokenizer.eos_ids) != set(bundle.manifest["stop_ids"]):
            raise BundleError(
                f"{bundle.path}: stop_ids = {bundle.manifest['stop_ids']} in the manifest, "
                f"{list(opened.tokenizer.eos_ids)} in the tokenizer: export the bundle again"
            )
        prompt = bundle.manifest["prompt"]
        encoder = PromptEncoder(opened.tokenizer, prompt["style"], prompt["system_prompt"])
        super().__init__(encoder, ExportedGenerator(bundle, opened.config), bundle.sampling)
        self.bundle = bundle


def load_language_model(bundle: LanguageModelBundle | PathLike) -> ExportedLanguageModel:
    """The language model of a bundle, run by MindSpore.

    Args:
        bundle: the folder that `msrl-export` wrote.

    Raises:
        BundleError: the bundle is damaged, or of something else.
        PolicyError: MindSpore refuses a graph.
    """
    if not isinstance(bundle, LanguageModelBundle):
        bundle = LanguageModelBundle.open(bundle)
    if not bundle.passed:
        warnings.warn(
            f"{bundle.path} did not pass its parity check: it may not answer as it was trained to",
            stacklevel=2,
        )
    set_up(RuntimeConfig())
    return ExportedLanguageModel(bundle)
