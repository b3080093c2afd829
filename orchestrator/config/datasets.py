"""Check the keys of `trainer.dataset` and `trainer.eval_dataset`, and the rows of local files.

JSON Lines and CSV files are read. Parquet needs a library that only nodes have, so the trainer checks it.
"""

from __future__ import annotations

import ast
import csv
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from grpo_orch.orchestrator.config.effective import AlreadyReported, EffectiveRun
from grpo_orch.orchestrator.config.problems import Findings, KeyPath
from grpo_orch.orchestrator.config.structure import format_value
from grpo_orch.orchestrator.config.user_code import function_problem
from grpo_orch.policies.model.datasets import bad_line, counts_of, file_kind, is_import_path, read_template

_EXPECTED = "expected a string with columns in braces, as in {question}, or module.function"


def each_dataset(trainer: dict[str, Any]) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    """Yield each dataset of a checked `trainer` section, with its path."""
    for key in ("dataset", "eval_dataset"):
        value = trainer.get(key)
        if isinstance(value, list):
            yield from ((("trainer", key, index), dataset) for index, dataset in enumerate(value))
        elif value is not None:
            yield ("trainer", key), value


def check_datasets(trainer: dict[str, Any], workdir: Path, findings: Findings) -> None:
    """Report invalid prompts, streams and weights."""
    has_setup = bool(trainer.get("setup"))
    for path, dataset in each_dataset(trainer):
        prompt, prompt_path = dataset.get("prompt"), (*path, "prompt")
        if isinstance(prompt, list):
            _check_messages(prompt, prompt_path, findings)
        elif prompt is not None and is_import_path(prompt):
            problem = function_problem(prompt, workdir, has_setup=has_setup, misfit=_prompt_function_problem)
            if problem:
                findings.add(prompt_path, problem)
        elif prompt is not None and _columns(prompt, prompt_path, findings) == ():
            findings.add(prompt_path, f"{_EXPECTED}; got {format_value(prompt)}")
        _check_streaming(path, dataset, findings)
    for key in ("dataset", "eval_dataset"):
        _check_weights(trainer.get(key), ("trainer", key), findings)


def _check_messages(messages: list[dict[str, Any]], path: KeyPath, findings: Findings) -> None:
    has_column = False
    for index, message in enumerate(messages):
        item = (*path, index)
        if message.keys() != {"role", "content"} or not all(isinstance(text, str) for text in message.values()):
            findings.add(item, "expected a message with the strings `role` and `content`, and no other keys")
            return
        has_column = _columns(message["content"], (*item, "content"), findings) != () or has_column
    if not has_column:
        findings.add(path, "no message uses a column, so all prompts would be the same; expected e.g. {question}")


def _columns(text: str, path: KeyPath, findings: Findings) -> tuple[str, ...] | None:
    """Return the columns in a template; None, and a report, if it is invalid."""
    try:
        return read_template(text).columns
    except ValueError as error:
        findings.add(path, str(error))
        return None


def _check_streaming(path: KeyPath, dataset: dict[str, Any], findings: Findings) -> None:
    if not dataset.get("streaming"):
        return
    if path[1] == "eval_dataset":
        message = "each evaluation uses all rows; remove it, and select rows with split, as in test[:500]"
        findings.add((*path, "streaming"), message)
    elif "[" in dataset.get("split", ""):
        message = "a stream cannot be sliced: the run reads it from the first row, as far as needed"
        findings.add((*path, "split"), f"{message}; expected only the split's name")


def _check_weights(datasets: Any, path: KeyPath, findings: Findings) -> None:
    if not isinstance(datasets, list):
        if datasets and datasets.get("weight") is not None:
            message = "a weight is the share among several datasets; expected a list of datasets, or no weight"
            findings.add((*path, "weight"), message)
        return
    if not datasets:
        findings.add(path, "expected at least one dataset")
    weights = [dataset.get("weight") for dataset in datasets]
    for index, weight in enumerate(weights):
        weight_path = (*path, index, "weight")
        if weight is None and any(weights) and not findings.is_reported(weight_path):
            findings.add(weight_path[:-1], "has no weight, but another dataset has; expected all or none")
        elif weight is not None and weight <= 0:
            findings.add(weight_path, f"expected more than 0, got {weight:g}")


def _prompt_function_problem(node: ast.stmt, name: str) -> str:
    """Return why a function cannot be called with a row as its only argument, or an empty string."""
    if not isinstance(node, ast.FunctionDef):
        is_async = isinstance(node, ast.AsyncFunctionDef)
        return f"{name} is async; expected def {name}(row)" if is_async else ""
    if node.decorator_list:
        return ""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    requires_keyword = None in arguments.kw_defaults
    if required > 1 or requires_keyword or not (positional or arguments.vararg):
        return f"{name} cannot be called with only a row; expected def {name}(row)"
    return ""


# Rows: their columns, their number, and whether prompts are chats.

