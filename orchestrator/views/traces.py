"""Metrics of a run from whatever file they were left in, as points for `policies.detect.divergence`.

Read are a `trainer_state.json`, the log of a Trainer (a Python dictionary a line amid other text), JSON lines, our
own metrics objects among them, a JSON list of rows, and CSV. Names become TRL's. A file that is none of these, or
holds no metric of training, is refused as a whole.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint.records.metrics import NONFINITE
from policies.detect.divergence import Point

EXPECTED = "expected a trainer_state.json, a trainer's log, JSON lines of metrics, or CSV with a header"
# A row that has none of these is no row of metrics: a configuration that was printed, say.
TRAINING = frozenset(("kl", "loss", "grad_norm", "reward", "entropy", "completions/mean_length"))
STEPS = ("train/global_step", "global_step", "training/global_step", "step", "Step", "_step")  # the truest first
STEPS_MAX = 1e12  # more is no step
EPOCH, SUMMARY, TIMELINE = "epoch", "train_runtime", "timeline"  # a summary is what a Trainer logs at its end
NESTED = ("values", "data", "metrics")  # under which some writers keep a row's metrics
# As TRL names them. The right column's are those of older versions of it, of its PPO, and of verl and OpenRLHF.
ALIASES = {
    alias: name
    for name, aliases in {
        "kl": ("objective/kl", "actor/kl_loss"),
        "reward": ("objective/rlhf_reward", "objective/scores", "critic/score/mean"),
        "entropy": ("objective/entropy", "policy/entropy_avg", "actor/entropy", "actor/entropy_loss"),
        "loss": ("policy_loss", "actor/pg_loss"),
        "grad_norm": ("actor/grad_norm",),
        "learning_rate": ("actor/lr", "lr"),
        "completions/mean_length": ("completion_length", "response_length", "response_length/mean"),
        "completions/clipped_ratio": ("response_length/clip_ratio",),
        "clip_ratio/region_mean": ("clip_ratio", "actor/pg_clipfrac"),
    }.items()
    for alias in aliases
}

_ENDS = re.compile(r"[\r\n]+")  # of lines, a progress bar's too; other separators may stand in a completion
_BRACES = re.compile(r"\{[^{}]*\}")
_PAIR = re.compile(r"""['"]([^'"]+)['"]\s*:\s*(?:'([^']*)'|"([^"]*)"|([^,}]+))""")
_WRAPPED = re.compile(r"[\w.]+\(([^,()]+)[^()]*\)")  # np.float64(0.1)

Values = dict[str, float | None]


class NotATrace(Exception):
    """A file from which no metrics can be read; the message is one line and names it."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What a file says of a run. `save_steps`: how often it saved, None where the file does not say."""

    points: tuple[Point, ...]
    save_steps: int | None = None

    def logged(self, name: str) -> bool:
        """Whether the metric was ever logged."""
        return any(name in point.values for point in self.points)


