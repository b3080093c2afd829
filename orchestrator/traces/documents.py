"""JSON documents: a `trainer_state.json`, a list of rows, an object that holds one, columns, or one row."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from orchestrator.traces.model import Log, Row
from orchestrator.traces.names import TRAINING, metric

_TABLE, _ROW = re.compile(r"<table.*?</table>", re.DOTALL), re.compile(r"<tr.*?</tr>", re.DOTALL)
_CELL, _TAG = re.compile(r"<t[dh][^>]*>(.*?)</t[dh]>", re.DOTALL), re.compile(r"<[^>]*>")


def parse(text: str) -> tuple[Any, str]:
    """The document that the text is, None where it is none; and what is wrong with it, in words."""
    if text.lstrip()[:1] not in ("{", "["):
        return None, ""
    try:
        return json.loads(text), ""
    except json.JSONDecodeError as error:
        return None, f"line {error.lineno}, column {error.colno}: {error.msg}"
    except RecursionError:
        return None, "too deep"
    except ValueError:
        return None, "a number too long"


def read_document(document: list[Any] | dict[str, Any]) -> Log:
    if isinstance(document, list):
        return Log(_objects(document))
    history = document.get("log_history")
    if isinstance(history, list):
        return Log(
            _objects(history), _positive(document.get("logging_steps")), _positive(document.get("save_steps"))
        )
    if any(metric(key)[0] in TRAINING and isinstance(value, list) for key, value in document.items()):
        return Log(_of_columns({key: value for key, value in document.items() if isinstance(value, list)}))
    tables = [_objects(value) for value in document.values() if isinstance(value, list)]
    return Log(max(tables, key=len, default=[]) or [document])


def notebook_text(cells: list[Any]) -> str:
    """Return what a Jupyter notebook's cells printed; HTML tables as Markdown's."""
    parts: list[str] = []
    for cell in _objects(cells):
        outputs = cell.get("outputs")
        for output in _objects(outputs) if isinstance(outputs, list) else ():
            data = output.get("data")
            data = data if isinstance(data, dict) else {}
            if tables := _joined(data.get("text/html")):
                parts += [_table_text(table) for table in _TABLE.findall(tables)]
            parts.append(_joined(output.get("text")) or _joined(data.get("text/plain")))
    return "\n".join(parts)


def _joined(lines: Any) -> str:
    """A notebook keeps text as one string or as a list of lines."""
    if isinstance(lines, list):
        return "".join(line for line in lines if isinstance(line, str))
    return lines if isinstance(lines, str) else ""


def _table_text(table: str) -> str:
    rows = [[_TAG.sub("", cell).strip() for cell in _CELL.findall(row)] for row in _ROW.findall(table)]
    lines = ["| " + " | ".join(row) + " |" for row in rows if row]
    return "\n".join([*lines[:1], "|---|", *lines[1:], ""])


def _objects(rows: list[Any]) -> list[Row]:
    return [row for row in rows if isinstance(row, dict)]


def _of_columns(columns: Mapping[str, list[Any]]) -> list[Row]:
    return [
        {key: column[at] for key, column in columns.items() if at < len(column)}
        for at in range(max(map(len, columns.values())))
    ]


def _positive(value: Any) -> int | None:
    """A whole number above 0, else None: save_steps may be a share of the run."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
