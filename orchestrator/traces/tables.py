"""CSV, or the same with tabs, as a notebook's table is copied; Markdown's tables, as it is pasted into an issue;
and what Weights & Biases exports from a chart.

Such an export has a column for each run and metric, `RUN - train/kl`, and beside it the least and the greatest of
the points that the chart drew as one, `RUN - train/kl__MIN` and `__MAX`. Those are not the metric.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from orchestrator.traces.model import Row, Unreadable
from orchestrator.traces.names import STEPS, TRAINING, metric, spelt

_BOUNDS = ("__MIN", "__MAX")
_OF_RUN = " - "


def is_table(header: str) -> bool:
    """Whether the line names columns of which one is a metric of training."""
    return any(metric(cell.rpartition(_OF_RUN)[2])[0] in TRAINING for cell in header.split(_separator(header)))


def read_table(lines: Sequence[str]) -> Iterator[Row]:
    """The rows below the header, the first line; a row for each run of an export. Raises Unreadable."""
    try:
        for row in csv.DictReader(lines, delimiter=_separator(lines[0])):
            cells = {name: cell for name, cell in row.items() if name and isinstance(cell, str) and cell.strip()}
            yield from _by_run(cells)
    except csv.Error as error:
        raise Unreadable(f"as CSV: {error}") from None


def read_markdown(text: str) -> Iterator[Row]:
    """The rows of the tables of metrics amid the text."""
    columns: list[str] = []
    above = ""
    for line in text.splitlines():
        if _is_ruler(line) and any(metric(cell)[0] in TRAINING for cell in _cells(above)):
            columns = _cells(above)
        elif "|" not in line:
            columns = []
        elif columns:
            yield _filled(zip(columns, _cells(line), strict=False))
        above = line


def _is_ruler(line: str) -> bool:
    """Whether it is the line of dashes between a table's header and its rows."""
    return "-" in line and "|" in line and set(line) <= set("|:- \t")


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]


def _filled(cells: Iterable[tuple[str, str]]) -> dict[str, str]:
    return {name: cell for name, cell in cells if cell}


def _separator(header: str) -> str:
    return "\t" if "\t" in header else ","


def _by_run(cells: dict[str, str]) -> Iterator[Row]:
    shared: dict[str, str] = {}
    of_run: dict[str, dict[str, str]] = defaultdict(dict)
    for column, cell in cells.items():
        run, dash, name = column.rpartition(_OF_RUN)
        if column.endswith(_BOUNDS):
            continue
        if dash and (metric(name)[0] != name or name in TRAINING or spelt(name) in STEPS or "/" in name):
            of_run[run][name] = cell
        else:
            shared[column] = cell
    if not of_run:
        yield shared
    for run, own in of_run.items():
        yield {**shared, **own, "run_name": run}
