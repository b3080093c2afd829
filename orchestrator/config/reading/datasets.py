"""The keys of `trainer.dataset` and `trainer.eval_dataset`: what can be told of them without the data."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator.config.reading.functions import function_problem
from orchestrator.config.reading.kinds import shown
from orchestrator.config.reading.problems import Findings, KeyPath
from policies.model.datasets import is_import_path, read_template

REASONING_GYM_SIZE = 500  # its default
_OF_FILES = ("path", "name", "split", "revision", "streaming")
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
        _check_source(path, dataset, findings)
        _check_streaming(path, dataset, findings)
    _check_overlap(trainer, findings)
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


def _check_source(path: KeyPath, dataset: dict[str, Any], findings: Findings) -> None:
    """Rows are read or made, and made ones are the same at a restart."""
    if any(findings.doubtful((*path, key)) for key in ("path", "reasoning_gym")):
        return
    if dataset.get("reasoning_gym") is None:
        if "path" not in dataset:
            expected = "a dataset's name on the hub, a folder or a file, or a task as `reasoning_gym`"
            findings.missing((*path, "path"), f"missing; expected {expected}")
        if "args" in dataset:
            findings.add((*path, "args"), "they are a task's of `reasoning_gym`, and there is none; remove them")
        return
    for key in (key for key in _OF_FILES if key in dataset):
        findings.add((*path, key), "says which rows are read, and those of `reasoning_gym` are made; remove it")
    args = dataset.get("args") or {}
    for key, needed in (("seed", True), ("size", False)):
        value = args.get(key)
        if (value is not None or needed) and not (isinstance(value, int) and value >= 0):
            message = "a restart has to make the same problems" if needed else "it is how many problems are made"
            findings.add(path, f"args: expected `{key}` as a whole number, got {shown(value)}; {message}")


def _check_overlap(trainer: dict[str, Any], findings: Findings) -> None:
    """reasoning-gym makes its problem i of the seed plus i: neighbouring seeds give the same ones."""
    made = [
        (path, one["reasoning_gym"], dict(one["args"]))
        for path, one in each_dataset(trainer)
        if isinstance(one.get("reasoning_gym"), str) and isinstance(one.get("args"), dict)
    ]
    sound = [one for one in made if not findings.doubtful(one[0])]
    trained_on = [one for one in sound if one[0][1] == "dataset"]
    for path, task, args in (one for one in sound if one[0][1] == "eval_dataset"):
        start, end = _numbers(args)
        for _, same, others in trained_on:
            other_start, other_end = _numbers(others)
            alike = same == task and _difficulty(args) == _difficulty(others)
            if alike and start < other_end and other_start < end:
                message = "has problems of trainer.dataset, for each is made of the seed plus its number"
                findings.add(path, f"{message}; expected args.seed from {other_end} on")


def _numbers(args: dict[str, Any]) -> tuple[int, int]:
    return args["seed"], args["seed"] + (args.get("size") or REASONING_GYM_SIZE)


def _difficulty(args: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in args.items() if key not in ("seed", "size")}


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
