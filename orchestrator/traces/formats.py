"""Readers for the formats in which trainers log metrics. They return rows with the file's own names.

In this order: console text and its progress bars, tables, JSON documents, TensorBoard's event files. `read`
selects the format of a file; `names` translates the names.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from grpo_orch.orchestrator.traces.names import STEPS, TRAINING, Row, metric, metrics, normalize, step


class NotATrace(Exception):
    """No metrics can be read from the file. The message is one line, to print after the file's name."""


@dataclass(frozen=True, slots=True)
class Log:
    """A file's rows, in its order."""

    rows: Sequence[Row]
    save_steps: int | None = None


# Console text: rows among other text, with colours, progress bars and process names. Rows are
# - JSON objects, as a whole line or within a line;
# - dictionaries as Python prints them: TRL's, or OpenRLHF's and slime's after `step 5:`;
# - lines of names and values that include the step, separated by `:` or `=`:
#   `step:5 - actor/kl_loss:0.1` (verl), `Step 5 | Loss: 0.1` (prime-rl) and, in custom loops,
#   `step=5 reward=0.1`, `[Step 5/900] reward=0.1`, `Step: 5/900, KL: 0.1`.
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Line prefixes of Ray, `(TaskRunner pid=7, ip=10.0.0.1) `, and of torchrun, `[rank0]:` and `[default0]:`.
_PROCESS = re.compile(r"^(?:\([^()\n]*\bpid=\d+[^()\n]*\)|\[(?:rank|default)?\d+\]:) ?", re.MULTILINE)
_BAR = r"(?:(?<=[\n\r\]}])|\A)[ ]*\d+%\|[^|\n\r]*\|[ ]*(?P<done>\d+)/(?P<total>\d+)[ ]\["
_BRACES = r"(?:\bstep[ :=]*(?P<before>\d+)(?:/\d+)?:?[ ]*)?(?P<braces>\{[^{}]*\})"
_NAMED = r"\bstep(?:[: ]|: )(?P<at>\d+)(?:/\d+)?(?: [-|] |, |\] )(?P<named>[^\n\r]+)"
_EQUAL = r"(?P<equal>\b(?:\w+_)?step=\d)[^\n\r{}]*"
_PARTS = re.compile(f"{_BAR}|{_BRACES}|{_NAMED}|{_EQUAL}", re.IGNORECASE)
_IN_BRACES = re.compile(r"""['"]([^'"]+)['"]\s*:\s*(?:'([^']*)'|"([^"]*)"|([^,}]+))""")
_BETWEEN = re.compile(r" [-|] |[,;] ")
_EQUAL_PAIR = re.compile(r"([\w./@-]+)=([^\s,;|=]+)")


@dataclass(frozen=True, slots=True)
class Bar:
    """A printed progress bar."""

    done: int
    total: int


def read_console(text: str) -> list[Row]:
    """Return the rows in the text; if none has a step, take the steps of the progress bars next to them."""
    return _number_rows(list(_parts(_PROCESS.sub("", _COLOURS.sub("", text)))))


def _parts(text: str) -> Iterator[Row | Bar]:
    """Yield rows and bars in order. Only \\n and \\r end lines: completions may contain other separators."""
    begin = 0
    for line in re.finditer(r"^[ \t]*\{[^\n\r]*", text, re.MULTILINE):
        row = _json_object(line.group())
        if row is not None:
            yield from _parts_of_prose(text[begin : line.start()])
            yield row
            begin = line.end()
    yield from _parts_of_prose(text[begin:])


