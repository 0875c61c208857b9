from __future__ import annotations

import os

import pytest

# Graphs that tests compile are not kept in the user's cache; see msrl_accel.graph_cache.
os.environ.setdefault("MS_COMPILER_CACHE_ENABLE", "0")


@pytest.fixture(scope="session")
def graph_mode():
    """MindSpore as the library sets it up; a test that uses graphs asks for it."""
    from msrl_accel.config import RuntimeConfig
    from msrl_accel.device import set_up

    set_up(RuntimeConfig())
