"""Reward functions in TRL's signature for run.yaml, `grpo_orch.rewards.NAME`, and helpers to write your own.

They treat completions as hostile input: a completion can affect only its own score.
"""

from grpo_orch.tasks.rewards.code_tests import code_tests
from grpo_orch.tasks.rewards.graders import (
    form,
    gsm8k_reward,
    json_schema,
    length_penalty,
    math_reward,
    readable_by,
    think_format,
    xml_format,
)
from grpo_orch.tasks.rewards.in_workers import in_workers
from grpo_orch.tasks.rewards.user_calls import ToolFailed

__all__ = [
    "ToolFailed",
    "code_tests",
    "form",
    "gsm8k_reward",
    "in_workers",
    "json_schema",
    "length_penalty",
    "math_reward",
    "readable_by",
    "think_format",
    "xml_format",
]
