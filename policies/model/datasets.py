"""Datasets of run.yaml: the supported files, and how a prompt is made from a row."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv"}
# The builder of `datasets` for each file name ending.
FILE_KINDS = {**_KINDS, ".parquet": "parquet", **{f"{end}.gz": kind for end, kind in _KINDS.items()}}

_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_COMMAND = re.compile(r"\\[A-Za-z]+$")  # of LaTeX, before its brace
_DOUBLED = "double literal braces, as in \\boxed{{}}"


def file_kind(name: str) -> str | None:
    """Return the builder that reads a file with that name; None if there is none."""
    return next((kind for end, kind in FILE_KINDS.items() if name.endswith(end)), None)


def is_import_path(text: str) -> bool:
    """Whether a prompt is `module.function` instead of a template."""
    return _IMPORT_PATH.fullmatch(text) is not None


def counts_of(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Return how many rows to take of each dataset for these shares: all, repeated where a share needs more."""
    longest = max(size / weight for size, weight in zip(sizes, weights, strict=True))
    return [max(size, round(longest * weight)) for size, weight in zip(sizes, weights, strict=True)]


def bad_line(lines: Iterable[bytes]) -> str:
    """Describe the first line of a JSON lines file that is not JSON in UTF-8; empty if all are."""
    for number, line in enumerate(lines, start=1):
        try:
            json.loads(line.strip() or b"null")
        except ValueError as error:
            reason = " ".join(str(error).split())
            if isinstance(error, json.JSONDecodeError):
                reason = error.msg.removesuffix(" starting at")
            return f"line {number}: {reason}; expected a JSON object in UTF-8 in every line"
    return ""


@dataclass(frozen=True, slots=True)
class Template:
    """A text with column names in braces, as `str.format` reads them.

    Stored as pairs of a text and the column after it; None after the last.
    """

    parts: tuple[tuple[str, str | None], ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns in the template, each once."""
        return tuple(dict.fromkeys(column for _, column in self.parts if column is not None))

    def fill(self, row: Mapping[str, Any]) -> str:
        """Return the text for a row. Raises ValueError if a value is no text or number."""
        return "".join(
            text + ("" if column is None else _plain(column, row[column])) for text, column in self.parts
        )


def read_template(text: str) -> Template:
    """Parse a template. Raises ValueError with a message for the user."""
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
            raise ValueError(
                f"{{{column}...}} is not a plain column name; expected a name such as {{question}}; {_DOUBLED}"
            )
        if command := _COMMAND.search(before):
            braced = f"{command[0]}{{{column}}}"
            raise ValueError(f"{braced} would insert the column {column}; {_DOUBLED}")
    return Template(tuple((before, column) for before, column, _, _ in parsed))


def _plain(column: str, value: Any) -> str:
    if value is None or not isinstance(value, str | int | float):
        found = "null" if value is None else f"a {type(value).__name__}"
        raise ValueError(f"its {column} is {found}; expected a text or a number; or use a function for the prompt")
    return str(value)
