"""Experience replay: uniform and prioritised, n-step, sharded, in memory or in files.

Nothing here needs MindSpore.
"""

from msrl_accel.replay.base import Replay, ReplayBatch
from msrl_accel.replay.buffer import ReplayBuffer
from msrl_accel.replay.priorities import PrioritySettings
from msrl_accel.replay.sharded import ShardedReplay

__all__ = ["PrioritySettings", "Replay", "ReplayBatch", "ReplayBuffer", "ShardedReplay"]
