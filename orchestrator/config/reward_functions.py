"""Check that TRL can call the reward functions, and with which arguments, without importing them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_orch.orchestrator.config.datasets import Columns
from grpo_orch.orchestrator.config.foreign_keys import shipped_reward_functions
from grpo_orch.orchestrator.config.problems import Findings, KeyPath, did_you_mean
from grpo_orch.orchestrator.config.structure import format_value
from grpo_orch.orchestrator.config.user_code import FUNCTION, function_problem

# What TRL 1.16 passes to every reward function, in addition to the dataset's columns.
PASSED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
PASSED_OF_AGENT = ("messages", "agent_reward")

MARKER_DECORATORS = ("form", "readable_by")  # of `tasks.rewards.graders`; they only add attributes


@dataclass(frozen=True, slots=True)
class Call:
    """How TRL calls a run's reward functions."""

    passed: tuple[str, ...]  # for every dataset
    columns: Mapping[str, Columns]  # by the dataset's key, if known
    fixed: Collection[str] = ()  # names in `trainer.reward_args`

    def missing_value(self, name: str) -> str:
        """Return why a parameter without a default gets no value, or an empty string."""
        if name in self.passed or name in self.fixed:
            return ""
        for key, columns in self.columns.items():
            if not columns.may_have(name):
                others = f"columns {', '.join(columns.names)}" if columns.names else "only the column prompt"
                suggestion = did_you_mean(name, columns.names)
                expected = "expected a column, a default, or a value in trainer.reward_args"
                return f"comes neither from TRL nor from {key} ({others}); {expected}{suggestion}"
        return ""


def check_rewards(data: dict[str, Any], workdir: Path, columns: Mapping[str, Columns], findings: Findings) -> None:
    """Report reward functions that TRL cannot call, and arguments that they do not accept."""
    trainer = data.get("trainer", {})
    environments = ("environments",) if trainer.get("environment_factory") else ()
    call = Call((*PASSED, *environments, *(PASSED_OF_AGENT if trainer.get("agent") else ())), columns)
    arguments, has_setup = dict(trainer.get("reward_args", {})), bool(trainer.get("setup"))
    functions = {name.rpartition(".")[2]: name for name in trainer.get("reward_funcs", ())}
    for index, name in enumerate(trainer.get("reward_funcs", ())):
        fixed = arguments.get(short := name.rpartition(".")[2])
        own_call = replace(call, fixed=tuple(fixed) if isinstance(fixed, dict) else ())
        if fixed and (not isinstance(fixed, dict) or argument_problem(name, workdir, fixed, has_setup=has_setup)):
            own_call = replace(call, columns={})  # a missing argument may be the misspelled one
        if problem := reward_problem(name, workdir, own_call, has_setup=has_setup):
            findings.add(("trainer", "reward_funcs", index), problem)
            arguments.pop(short, None)
    for name, values in arguments.items():
        path: KeyPath = ("trainer", "reward_args", name)
        if name not in functions:
            findings.add(path, f"no such function in trainer.reward_funcs{did_you_mean(name, list(functions))}")
        elif not isinstance(values, dict):
            findings.add(path, f"expected a mapping of the function's arguments, got {format_value(values)}")
        elif problem := argument_problem(functions[name], workdir, values, has_setup=has_setup):
            findings.add(path, problem)


def reward_problem(path: str, workdir: Path, call: Call, *, has_setup: bool) -> str:
    """Return the problem with a reward function's import path, or an empty string; models have none."""
    if is_model(path):
        return ""
    if path.startswith("trl."):
        shipped = shipped_reward_functions()
        return "" if path in shipped else f"TRL has no such reward function{did_you_mean(path, shipped)}"
    misfit = functools.partial(_signature_problem, call)
    return function_problem(path, workdir, has_setup=has_setup, misfit=misfit)


def argument_problem(path: str, workdir: Path, arguments: Collection[str], *, has_setup: bool) -> str:
    """Return the problem with a reward function's argument names, or an empty string if none is known."""

    def misfit(node: ast.stmt, name: str) -> str:
        if not isinstance(node, FUNCTION) or not all(map(_keeps_parameters, node.decorator_list)):
            return ""
        accepted = [parameter.arg for parameter in (*node.args.args, *node.args.kwonlyargs)]
        unknown = [argument for argument in arguments if argument not in accepted]
        return f"{name} has no argument `{unknown[0]}`{did_you_mean(unknown[0], accepted)}" if unknown else ""

    if is_model(path) or path.startswith("trl."):
        return ""
    return function_problem(path, workdir, has_setup=has_setup, misfit=misfit)


def is_model(reward: str) -> bool:
    """Return whether a reward is a model (a folder or a name on the hub) instead of a function."""
    return "/" in reward


def _keeps_parameters(decorator: ast.expr) -> bool:
    """Return whether the decorated function has the parameters of the function below the decorator."""
    return _is_in_workers(decorator) or _decorator_name(decorator) in MARKER_DECORATORS


def _is_in_workers(decorator: ast.expr) -> bool:
    """Return whether it is `grpo_orch.rewards.in_workers`, under any import name."""
    return isinstance(decorator, ast.Call) and _decorator_name(decorator) == "in_workers"


def _decorator_name(decorator: ast.expr) -> str:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(called).rpartition(".")[2]


def _signature_problem(call: Call, node: ast.stmt, name: str) -> str:
    """Return why TRL cannot call a function, or an empty string.

    TRL calls by keyword, with more arguments than most functions use; without `**kwargs` that is a TypeError.
    """
    if not isinstance(node, FUNCTION) or not all(map(_keeps_parameters, node.decorator_list)):
        return ""
    arguments, required = node.args, _required_parameters(node.args)
    if any(map(_is_in_workers, node.decorator_list)):  # called with a completion and the values of its row
        call = replace(call, passed=(*call.passed, "prompt", *required[:1]))
        return _missing_value_problem(call, required, name)
    accepted = {parameter.arg for parameter in (*arguments.args, *arguments.kwonlyargs)}
    columns = [column for dataset in call.columns.values() for column in dataset.names]
    unknown = [passed for passed in (*call.passed, *columns) if passed not in accepted]
    if unknown and arguments.kwarg is None:
        return f"{name} does not accept {unknown[0]}, which TRL passes; add a **kwargs parameter"
    if positional := [parameter.arg for parameter in arguments.posonlyargs if parameter.arg in required]:
        return f"{name} accepts {positional[0]} only by position, but TRL passes it by name; remove the `/`"
    return _missing_value_problem(call, required, name)


def _missing_value_problem(call: Call, required: Sequence[str], name: str) -> str:
    problems = [(parameter, call.missing_value(parameter)) for parameter in required]
    return next((f"parameter {parameter} of {name} {problem}" for parameter, problem in problems if problem), "")


def _required_parameters(arguments: ast.arguments) -> list[str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    required = positional[: len(positional) - len(arguments.defaults)]
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    required += [parameter for parameter, default in keywords if default is None]
    return [parameter.arg for parameter in required]