def _json_object(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # Python's notation, or a line that was cut off
        return None
    return row if isinstance(row, dict) else None


def _parts_of_prose(text: str) -> Iterator[Row | Bar]:
    begin = 0
    for part in _PARTS.finditer(text):
        if part["done"]:
            yield Bar(_digits(part["done"]), _digits(part["total"]))
        elif part["braces"]:
            # A terminal wraps lines anywhere, also within names and numbers.
            inside = part["braces"].replace("\n", "").replace("\r", "")
            row = {name: a or b or c for name, a, b, c in _IN_BRACES.findall(inside)}
            yield {"step": part["before"], **row} if part["before"] else row
        else:  # names may also precede the step
            ended = (text.rfind(end, begin, part.start()) + 1 for end in "\n\r")
            row = dict(_EQUAL_PAIR.findall(text[max(begin, *ended) : part.end()]))
            if part["named"]:
                pairs = (pair.rpartition(":") for pair in _BETWEEN.split(part["named"]))
                named = {name.strip(): value.strip() for name, _, value in pairs if name and "=" not in name}
                row = {"step": part["at"], **named, **row}
            yield row
        begin = part.end()


def _digits(text: str) -> int:
    return int(text[:18])


# Steps from progress bars. A Trainer prints a dictionary every `logging_steps` steps and redraws its bar below it.
# If both go to the same log, the bar's `50/1875` is the row's step. But the bar before a row may lag by a tenth of
# a second, the bar after it may show the next step, and bars of evaluations and reward functions may be in
# between. So try all of these, and choose the one that gives the most rows a distinct step at the most even
# distance.
_BARS_TRIED = 3  # the most frequent bars, identified by their totals


def _number_rows(parts: Sequence[Row | Bar]) -> list[Row]:
    """Return the rows. If no row of training has a step, take the steps from the bars if possible."""
    rows = [part for part in parts if not isinstance(part, Bar)]
    trained = [bool(TRAINING & (metrics(row) or {}).keys()) for row in rows]
    totals = Counter(part.total for part in parts if isinstance(part, Bar))
    numbered = any(step(row) is not None for row, is_trained in zip(rows, trained, strict=True) if is_trained)
    if not totals or not any(trained) or numbered:
        return rows
    best: list[int] = []
    for total in (None, *(total for total, _ in totals.most_common(_BARS_TRIED))):
        before, after = _steps_shown(parts, trained, total)
        best = max(best, before, after, key=_fits)
    if _fits(best)[0] * 2 <= len(best):  # a log written in blocks, far from its bars
        best = _evenly(parts, len(best))
    if not best:
        return rows
    steps = iter(best)
    return [
        {**row, "step": next(steps)} if is_trained else row for row, is_trained in zip(rows, trained, strict=True)
    ]


def _steps_shown(
    parts: Sequence[Row | Bar], trained: Sequence[bool], total: int | None
) -> tuple[list[int], list[int]]:
    """Return the step shown before and after each row of training by the bar of this total, None for any bar."""
    before: list[int] = []
    after: list[int] = []
    shown, kinds = 0, iter(trained)
    for part in parts:
        if isinstance(part, Bar):
            if total in (None, part.total):
                shown = part.done
                after += [shown] * (len(before) - len(after))
        elif next(kinds):
            before.append(shown)
    return before, after + before[len(after) :]


def _evenly(parts: Sequence[Row | Bar], rows: int) -> list[int]:
    """Return evenly spaced steps up to the last step of the bars if their distance is an integer; else []."""
    done = max(part.done for part in parts if isinstance(part, Bar))
    every = done // rows
    return [every * (at + 1) for at in range(rows)] if every and done - every * rows < every else []


def _fits(steps: Sequence[int]) -> tuple[int, int]:
    """Return how many rows have a higher step than the previous row, and the common divisor of these rises."""
    rises = [later - earlier for earlier, later in pairwise((0, *steps)) if later > earlier]
    return len(rises), math.gcd(*rises)


# Tables: CSV, also with tabs, as copied from a notebook.
# Weights & Biases exports a chart with a column for each run and metric, `RUN - train/kl`, and columns with the
# extremes of merged points, `RUN - train/kl__MIN` and `__MAX`, which are ignored.
_EXTREMES = ("__MIN", "__MAX")
_OF_RUN = " - "


def is_table(header: str) -> bool:
    """Return whether the line is a header with at least one training metric."""
    names = header.split(_separator(header))
    return any(metric(name.rpartition(_OF_RUN)[2])[0] in TRAINING for name in names)


def read_table(lines: Sequence[str]) -> Iterator[Row]:
    """Yield the rows below the header, the first line; for an export, a row for each run. Raises NotATrace."""
    table = csv.reader(lines, delimiter=_separator(lines[0]))
    try:
        header = next(table, [])
        for row in table:
            cells = zip(header, row, strict=False)
            yield from _by_run({name: cell for name, cell in cells if name and cell.strip()})
    except csv.Error as error:
        raise NotATrace(f"as CSV: {error}") from None


def _separator(header: str) -> str:
    return "\t" if "\t" in header else ","


def _by_run(cells: Mapping[str, str]) -> list[Row]:
    shared: dict[str, str] = {}
    by_run: dict[str, dict[str, str]] = defaultdict(dict)
    for column, cell in cells.items():
        run, dash, name = column.rpartition(_OF_RUN)
        if column.endswith(_EXTREMES):
            continue
        if dash and (metric(name)[0] != name or name in TRAINING or normalize(name) in STEPS or "/" in name):
            by_run[run][name] = cell
        else:
            shared[column] = cell
    return [{**shared, **own, "run_name": run} for run, own in by_run.items()] or [shared]


# JSON documents: a `trainer_state.json`, a list of rows, or a single row.


def parse_json(text: str) -> tuple[Any, str]:
    """Return the parsed document, or None and the error; the error is empty for text that is not JSON."""
    if text.lstrip()[:1] not in ("{", "["):
        return None, ""
    try:
        return json.loads(text), ""
    except json.JSONDecodeError as error:
        return None, f"line {error.lineno}, column {error.colno}: {error.msg}"
    except RecursionError:
        return None, "nested too deeply"
    except ValueError:
        return None, "a number is too long"


def read_document(document: list[Any] | dict[str, Any]) -> Log:
    """Return the rows of a document."""
    if isinstance(document, list):
        return Log(_objects(document))
    history = document.get("log_history")
    if isinstance(history, list):
        return Log(_objects(history), _positive(document.get("save_steps")))
    return Log([document])


def _objects(rows: list[Any]) -> list[Row]:
    return [row for row in rows if isinstance(row, dict)]


def _positive(value: Any) -> int | None:
    """Return a positive integer, else None, because save_steps may be a fraction of the run."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


# TensorBoard's event files need its package, which is optional because of its 50 MB.
EVENT_FILE = re.compile(r"\.tfevents\.")
TENSORBOARD_NEEDED = "a TensorBoard event file, which needs: pip install tensorboard"


def read_events(path: Path) -> Iterator[Row]:
    """Yield a row for each event with scalars, in the file's order. Raises NotATrace.

    Like TensorBoard, ignore everything after damage.
    """
    try:
        from google.protobuf.message import DecodeError
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError:
        raise NotATrace(TENSORBOARD_NEEDED) from None
    try:
        for event in LegacyEventFileLoader(str(path)).Load():
            row: dict[str, float] = {}
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    row[value.tag] = value.simple_value
                elif value.HasField("tensor"):
                    scalar = make_ndarray(value.tensor)
                    if scalar.size == 1 and scalar.dtype.kind == "f":
                        row[value.tag] = scalar.item()
            if row:
                yield {"step": event.step, **row}
    except OSError as error:
        raise NotATrace(error.strerror or str(error)) from None
    except (DecodeError, TypeError, ValueError) as error:
        raise NotATrace(f"as a TensorBoard event file: {' '.join(str(error).split())}") from None
