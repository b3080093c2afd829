"""What the rows of a dataset that lies here tell before anything is started: columns, how many, chats or texts."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from orchestrator.config.reading.datasets import each_dataset
from orchestrator.config.reading.problems import Findings, KeyPath
from orchestrator.config.rules.effective import Doubtful, EffectiveRun
from policies.model.datasets import is_import_path, read_template

PREPARED = ("streaming", "name", "revision")  # rows that are not simply those of the file
COLUMNS_SHOWN = 12


@dataclass(frozen=True, slots=True)
class _Rows:
    """A file's first row, and how many there are, counted up to what one step needs."""

    first: dict[str, Any]
    count: int


def check_rows(data: dict[str, Any], workdir: Path, findings: Findings) -> None:
    """Report datasets of which the trainer could make no prompt, or no step.

    Files are read as far as one step needs. What `trainer.setup` may still write is not looked at.
    """
    trainer, run = data.get("trainer", {}), EffectiveRun(data, findings)
    if trainer.get("setup"):
        return
    try:
        group, batch = run.grpo("num_generations"), run.generation_batch
        needed = batch // group
    except (Doubtful, ZeroDivisionError):
        return  # reported already
    sizes: list[int | None] = []
    for path, dataset in each_dataset(trainer):
        if findings.doubtful(path):
            continue
        rows = _read(dataset, workdir, needed)
        if path[1] == "dataset":
            sizes.append(None if rows is None or "[" in dataset.get("split", "") else rows.count)
        if rows is not None:
            _check_columns(path, dataset, rows, findings)
            _check_template(path, dataset, rows, trainer.get("model"), workdir, findings)
    known = [size for size in sizes if size is not None]
    if sizes and len(known) == len(sizes) and sum(known) < needed:
        found = f"{sum(known)} {'row' if sum(known) == 1 else 'rows'}"
        message = (
            f"{found}, and one step takes {needed} different prompts (generation batch {batch} / "
            f"num_generations {group}): not one step would be trained; expected at least "
            f"{needed} rows, or a smaller batch"
        )
        findings.add(("trainer", "dataset"), message)


def _check_columns(path: KeyPath, dataset: dict[str, Any], rows: _Rows, findings: Findings) -> None:
    prompt, columns = dataset.get("prompt"), rows.first.keys()
    if prompt is None:
        needed: tuple[str, ...] = ("prompt",)
    elif isinstance(prompt, str):
        needed = () if is_import_path(prompt) else read_template(prompt).columns
    else:
        needed = tuple(name for message in prompt for name in read_template(message["content"]).columns)
    missing = [name for name in needed if name not in columns]
    if not missing:
        return
    shown = ", ".join(list(columns)[:COLUMNS_SHOWN])
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
    if not chats or not (folder / "tokenizer_config.json").is_file():
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


def _read(dataset: dict[str, Any], workdir: Path, needed: int) -> _Rows | None:
    """The rows of a JSON lines or CSV file; None for anything else, or where only the trainer can read it."""
    named = dataset.get("path")
    if not isinstance(named, str) or any(dataset.get(key) for key in PREPARED):
        return None
    file = workdir / named
    reader = {".jsonl": _json_lines, ".csv": _csv_rows}.get(file.suffix)
    if reader is None or not file.is_file():
        return None
    try:
        found = list(islice(reader(file), max(1, needed)))
    except (OSError, ValueError, TypeError, csv.Error, RecursionError):
        return None  # what is wrong with it is the library's to say
    return _Rows(found[0], len(found)) if found else None


def _json_lines(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8-sig") as lines:
        for line in lines:
            if line.strip():
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise TypeError(row)
                yield row


def _csv_rows(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        yield from csv.DictReader(lines)
