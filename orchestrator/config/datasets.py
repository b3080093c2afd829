"""The keys of `trainer.dataset` and `trainer.eval_dataset`, and the rows of data that lies here.

JSON lines and CSV files are read. Parquet takes a library that nodes alone have: their trainer looks at it.
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

from orchestrator.config.effective import Doubtful, EffectiveRun
from orchestrator.config.problems import Findings, KeyPath
from orchestrator.config.structure import shown
from orchestrator.config.user_code import function_problem
from policies.model.datasets import bad_line, counts_of, file_kind, is_import_path, read_template

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


# Rows: columns, how many, chats or texts, before anything is started.

PREPARED = ("streaming", "name", "revision")  # rows that are not simply those of the file
COLUMNS_SHOWN = 12
SCANNED_BYTES_MAX = 64 * 2**20  # a larger file is read as far as one step needs
FORMS = {
    "json": 'one JSON object a line, as in {"prompt": "1 + 1"}',
    "csv": "a line of column names, and one line or more of values",
    "parquet": "a Parquet file with rows",
}
NO_ROWS = {"json": "blank lines alone", "csv": "no line of values"}
SPLITS = ("train", "all")  # of one file, for `datasets` (5.2, `arrow_reader.py`)
_PART = re.compile(r"train(?:\[(-?\d+)?(%)?:(-?\d+)?(%)?\])?")
OWN_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})  # TRL passes these under other names

UNREADABLE = (OSError, ValueError, TypeError, csv.Error, RecursionError)


@dataclass(frozen=True, slots=True)
class _Rows:
    """A file's first row, and how many there are, counted up to what one step needs; None: not known."""

    file: Path
    first: dict[str, Any]
    count: int | None

    def has(self, column: str) -> bool:
        """Whether any row has the column, or may have it."""
        try:
            small = _is_small(self.file)
            return column in self.first or not small or any(column in row for row in _rows_of(self.file))
        except UNREADABLE:
            return True


@dataclass(frozen=True, slots=True)
class Columns:
    """The dataset's columns that TRL passes to a reward function."""

    names: tuple[str, ...]  # of the first rows
    files: tuple[_Rows, ...]

    def has(self, name: str) -> bool:
        """Whether a column of that name is passed, or may be."""
        return name not in OWN_COLUMNS and any(rows.has(name) for rows in self.files)


def check_rows(data: dict[str, Any], workdir: Path, findings: Findings) -> Mapping[str, Columns]:
    """Report datasets of which the trainer could make no prompt, or no step.

    Files are read as far as one step needs. What `trainer.setup` may still write is not looked at. Returns the
    columns of `trainer.dataset` and `trainer.eval_dataset`, by key, where they are known.
    """
    trainer, run = data.get("trainer", {}), EffectiveRun(data, findings)
    if trainer.get("setup"):
        return {}
    try:
        group, batch = run.grpo("num_generations"), run.generation_batch
        needed = batch // group
    except (Doubtful, ZeroDivisionError):
        needed = batch = group = 0  # reported already
    found: dict[str, list[tuple[dict[str, Any], _Rows | None]]] = {}
    for path, dataset in each_dataset(trainer):
        known = not findings.doubtful(path) and not findings.holds_doubtful((*path, "prompt"))
        rows = _read(path, dataset, workdir, needed, findings) if known else None
        found.setdefault(str(path[1]), []).append((dataset, rows))
        if rows is not None:
            _check_columns(path, dataset, rows, findings)
            _check_template(path, dataset, rows, trainer.get("model"), workdir, findings)
    if (count := _count(found.get("dataset", ()))) is not None and count < needed:
        batch_of = f"generation batch {batch} / num_generations {group}"
        message = (
            f"{count} {'row' if count == 1 else 'rows'}, and one step takes {needed} different prompts "
            f"({batch_of}): not one step would be trained; expected at least {needed} rows, or a smaller batch"
        )
        findings.add(("trainer", "dataset"), message)
    dropped = bool(data.get("grpo", {}).get("remove_unused_columns"))
    passed = {f"trainer.{key}": _passed(several, dropped=dropped) for key, several in found.items()}
    return {key: columns for key, columns in passed.items() if columns is not None}


def _count(several: Sequence[tuple[dict[str, Any], _Rows | None]]) -> int | None:
    """How many rows all datasets have together; None where that is not known."""
    sizes = [rows.count for _, rows in several if rows is not None and rows.count is not None]
    if not sizes or len(sizes) < len(several):
        return None
    weights = [dataset["weight"] for dataset, _ in several if (dataset.get("weight") or 0) > 0]
    return sum(counts_of(sizes, weights) if len(weights) == len(sizes) else sizes)


