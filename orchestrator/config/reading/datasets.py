"""The keys of `trainer.dataset` and `trainer.eval_dataset`: what can be told of them without the data."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator.config.problems import Findings, KeyPath
from orchestrator.config.structure import shown
from orchestrator.config.user_code import function_problem
from policies.model.datasets import is_import_path, read_template

_EXPECTED = "expected a text with columns in braces, as in {question}, or module.function"


def each_dataset(trainer: dict[str, Any]) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    """Every dataset of a `trainer` section whose structure was checked, with the path of its section."""
    for key in ("dataset", "eval_dataset"):
        named = trainer.get(key)
        if isinstance(named, list):
            yield from ((("trainer", key, index), one) for index, one in enumerate(named))
        elif named is not None:
            yield ("trainer", key), named


def check_datasets(trainer: dict[str, Any], workdir: Path, findings: Findings) -> None:
    """Report prompts that no row could become, and shares that are none."""
    has_setup = bool(trainer.get("setup"))
    for path, dataset in each_dataset(trainer):
        prompt, here = dataset.get("prompt"), (*path, "prompt")
        if isinstance(prompt, list):
            _check_messages(prompt, here, findings)
        elif prompt is not None and is_import_path(prompt):
            if problem := function_problem(prompt, workdir, has_setup=has_setup, misfit=_takes_no_row):
                findings.add(here, problem)
        elif prompt is not None and _columns(prompt, here, findings) == ():
            findings.add(here, f"{_EXPECTED}; got {shown(prompt)}")
        _check_streaming(path, dataset, findings)
    for key in ("dataset", "eval_dataset"):
        _check_weights(trainer.get(key), ("trainer", key), findings)


def _check_messages(messages: list[dict[str, Any]], path: KeyPath, findings: Findings) -> None:
    named = False
    for index, message in enumerate(messages):
        here = (*path, index)
        if message.keys() != {"role", "content"} or not all(isinstance(one, str) for one in message.values()):
            findings.add(here, "expected a message with the texts `role` and `content`, and nothing else")
            return
        named = _columns(message["content"], (*here, "content"), findings) != () or named
    if not named:
        findings.add(path, "no message names a column, so all prompts would be the same; expected e.g. {question}")


def _columns(text: str, path: KeyPath, findings: Findings) -> tuple[str, ...] | None:
    """The columns that a template names; None where it cannot be read."""
    try:
        return read_template(text).columns
    except ValueError as error:
        findings.add(path, str(error))
        return None


def _check_streaming(path: KeyPath, dataset: dict[str, Any], findings: Findings) -> None:
    if not dataset.get("streaming"):
        return
    if path[1] == "eval_dataset":
        message = "each evaluation takes all rows; remove it, and take some with split, as in test[:500]"
        findings.add((*path, "streaming"), message)
    elif "[" in dataset.get("split", ""):
        message = "a stream has no slices: it is read from its first row, as far as the run can use it"
        findings.add((*path, "split"), f"{message}; expected the split's name alone")


def _check_weights(datasets: Any, path: KeyPath, findings: Findings) -> None:
    if not isinstance(datasets, list):
        if datasets and datasets.get("weight") is not None:
            message = "the share of one dataset among several; expected a list of them, or no weight"
            findings.add((*path, "weight"), message)
        return
    if not datasets:
        findings.add(path, "expected at least one dataset")
    weights = [one.get("weight") for one in datasets]
    for index, weight in enumerate(weights):
        here = (*path, index, "weight")
        if weight is None and any(weights) and not findings.doubtful(here):
            findings.add(here[:-1], "has no weight, and another one has; expected one for each, or for none")
        elif weight is not None and weight <= 0:
            findings.add(here, f"expected more than 0, got {weight:g}")


def _takes_no_row(node: ast.stmt, name: str) -> str:
    """A prompt function is called with a row alone."""
    if not isinstance(node, ast.FunctionDef):
        is_async = isinstance(node, ast.AsyncFunctionDef)
        return f"{name} is async; expected a plain function of a row" if is_async else ""
    if node.decorator_list:
        return ""
    given = node.args
    taken = [*given.posonlyargs, *given.args]
    wanted = len(taken) - len(given.defaults)
    keywords = [one for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None]
    if wanted > 1 or keywords or not (taken or given.vararg):
        return f"{name} cannot be called with a row alone; expected def {name}(row)"
    return ""