NOT_READ_KEYS = ("streaming", "name", "revision")  # with these, rows differ from the file's
COLUMNS_SHOWN = 12
SCANNED_BYTES_MAX = 64 * 2**20  # larger files are read only as far as one step needs
EXPECTED_FORMAT = {
    "json": 'one JSON object per line, as in {"prompt": "1 + 1"}',
    "csv": "a line of column names, then at least one line of values",
    "parquet": "a Parquet file with rows",
}
EMPTY_CONTENT = {"json": "only blank lines", "csv": "no line of values"}
SPLITS = ("train", "all")  # of one file, for `datasets` (5.2, `arrow_reader.py`)
_SPLIT = re.compile(r"train(?:\[(-?\d+)?(%)?:(-?\d+)?(%)?\])?")
OWN_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})  # TRL passes these under other names

UNREADABLE = (OSError, ValueError, TypeError, csv.Error, RecursionError)


@dataclass(frozen=True, slots=True)
class _Rows:
    """A file's first row and its number of rows, counted only up to what one step needs; None if unknown."""

    file: Path
    first: dict[str, Any]
    count: int | None

    def may_have(self, column: str) -> bool:
        """Return whether any row has the column, or may have it."""
        try:
            is_small = _is_small(self.file)
            return (
                column in self.first
                or not is_small
                or any(column in row for row in READERS[self.file.suffix](self.file))
            )
        except UNREADABLE:
            return True


@dataclass(frozen=True, slots=True)
class Columns:
    """The dataset's columns that TRL passes to a reward function."""

    names: tuple[str, ...]  # of the first rows
    files: tuple[_Rows, ...]

    def may_have(self, name: str) -> bool:
        """Return whether a column of that name is passed, or may be."""
        return name not in OWN_COLUMNS and any(rows.may_have(name) for rows in self.files)


def check_rows(data: dict[str, Any], workdir: Path, findings: Findings) -> Mapping[str, Columns]:
    """Report datasets without usable prompts, or with too few rows for one step.

    Files are read as far as one step needs. With `trainer.setup`, which may still write files, nothing is read.
    Returns the known columns of `trainer.dataset` and `trainer.eval_dataset`, by key.
    """
    trainer, run = data.get("trainer", {}), EffectiveRun(data, findings)
    if trainer.get("setup"):
        return {}
    try:
        group, batch = run.grpo("num_generations"), run.generation_batch
        needed = batch // group
    except (AlreadyReported, ZeroDivisionError):
        needed = batch = group = 0  # reported already
    read: dict[str, list[tuple[dict[str, Any], _Rows | None]]] = {}
    for path, dataset in each_dataset(trainer):
        is_valid = not findings.is_reported(path) and not findings.is_reported_within((*path, "prompt"))
        rows = _read(path, dataset, workdir, needed, findings) if is_valid else None
        read.setdefault(str(path[1]), []).append((dataset, rows))
        if rows is not None:
            _check_columns(path, dataset, rows, findings)
            _check_template(path, dataset, rows, trainer.get("model"), workdir, findings)
    if (count := _count(read.get("dataset", ()))) is not None and count < needed:
        batch_of = f"generation batch {batch} / num_generations {group}"
        message = (
            f"{count} {'row' if count == 1 else 'rows'}, but one step needs {needed} different prompts "
            f"({batch_of}); expected at least {needed} rows, or a smaller batch"
        )
        findings.add(("trainer", "dataset"), message)
    drops_columns = bool(data.get("grpo", {}).get("remove_unused_columns"))
    passed = {f"trainer.{key}": _passed(datasets, drops_columns=drops_columns) for key, datasets in read.items()}
    return {key: columns for key, columns in passed.items() if columns is not None}


def _count(datasets: Sequence[tuple[dict[str, Any], _Rows | None]]) -> int | None:
    """Return the total number of rows of all datasets; None if it is unknown."""
    sizes = [rows.count for _, rows in datasets if rows is not None and rows.count is not None]
    if not sizes or len(sizes) < len(datasets):
        return None
    weights = [dataset["weight"] for dataset, _ in datasets if (dataset.get("weight") or 0) > 0]
    return sum(counts_of(sizes, weights) if len(weights) == len(sizes) else sizes)


def _passed(datasets: Sequence[tuple[dict[str, Any], _Rows | None]], *, drops_columns: bool) -> Columns | None:
    """Return the columns passed to reward functions; None if they are unknown.

    They are unknown if a file was not read, or if a prompt function may add columns.
    """
    if drops_columns:
        return Columns((), ())
    files = [rows for _, rows in datasets if rows is not None]
    prompts = [dataset["prompt"] for dataset, _ in datasets if isinstance(dataset.get("prompt"), str)]
    if len(files) < len(datasets) or any(map(is_import_path, prompts)):
        return None
    names = dict.fromkeys(name for rows in files for name in rows.first if name not in OWN_COLUMNS)
    return Columns(tuple(names), tuple(files))


