"""Reinforcement learning in MindSpore graph mode: the trained policy is the deployed policy.

Importing this package does not import MindSpore; the parts that need it import it when used.
"""

from __future__ import annotations

from msrl_accel._version import __version__

__all__ = ["__version__"]
