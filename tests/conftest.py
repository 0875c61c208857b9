from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def graph_mode():
    """MindSpore as the library sets it up; a test that uses graphs asks for it."""
    from msrl_accel.config import RuntimeConfig
    from msrl_accel.device import set_up

    set_up(RuntimeConfig())
