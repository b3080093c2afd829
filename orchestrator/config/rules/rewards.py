"""Reward functions, found without importing them."""

from __future__ import annotations

import ast
from collections.abc import Collection
from pathlib import Path

from orchestrator.config.reading.functions import FUNCTION, function_problem
from orchestrator.config.reading.problems import did_you_mean
from orchestrator.config.rules.foreign_keys import shipped_reward_functions

# What TRL 1.16 hands to every reward function, besides the dataset's columns.
PASSED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")

MARKS = ("form", "readable_by")  # of `tasks.rewards.says`


def reward_problem(path: str, workdir: Path, *, has_setup: bool) -> str:
    """What is wrong with a reward function's import path; empty where nothing is, or where it names a model."""
    if is_model(path):
        return ""
    if path.startswith("trl."):
        shipped = shipped_reward_functions()
        return "" if path in shipped else f"TRL ships no such reward function{did_you_mean(path, shipped)}"
    return function_problem(path, workdir, has_setup=has_setup, misfit=_signature_problem)


def argument_problem(path: str, workdir: Path, arguments: Collection[str], *, has_setup: bool) -> str:
    """What is wrong with the names of a reward function's arguments; empty where nothing is or it is not known."""

    def misfit(node: ast.stmt, name: str) -> str:
        if not isinstance(node, FUNCTION) or not all(map(_keeps_parameters, node.decorator_list)):
            return ""
        taken = [one.arg for one in (*node.args.args, *node.args.kwonlyargs)]
        lost = [one for one in arguments if one not in taken]
        return f"{name} takes no argument `{lost[0]}`{did_you_mean(lost[0], taken)}" if lost else ""

    if is_model(path) or path.startswith("trl."):
        return ""
    return function_problem(path, workdir, has_setup=has_setup, misfit=misfit)


def is_model(reward: str) -> bool:
    """Whether a reward is a model, a folder or a name on the hub, and no function."""
    return "/" in reward


def _keeps_parameters(decorator: ast.expr) -> bool:
    """Whether it is `tasks.rewards.in_workers`, or a mark of theirs, however it was imported."""
    called = ast.unparse(decorator.func) if isinstance(decorator, ast.Call) else ""
    return called.rpartition(".")[2] == "in_workers" or _is_mark(decorator)


def _is_mark(decorator: ast.expr) -> bool:
    """Whether it leaves a function as it is, and notes something of it."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(called).rpartition(".")[2] in MARKS


def _signature_problem(node: ast.stmt, name: str) -> str:
    """TRL calls by keyword and passes more than most functions name: without `**kwargs` that is a TypeError."""
    if not isinstance(node, FUNCTION) or not all(map(_is_mark, node.decorator_list)) or node.args.kwarg:
        return ""
    taken = {one.arg for one in (*node.args.args, *node.args.kwonlyargs)}
    if lost := [one for one in PASSED if one not in taken]:
        return f"{name} cannot be called by TRL, which passes {lost[0]} too; give it a **kwargs parameter"
    return ""
