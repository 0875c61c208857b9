"""What the tests of exported language models share: a run as training leaves it, and its bundle."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from text_run_helpers import ALPHABET, TINY, tiny_config

from msrl_accel.config import resolve_config
from msrl_accel.lm.opening import OpenedModel, save_description
from msrl_accel.lm.tokenizer import CharTokenizer
from msrl_accel.run import DESCRIPTION_FOLDER, POLICY_PREFIX, Run

STEP = 64
PROMPT_TOKENS, NEW_TOKENS = 12, 6


def make_run(folder: Path, **options) -> Run:
    """A run of GRPO whose only checkpoint holds random weights, far from initial ones."""
    config = resolve_config(
        "grpo",
        "text/addition",
        tuned=False,
        overrides={"run_dir": str(folder), "seed": 7},
        grpo={**TINY, "max_prompt_tokens": PROMPT_TOKENS, "max_new_tokens": NEW_TOKENS, **options},
    )
    run = Run.create(config)
    shape = tiny_config()
    save_description(folder / DESCRIPTION_FOLDER, OpenedModel(shape, CharTokenizer(ALPHABET), None))
    rng = np.random.default_rng(3)
    arrays = {
        POLICY_PREFIX + name: (
            rng.standard_normal(size) * 0.4 + name.endswith("norm.weight")
        ).astype(np.float32)
        for name, size in shape.weight_shapes().items()
    }
    run.checkpoints.save(STEP, arrays, {"language_model": shape.to_dict()})
    return run


def edit_manifest(folder: Path, **changes) -> None:
    """Replace fields of a bundle's manifest."""
    file = folder / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def error_line(capsys) -> str:
    """The one line that a command says on what is wrong."""
    (line,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("msrl-")]
    return line
