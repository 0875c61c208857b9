"""Tuned configurations shipped with the library: a folder an algorithm, a file an environment.

Each file names its score and its source in its header.
"""

from __future__ import annotations

import re
from pathlib import Path


def find_tuned(algo: str, env_id: str, model: str | None = None) -> Path | None:
    """The tuned configuration of an algorithm on an environment, or None.

    The file is ``<algo>/<env id>.yaml``, or ``<algo>/<env id>.<model>.yaml`` where a language model
    is named, with ``/`` and ``:`` written as ``_``.
    """
    name = env_id if model is None else f"{env_id}.{model}"
    path = Path(__file__).parent / algo / (re.sub(r"[/:\\]", "_", name) + ".yaml")
    return path if path.is_file() else None