def _check_columns(path: KeyPath, dataset: dict[str, Any], rows: _Rows, findings: Findings) -> None:
    prompt = dataset.get("prompt")
    if prompt is None:
        needed: tuple[str, ...] = ("prompt",)
    elif isinstance(prompt, str):
        needed = () if is_import_path(prompt) else read_template(prompt).columns
    else:
        needed = tuple(name for message in prompt for name in read_template(message["content"]).columns)
    missing = [name for name in needed if not rows.may_have(name)]
    if not missing:
        return
    columns = list(rows.first)
    listed = ", ".join(columns[:COLUMNS_SHOWN])
    if prompt is not None:
        message = f"uses {', '.join(missing)}, but the file's columns are {listed}"
        findings.add((*path, "prompt"), f"{message}; expected columns of the file")
        return
    message = f"the file has no column `prompt`; its columns are {listed}; add one, or set `{path[1]}.prompt`"
    chat_example = "as in `prompt: module.function`, a function that returns the messages before the answer"
    template_example = "as in prompt: '{question}'"
    findings.add(path, f"{message}, {chat_example if 'messages' in columns else template_example}")


def _check_template(
    path: KeyPath, dataset: dict[str, Any], rows: _Rows, model: Any, workdir: Path, findings: Findings
) -> None:
    """Report chats for a local model whose tokenizer has no chat template."""
    chats = isinstance(dataset.get("prompt"), list) or isinstance(rows.first.get("prompt"), list)
    folder = workdir / str(model)
    if not chats or not os.path.isfile(folder / "tokenizer_config.json"):
        return
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
    except (OSError, ValueError):
        return
    has_template = isinstance(settings, dict) and settings.get("chat_template")
    if has_template or (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return
    message = f"the prompts are chats, but the tokenizer of {model} has no chat template"
    findings.add(path, f"{message}; add {model}/chat_template.jinja, or use strings as prompts")


def _read(path: KeyPath, dataset: dict[str, Any], workdir: Path, needed: int, findings: Findings) -> _Rows | None:
    """Return the rows of a JSON Lines or CSV file; None if only the trainer can read it or it was reported."""
    name, split = dataset.get("path"), str(dataset.get("split", "train"))
    if not isinstance(name, str) or any(dataset.get(key) for key in NOT_READ_KEYS):
        return None
    file, kind = workdir / name, file_kind(name)
    if kind is None or not os.path.isfile(file):  # `is_file` raises if a name is too long
        return None
    if any(part.split("[")[0].strip() not in SPLITS for part in split.split("+")):
        message = (
            f"a single file has only the split train; expected train, or a slice as in train[:500], got {split}"
        )
        findings.add((*path, "split"), message)
        return None
    try:
        is_counted = "[" in split and _is_small(file)
        if file.stat().st_size == 0:
            findings.add((*path, "path"), f"{file.name} is empty; expected {EXPECTED_FORMAT[kind]}")
        if file.stat().st_size == 0 or file.suffix not in READERS:
            return None
        if reason := _bad_line(file):
            findings.add((*path, "path"), f"{file.name}, {reason}")
            return None
        rows = list(islice(READERS[file.suffix](file), None if is_counted else max(1, needed)))
    except UNREADABLE:
        return None  # the library reports it
    if not rows:
        message = f"{file.name} has {EMPTY_CONTENT[kind]}; expected {EXPECTED_FORMAT[kind]}"
        findings.add((*path, "path"), message)
        return None
    selected = _selected(split, len(rows)) if is_counted or "[" not in split else None
    if selected == 0:
        message = f"{split} selects none of the {len(rows)} rows of {file.name}; expected at least one"
        findings.add((*path, "split"), message)
        return None
    return _Rows(file, rows[0], selected)


def _selected(split: str, count: int) -> int | None:
    """Return how many of a file's rows a split selects, as `datasets` counts them; None for an unknown form."""
    total = 0
    for part in split.split("+"):
        if (match := _SPLIT.fullmatch(part.strip())) is None:
            return None
        start, is_start_percent, end, is_end_percent = match.groups()
        unit = count / 100 if is_start_percent or is_end_percent else 1
        bounds = [round(int(bound) * unit) for bound in (start or 0, end or 0)]
        first, last = (min(count, max(0, bound + count) if bound < 0 else bound) for bound in bounds)
        total += max(0, (last if end else count) - first)
    return total


def _bad_line(file: Path) -> str:
    """Return the first bad line of a small JSON Lines file. `datasets` also accepts other JSON forms."""
    if file.suffix != ".jsonl" or not _is_small(file):
        return ""
    next(_json_lines(file), None)
    with file.open("rb") as lines:
        return bad_line(lines)


def _is_small(file: Path) -> bool:
    return file.stat().st_size <= SCANNED_BYTES_MAX


def _json_lines(file: Path) -> Iterator[dict[str, Any]]:
    with file.open("rb") as lines:
        for line in lines:
            if line.strip():
                row = json.loads(line.strip())
                if not isinstance(row, dict):
                    raise TypeError(row)
                yield row


def _csv_rows(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        rows = (row for row in csv.reader(lines) if row)  # pandas skips blank lines before the header, too
        names = next(rows, [])
        for row in rows:
            if len(row) > len(names):
                raise csv.Error("pandas would use the first column as the index")
            yield dict(zip_longest(names, row))


READERS: Mapping[str, Callable[[Path], Iterator[dict[str, Any]]]] = {".jsonl": _json_lines, ".csv": _csv_rows}
