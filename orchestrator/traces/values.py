"""A row as a file has it, understood: its metrics under TRL's names, its step, its run."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from typing import Any

from checkpoint.records.metrics import NONFINITE
from orchestrator.traces.model import Row
from orchestrator.traces.names import EPOCH, RUNS, STEPS, SUMMARY, TIMELINE, TRAINING, metric, spelt

_NESTED = ("values", "data", "metrics")  # under which some writers keep a row's metrics
_STEP_MAX = 1e12  # more is no step
_WRAPPED = re.compile(r"[\w.]+\(([^,()]+)[^()]*\)")  # np.float64(0.1)

Values = dict[str, float | None]


def metrics(row: Row) -> Values | None:
    """Return the row's metrics, with None for a null or a number that is not finite; None for any other row."""
    if SUMMARY in row:
        return None
    values: Values = {}
    empty: Values = {}
    ranks: dict[str, int] = {}
    for key, value in _logged(row).items():
        name, rank = metric(key)
        if _is_no_metric(key, name) or ranks.get(name, rank) < rank:
            continue
        if name.startswith(NONFINITE):
            values[name.removeprefix(NONFINITE)] = math.nan
        elif value in (None, "None", "null"):
            empty[name] = None
        else:
            with suppress(ValueError, TypeError):
                values[name] = number(value)
                ranks[name] = rank
    evaluated = {name: value for name, value in values.items() if name.startswith("eval_")}
    trained = TRAINING & values.keys()
    # Some writers give a row of evaluation every column of training, as NaN.
    if trained and any(values[name] is not None for name in trained):
        return {**empty, **values}
    if any(value is not None for value in evaluated.values()):
        return evaluated
    return {**empty, **values} if trained else None


def columns(row: Row) -> dict[str, str]:
    """Return the names of the row's metrics, by the names of their columns."""
    named = {key: metric(key)[0] for key in _logged(row)}
    return {key: name for key, name in named.items() if not _is_no_metric(key, name)}


def _logged(row: Row) -> Row:
    return next((row[name] for name in _NESTED if isinstance(row.get(name), dict)), row)


def _is_no_metric(key: str, name: str) -> bool:
    return spelt(key) in STEPS or name in (EPOCH, TIMELINE, *RUNS)


def number(value: Any) -> float | None:
    """Return a float, of a list its mean; None if it is not finite. Raises ValueError or TypeError."""
    if isinstance(value, list | tuple) and value:
        numbers = [found for part in value if (found := number(part)) is not None]
        return sum(numbers) / len(numbers) if numbers else None
    if isinstance(value, str):
        wrapped = _WRAPPED.fullmatch(value.strip())
        value = float(wrapped.group(1) if wrapped else value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(value)
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def step(row: Row) -> int | None:
    """The step that the row names."""
    named = {spelt(key): value for key, value in row.items() if spelt(key) in STEPS}
    for name in STEPS:
        value = named.get(name)
        with suppress(ValueError, TypeError):
            found = number(value.partition("/")[0] if isinstance(value, str) else value)
            if found is not None and abs(found) < _STEP_MAX:
                return int(found)
    return None


def run(row: Row) -> str:
    """The run that the row names, "" for none."""
    return next((str(row[name]) for name in RUNS if row.get(name) not in (None, "")), "")
