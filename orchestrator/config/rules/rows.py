"""What the rows of a dataset that lies here tell before anything is started: columns, how many, chats or texts.

JSON lines and CSV files are read. Parquet takes a library that nodes alone have: their trainer looks at it.
"""

from __future__ import annotations

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
from orchestrator.config.reading.datasets import each_dataset
from policies.model.datasets import bad_line, counts_of, file_kind, is_import_path, read_template

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
