from __future__ import annotations

import os
import signal

import pytest
from hypothesis import settings

# A busy machine fails no property.
settings.register_profile("msrl_accel", deadline=None)
settings.load_profile("msrl_accel")

# Graphs that tests compile are not kept in the user's cache; see msrl_accel.graph_cache.
os.environ.setdefault("MS_COMPILER_CACHE_ENABLE", "0")

# A background job of a shell starts with SIGINT ignored; tests send it to themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def graph_mode():
    """MindSpore as the library sets it up; a test that uses graphs asks for it."""
    from msrl_accel.config import RuntimeConfig
    from msrl_accel.device import set_up

    set_up(RuntimeConfig())
