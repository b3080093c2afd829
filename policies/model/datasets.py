"""What a dataset of run.yaml may be: which files are read, and how a prompt is made of a row."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv"}
# By the end of a file's name: the builder of `datasets` that reads it.
FILE_KINDS = {**_KINDS, ".parquet": "parquet", **{f"{end}.gz": kind for end, kind in _KINDS.items()}}

_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_COMMAND = re.compile(r"\\[A-Za-z]+$")  # of LaTeX, before its brace
_DOUBLED = "braces of the text itself are doubled, as in \\boxed{{}}"


def file_kind(name: str) -> str | None:
    """The builder that reads a file of that name; None where none does."""
    return next((kind for end, kind in FILE_KINDS.items() if name.endswith(end)), None)


def is_import_path(text: str) -> bool:
    """Whether a prompt is `module.function` and no template."""
    return _IMPORT_PATH.fullmatch(text) is not None


def counts_of(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """How many rows are taken of each of several datasets in these shares: each of its rows at least once, and
    those of one that is too small for its share again."""
    longest = max(size / weight for size, weight in zip(sizes, weights, strict=True))
    return [max(size, round(longest * weight)) for size, weight in zip(sizes, weights, strict=True)]


def bad_line(lines: Iterable[bytes]) -> str:
    """Name the first line of a JSON lines file that is not JSON in UTF-8; empty where each is."""
    for number, line in enumerate(lines, start=1):
        try:
            json.loads(line.strip() or b"null")
        except ValueError as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else " ".join(str(error).split())
            return f"line {number}: {reason}; expected a JSON object in UTF-8 in every line"
    return ""


@dataclass(frozen=True, slots=True)
class Template:
    """A text with columns in braces, as `str.format` reads them, names alone: pairs of a text and the column after
    it, None after the last."""

    parts: tuple[tuple[str, str | None], ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are named, each once."""
        return tuple(dict.fromkeys(column for _, column in self.parts if column is not None))

    def fill(self, row: Mapping[str, Any]) -> str:
        """The text for a row. Raises ValueError where a value is no text or number."""
        return "".join(
            text + ("" if column is None else _plain(column, row[column])) for text, column in self.parts
        )


def read_template(text: str) -> Template:
    """Raises ValueError, in words for the user."""
    try:
        parsed = list(string.Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"{str(error).removesuffix(' in format string')}; {_DOUBLED}") from None
    for before, column, form, conversion in parsed:
        if column is None:
            continue
        if not column:
            raise ValueError(f"{{}} names no column; {_DOUBLED}")
        if form or conversion or set(column) & set(".[{"):
            raise ValueError(f"{{{column}...}} is more than a column's name; expected {{question}}; {_DOUBLED}")
        if command := _COMMAND.search(before):
            braced = f"{command[0]}{{{column}}}"
            raise ValueError(f"{braced} would show the model the column {column}; {_DOUBLED}")
    return Template(tuple((before, column) for before, column, _, _ in parsed))


def _plain(column: str, value: Any) -> str:
    if value is None or not isinstance(value, str | int | float):
        what = "nothing" if value is None else f"a {type(value).__name__}"
        raise ValueError(f"its {column} is {what}; expected a text or a number, or make the prompt by a function")
    return str(value)
