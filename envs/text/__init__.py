"""Text tasks with verifiable rewards, data sets, and scoring in worker processes."""

from __future__ import annotations

from msrl_accel.envs.text.base import Problem, ProceduralTask, Reward, TextTask
from msrl_accel.envs.text.registry import TASKS, built_in_characters, is_text_id, make_task
from msrl_accel.envs.text.rewards import RewardFunction, RewardSpec, parse_rewards
from msrl_accel.envs.text.scoring import Score, Scorer, describe_failures, usable_groups

__all__ = [
    "TASKS",
    "Problem",
    "ProceduralTask",
    "Reward",
    "RewardFunction",
    "RewardSpec",
    "Score",
    "Scorer",
    "TextTask",
    "built_in_characters",
    "describe_failures",
    "is_text_id",
    "make_task",
    "parse_rewards",
    "usable_groups",
]
