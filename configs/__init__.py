"""Tuned configurations shipped with the library: a folder an algorithm, a file an environment.

Each file names its score and its source in its header.
"""

from __future__ import annotations

import re
from pathlib import Path


def find_tuned(algo: str, env_id: str) -> Path | None:
    """The tuned configuration of an algorithm on an environment, or None.

    The file is ``<algo>/<env id>.yaml`` with ``/`` and ``:`` of the id written as ``_``.
    """
    path = Path(__file__).parent / algo / (re.sub(r"[/:\\]", "_", env_id) + ".yaml")
    return path if path.is_file() else None