def read_trace(path: Path) -> Trace:
    """Read the metrics in the file. Raises NotATrace."""
    text = _text(path)
    damage = ""
    document: Any = None
    if text.lstrip()[:1] in ("{", "["):
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            damage = f"; as JSON: {_in_words(error)}"
    said: Mapping[str, Any] = {}
    match document:
        case {"log_history": list(history)}:
            rows, said = _objects(history), document
        case list():
            rows = _objects(document)
        case dict():
            rows = _objects([document])
        case _:
            try:
                rows = list(_rows(text))
            except csv.Error as error:
                raise NotATrace(f"{path}: as CSV: {error}") from None
    points = _points(rows, _positive(said.get("logging_steps")) or 1)
    if not any(TRAINING & point.values.keys() for point in points):
        of_json = damage if path.suffix == ".json" else ""
        raise NotATrace(f"{path}: no metrics of training found{of_json}; {EXPECTED}")
    return Trace(points, _positive(said.get("save_steps")))


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise NotATrace(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    text = data.decode("utf-8-sig", errors="replace")
    if not text.strip():
        raise NotATrace(f"{path}: it is empty; {EXPECTED}")
    if "\0" in text:
        raise NotATrace(f"{path}: it is no text; {EXPECTED}")
    return text


def _in_words(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"line {error.lineno}, column {error.colno}: {error.msg}"
    return "too deep" if isinstance(error, RecursionError) else "a number too long"


def _objects(rows: Iterable[Any]) -> list[Mapping[str, Any]]:
    return [row for row in rows if isinstance(row, dict)]


def _positive(value: Any) -> int | None:
    """A whole number above 0, else None: save_steps may be a share of the run."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _rows(text: str) -> Iterator[Mapping[str, Any]]:
    """The rows of a text: of CSV, or a dictionary a line. Raises csv.Error."""
    lines = [line for line in _ENDS.split(text) if line.strip()]
    header = lines[0]
    if TRAINING & {_name(cell) for cell in header.split(",")}:
        for row in csv.DictReader(lines):
            yield {name: cell for name, cell in row.items() if name and isinstance(cell, str) and cell.strip()}
        return
    for line in lines:
        whole = _json_row(line)
        if whole is not None:
            yield whole
            continue
        for found in _BRACES.finditer(line):
            yield {name: a or b or c for name, a, b, c in _PAIR.findall(found.group())}


def _json_row(line: str) -> dict[str, Any] | None:
    if not line.lstrip().startswith("{"):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # Python's notation, or a line that was cut off
        return None
    return row if isinstance(row, dict) else None


def _points(rows: Iterable[Mapping[str, Any]], logging_steps: int) -> tuple[Point, ...]:
    """One point a step: rows of one step share it, and where no row has a step they are counted.

    Evaluation without a step belongs to the row before it. What is logged again replaces what was; a later
    timeline replaces what it abandoned.
    """
    found = [(row, values) for row in rows if (values := _values(row)) is not None]
    counted = all(_step(row) is None for row, _ in found)
    steps: dict[int, Values] = {}
    at = timeline = 0
    for row, values in found:
        step = _step(row)
        if counted and TRAINING & values.keys():
            at += logging_steps
        elif step is not None:
            at = step
        line = row.get(TIMELINE)
        if isinstance(line, int) and line > timeline:
            timeline = line
            steps = {step: kept for step, kept in steps.items() if step < at}
        steps.setdefault(at, {}).update(values)
    return tuple(Point(step, steps[step]) for step in sorted(steps))


def _values(row: Mapping[str, Any]) -> Values | None:
    """The row's metrics by TRL's names; None where it is no row of metrics."""
    if SUMMARY in row:
        return None
    values: Values = {}
    empty: Values = {}
    for key, value in next((row[name] for name in NESTED if isinstance(row.get(name), dict)), row).items():
        name = _name(key)
        if key in STEPS or name in (EPOCH, TIMELINE) or (name in values and name != key):
            continue
        if name.startswith(NONFINITE):
            values[name.removeprefix(NONFINITE)] = None
        elif value in (None, "None", "null"):
            empty[name] = None
        else:
            with suppress(ValueError, TypeError):
                values[name] = _number(value)
    if TRAINING & values.keys():  # where all is empty, as in a table with a row for everything, nothing was logged
        return {**empty, **values}
    return values if any(name.startswith("eval_") for name in values) else None


def _name(key: str) -> str:
    """TRL's name of the metric. A CSV from Weights & Biases has `RUN - train/kl`."""
    name = key.strip().strip('"').rpartition(" - ")[2].removeprefix("train/")
    if name.startswith("eval/"):
        name = f"eval_{name.removeprefix('eval/')}"
    return ALIASES.get(name, name)


def _number(value: Any) -> float | None:
    """A float, or None where it is no finite one. Raises ValueError or TypeError for a word, a list and so on."""
    if isinstance(value, str):
        wrapped = _WRAPPED.fullmatch(value.strip())
        value = float(wrapped.group(1) if wrapped else value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(value)
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _step(row: Mapping[str, Any]) -> int | None:
    for name in STEPS:
        with suppress(ValueError, TypeError):
            number = _number(row.get(name))
            if number is not None and abs(number) < STEPS_MAX:
                return int(number)
    return None
