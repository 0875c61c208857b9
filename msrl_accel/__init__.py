"""Reinforcement learning in MindSpore graph mode: the trained policy is the deployed policy.

Importing this package does not import MindSpore; the parts that need it import it when used.
"""

from __future__ import annotations

import os

from msrl_accel._version import __version__

# MindSpore logs harmless warnings at every compilation; errors still show. Set GLOG_v to change it.
os.environ.setdefault("GLOG_v", "3")

__all__ = ["__version__"]