def _passed(several: Sequence[tuple[dict[str, Any], _Rows | None]], *, dropped: bool) -> Columns | None:
    """None where a file is not read here, or a function may add columns."""
    if dropped:
        return Columns((), ())
    files = [rows for _, rows in several if rows is not None]
    made = [dataset["prompt"] for dataset, _ in several if isinstance(dataset.get("prompt"), str)]
    if len(files) < len(several) or any(map(is_import_path, made)):
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
    missing = [name for name in needed if not rows.has(name)]
    if not missing:
        return
    columns = list(rows.first)
    shown = ", ".join(columns[:COLUMNS_SHOWN])
    if prompt is not None:
        findings.add((*path, "prompt"), f"names {', '.join(missing)}, and the file's columns are {shown}")
        return
    message = f"the file's columns are {shown}; expected one called `prompt`, or `{path[1]}.prompt` to make it"
    example = "`prompt: module.function`, a function that returns the messages before the answer"
    others = "as in prompt: '{question}'"
    findings.add(path, f"{message}: {example if 'messages' in columns else others}")


def _check_template(
    path: KeyPath, dataset: dict[str, Any], rows: _Rows, model: Any, workdir: Path, findings: Findings
) -> None:
    """Report chats for a tokenizer without a chat template, where the model is a folder here."""
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
    message = f"the prompts are chats, and the tokenizer of {model} has no chat template"
    findings.add(path, f"{message}; add {model}/chat_template.jinja, or make the prompts texts")


def _read(path: KeyPath, dataset: dict[str, Any], workdir: Path, needed: int, findings: Findings) -> _Rows | None:
    """The rows of a JSON lines or CSV file; None for anything else, where the trainer alone can read it, or where
    it was reported."""
    named, split = dataset.get("path"), str(dataset.get("split", "train"))
    if not isinstance(named, str) or any(dataset.get(key) for key in PREPARED):
        return None
    file, kind = workdir / named, file_kind(named)
    if kind is None or not os.path.isfile(file):  # `is_file` raises where a name is too long
        return None
    if any(part.split("[")[0].strip() not in SPLITS for part in split.split("+")):
        message = (
            f"all rows of one file are called train; expected train, or a part as in train[:500], got {split}"
        )
        findings.add((*path, "split"), message)
        return None
    try:
        counted = "[" in split and _is_small(file)
        if file.stat().st_size == 0:
            findings.add((*path, "path"), f"{file.name} is empty; expected {FORMS[kind]}")
        if file.stat().st_size == 0 or file.suffix not in READERS:
            return None
        if reason := _bad_line(file):
            findings.add((*path, "path"), f"{file.name}, {reason}")
            return None
        rows = list(islice(_rows_of(file), None if counted else max(1, needed)))
    except UNREADABLE:
        return None  # what is wrong with it is the library's to say
    if not rows:
        findings.add((*path, "path"), f"{file.name} has {NO_ROWS[kind]}; expected {FORMS[kind]}")
        return None
    taken = _taken(split, len(rows)) if counted or "[" not in split else None
    if taken == 0:
        message = f"{split} takes none of the {len(rows)} rows of {file.name}; expected a part that has some"
        findings.add((*path, "split"), message)
        return None
    return _Rows(file, rows[0], taken)


def _taken(split: str, count: int) -> int | None:
    """How many of a file's rows a split takes, as `datasets` counts them; None where it is none of those known."""
    total = 0
    for part in split.split("+"):
        if (found := _PART.fullmatch(part.strip())) is None:
            return None
        start, of_start, end, of_end = found.groups()
        unit = count / 100 if of_start or of_end else 1
        bounds = [round(int(one) * unit) for one in (start or 0, end or 0)]
        first, last = (min(count, max(0, one + count) if one < 0 else one) for one in bounds)
        total += max(0, (last if end else count) - first)
    return total


def _bad_line(file: Path) -> str:
    """What is wrong with a small file of JSON lines, which begins with an object: other forms are read too."""
    if file.suffix != ".jsonl" or not _is_small(file):
        return ""
    next(_json_lines(file), None)
    with file.open("rb") as lines:
        return bad_line(lines)


def _is_small(file: Path) -> bool:
    return file.stat().st_size <= SCANNED_BYTES_MAX


def _rows_of(file: Path) -> Iterator[dict[str, Any]]:
    return READERS[file.suffix](file)


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
        rows = (row for row in csv.reader(lines) if row)  # before the columns' names, too, as pandas reads it
        names = next(rows, [])
        for row in rows:
            if len(row) > len(names):
                raise csv.Error("pandas takes the first column for the numbers of the rows")
            yield dict(zip_longest(names, row))


READERS: Mapping[str, Callable[[Path], Iterator[dict[str, Any]]]] = {".jsonl": _json_lines, ".csv": _csv_rows}
