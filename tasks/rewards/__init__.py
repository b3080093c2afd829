"""Reward functions in TRL's signature, which run.yaml names as `tasks.rewards.NAME`; and what helps to write
others.

They are made for what models write: no completion ends the run, or reaches anything outside its own score.
"""

from tasks.rewards.code_tests import code_tests
from tasks.rewards.formats import think_format, xml_format
from tasks.rewards.gsm8k import gsm8k_reward
from tasks.rewards.in_workers import in_workers
from tasks.rewards.mathematics import math_reward
from tasks.rewards.says import form, readable_by
from tasks.rewards.schemas import json_schema, pydantic_model
from tasks.rewards.shaping import length_penalty, weighted_sum

__all__ = [
    "code_tests",
    "form",
    "gsm8k_reward",
    "in_workers",
    "json_schema",
    "length_penalty",
    "math_reward",
    "pydantic_model",
    "readable_by",
    "think_format",
    "weighted_sum",
    "xml_format",
]
