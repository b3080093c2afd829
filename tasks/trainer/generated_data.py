"""Rows that a package makes, where run.yaml names no data but what makes them."""

from __future__ import annotations

import importlib.util
from typing import Any

import datasets

from tasks.rewards.reasoning import NoProblems, made_problems
from tasks.trainer.user_objects import BadSpec


def reasoning_gym_rows(key: str, task: str, args: dict[str, Any]) -> datasets.Dataset:
    """reasoning-gym's problems, with what `reasoning_gym_reward` scores them by. Raises BadSpec naming `key`."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise BadSpec(f"{key}: reasoning-gym is not installed; add `pip install reasoning-gym` to trainer.setup")
    try:
        return datasets.Dataset.from_list(made_problems(task, args))
    except NoProblems as error:
        raise BadSpec(f"{key}: {error}") from error
