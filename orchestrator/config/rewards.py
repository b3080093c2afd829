"""Reward functions, found without importing them: whether TRL can call them, and with which arguments."""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.config.datasets import Columns
from orchestrator.config.foreign_keys import shipped_reward_functions
from orchestrator.config.problems import Findings, KeyPath, did_you_mean
from orchestrator.config.structure import shown
from orchestrator.config.user_code import FUNCTION, function_problem

# What TRL 1.16 hands to every reward function, besides the dataset's columns.
PASSED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
PASSED_OF_AGENT = ("messages", "agent_reward")

MARKS = ("form", "readable_by")  # of `tasks.rewards.graders`


@dataclass(frozen=True, slots=True)
class Call:
    """How TRL calls a run's reward functions."""

    passed: tuple[str, ...]  # whatever the dataset
    columns: Mapping[str, Columns]  # by the dataset's key, where they are known
    fixed: Collection[str] = ()  # names of `trainer.reward_args`

    def lacks(self, name: str) -> str:
        """Why a parameter without a default gets no value; empty where it gets one, or may."""
        if name in self.passed or name in self.fixed:
            return ""
        for key, columns in self.columns.items():
            if not columns.has(name):
                others = ", ".join(columns.names) or "no others than prompt"
                near = did_you_mean(name, columns.names)
                expected = "expected a column, a default, or a value in trainer.reward_args"
                return f"is neither passed by TRL nor a column of {key}, which has {others}; {expected}{near}"
        return ""


def check_rewards(data: dict[str, Any], workdir: Path, columns: Mapping[str, Columns], findings: Findings) -> None:
    """Report reward functions that TRL could not call, and arguments that they do not take."""
    trainer = data.get("trainer", {})
    call = call_of(trainer, columns)
    arguments, has_setup = dict(trainer.get("reward_args", {})), bool(trainer.get("setup"))
    functions = {name.rpartition(".")[2]: name for name in trainer.get("reward_funcs", ())}
    for index, name in enumerate(trainer.get("reward_funcs", ())):
        fixed = arguments.get(short := name.rpartition(".")[2])
        own_call = replace(call, fixed=tuple(fixed) if isinstance(fixed, dict) else ())
        if fixed and (not isinstance(fixed, dict) or argument_problem(name, workdir, fixed, has_setup=has_setup)):
            own_call = replace(call, columns={})  # what it lacks may be what is misspelled
        if problem := reward_problem(name, workdir, own_call, has_setup=has_setup):
            findings.add(("trainer", "reward_funcs", index), problem)
            arguments.pop(short, None)
    for name, values in arguments.items():
        here: KeyPath = ("trainer", "reward_args", name)
        if name not in functions:
            findings.add(here, f"no such function in trainer.reward_funcs{did_you_mean(name, list(functions))}")
        elif not isinstance(values, dict):
            findings.add(here, f"expected a mapping of the function's arguments, got {shown(values)}")
        elif problem := argument_problem(functions[name], workdir, values, has_setup=has_setup):
            findings.add(here, problem)


def call_of(trainer: Mapping[str, Any], columns: Mapping[str, Columns]) -> Call:
    """How TRL calls the functions of a `trainer` section; `columns` are those known of its datasets."""
    more = ("environments",) if trainer.get("environment_factory") else ()
    return Call((*PASSED, *more, *(PASSED_OF_AGENT if trainer.get("agent") else ())), columns)


def reward_problem(path: str, workdir: Path, call: Call, *, has_setup: bool) -> str:
    """What is wrong with a reward function's import path; empty where nothing is, or where it names a model."""
    if is_model(path):
        return ""
    if path.startswith("trl."):
        shipped = shipped_reward_functions()
        return "" if path in shipped else f"TRL ships no such reward function{did_you_mean(path, shipped)}"
    misfit = functools.partial(_signature_problem, call)
    return function_problem(path, workdir, has_setup=has_setup, misfit=misfit)


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
    """Whether run.yaml's arguments go to the function below it."""
    return _is_in_workers(decorator) or _is_mark(decorator)


def _is_in_workers(decorator: ast.expr) -> bool:
    """Whether it is `tasks.rewards.in_workers`, however it was imported."""
    called = ast.unparse(decorator.func) if isinstance(decorator, ast.Call) else ""
    return called.rpartition(".")[2] == "in_workers"


def _is_mark(decorator: ast.expr) -> bool:
    """Whether it leaves a function as it is, and notes something of it."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(called).rpartition(".")[2] in MARKS


def _signature_problem(call: Call, node: ast.stmt, name: str) -> str:
    """TRL calls by keyword, and passes more than most functions name: without `**kwargs` that is a TypeError."""
    if not isinstance(node, FUNCTION) or not all(map(_keeps_parameters, node.decorator_list)):
        return ""
    given, needed = node.args, _without_default(node.args)
    if any(map(_is_in_workers, node.decorator_list)):  # called with a completion first, and with values of its row
        call = replace(call, passed=(*call.passed, "prompt", *needed[:1]))
        return _lack(call, needed, name)
    taken = {one.arg for one in (*given.args, *given.kwonlyargs)}
    columns = [column for found in call.columns.values() for column in found.names]
    lost = [one for one in (*call.passed, *columns) if one not in taken]
    if lost and given.kwarg is None:
        return f"{name} cannot be called by TRL, which passes {lost[0]} too; give it a **kwargs parameter"
    if by_position := [one.arg for one in given.posonlyargs if one.arg in needed]:
        return f"{name} takes {by_position[0]} by position alone, and TRL passes it by name; remove the `/`"
    return _lack(call, needed, name)


def _lack(call: Call, needed: Sequence[str], name: str) -> str:
    problems = [(one, call.lacks(one)) for one in needed]
    return next((f"parameter {one} of {name} {problem}" for one, problem in problems if problem), "")


def _without_default(given: ast.arguments) -> list[str]:
    by_place = [*given.posonlyargs, *given.args]
    found = by_place[: len(by_place) - len(given.defaults)]
    found += [one for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None]
    return [one.arg for one in found]
