"""Reinforcement learning in MindSpore graph mode: the policy that is trained is the policy that is deployed.

Importing this package does not import MindSpore; the parts that need it import it when used.
"""

from __future__ import annotations

from msrl_accel._version import __version__

__all__ = ["__version__"]
