"""Read the traces of runs from a trainer's log, file or folder, in any supported format.

The format is recognized by content, because logs have no common names; only TensorBoard's event files, which have
no signature, by name. In this order: the public types, files, folders, and how rows become points of runs.
"""

from __future__ import annotations

import gzip
import re
import sys
import zlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from grpo_orch.orchestrator.traces import names
from grpo_orch.orchestrator.traces.formats import (
    EVENT_FILE,
    Log,
    NotATrace,
    is_table,
    parse_json,
    read_console,
    read_document,
    read_events,
    read_table,
)
from grpo_orch.orchestrator.traces.names import TIMELINE, TRAINING, Row, Values
from grpo_orch.policies.detect.divergence import Point

EXPECTED = (
    "expected a trainer's log, trainer_state.json, JSON lines, CSV with a header, or a TensorBoard event file"
)
STDIN = Path("-")
COLUMNS_SHOWN = 12
WANDB_MAGIC = b":W&B"
WANDB_NEEDED = (
    "a run file of Weights & Biases, which only its own package can read; export it with "
    "python -c \"import wandb; wandb.Api().run('ENTITY/PROJECT/RUN').history(samples=100000).to_csv('run.csv')\", "
    "after `wandb sync` if the run was offline"
)
_GZIP = b"\x1f\x8b"
_UTF16 = (BOM_UTF16_LE, BOM_UTF16_BE)  # PowerShell redirects output as UTF-16
_LINE = re.compile(r"\S[^\n\r]*")


@dataclass(frozen=True, slots=True)
class Trace:
    """The metrics of a run in a file.

    Attributes:
        points: the metrics by step.
        run: its name or number if the file holds several runs.
        save_steps: steps between checkpoints; None if the file does not record it.
        counts_records: no step was logged, and points are numbered by their records.
        columns: the metrics' names by the file's columns.
    """

    points: tuple[Point, ...]
    run: str = ""
    save_steps: int | None = None
    counts_records: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)


def read_traces(path: Path) -> list[Trace]:
    """Read the metrics of each run in the file, the folder, or `-` for standard input; at least one run.

    Raises NotATrace.
    """
    try:
        log = _log_of_folder(path) if path.is_dir() else _log(path)
        found = runs(log)
        if not found:
            raise NotATrace(f"no metrics of training found{_columns_seen(log)}; {EXPECTED}")
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        raise NotATrace(getattr(error, "strerror", None) or str(error)) from None
    counts_records, columns = _counts_records(log), _columns(log)
    return [Trace(points, run, log.save_steps, counts_records, columns) for run, points in found]


def _columns(log: Log) -> dict[str, str]:
    found: dict[str, str] = {}
    for row in log.rows:
        found.update(names.columns(row))
    return found


def _columns_seen(log: Log) -> str:
    seen = list(_columns(log))
    if not seen:
        return ""
    more = f" and {len(seen) - COLUMNS_SHOWN} more" if len(seen) > COLUMNS_SHOWN else ""
    return f"; columns seen: {', '.join(seen[:COLUMNS_SHOWN])}{more}"


def _log(path: Path) -> Log:
    if EVENT_FILE.search(path.name):
        return Log(list(read_events(path)))
    data = sys.stdin.buffer.read() if path == STDIN else path.read_bytes()
    if data.startswith(WANDB_MAGIC):
        raise NotATrace(WANDB_NEEDED)
    return _log_of_text(_text(data), path.suffix == ".json")


def _text(data: bytes) -> str:
    if data.startswith(_GZIP):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise NotATrace(f"as gzip: {error}") from None
    text = data.decode("utf-16" if data.startswith(_UTF16) else "utf-8-sig", errors="replace")
    if not text or text.isspace():
        raise NotATrace(f"the file is empty; {EXPECTED}")
    if "\0" in text:
        raise NotATrace(f"the file is not text; {EXPECTED}")
    return text


def _log_of_text(text: str, named_json: bool) -> Log:
    document, damage = parse_json(text)
    if isinstance(document, (list, dict)):
        return read_document(document)
    first = _LINE.search(text)
    if first and is_table(first.group()):
        return Log(list(read_table([line for line in text.replace("\r", "\n").split("\n") if line.strip()])))
    log = Log(read_console(text))
    if named_json and damage and not runs(log):
        raise NotATrace(f"no metrics of training found; as JSON: {damage}; {EXPECTED}")
    return log


# Folders: find the files that hold the metrics of a run.
STATE = "trainer_state.json"
# Of LLaMA-Factory, ms-swift, and Weights & Biases.
LOGS = ("trainer_log.jsonl", "logging.jsonl", "wandb-history.jsonl", "output.log")
EXPECTED_IN_FOLDER = (
    f"expected {STATE}, checkpoint-*/{STATE}, TensorBoard event files or one of {', '.join(LOGS)} in it"
)
_CHECKPOINT = re.compile(r"checkpoint-(\d{1,18})")


def _log_of_folder(path: Path) -> Log:
    states = [_log(state) for state in _states(path)]
    if states:
        return max(states, key=lambda log: max((points[-1].step for _, points in runs(log)), default=0))
    rows: list[Row] = []
    for file in sorted(path.rglob("*.tfevents.*")):  # as in TensorBoard, a folder is a run
        run = str(file.parent.relative_to(path))
        rows += [{**row, "run_name": run} for row in read_events(file)]
    if rows:
        return Log(rows)
    if (log := _known_log(path)) is None:
        raise NotATrace(f"no metrics of training found; {EXPECTED_IN_FOLDER}")
    return _log(log)


def _states(folder: Path) -> list[Path]:
    """Return the state files of the newest checkpoint and of the end of training; either may be newer."""
    numbered = [
        (int(found[1]), state)
        for state in folder.glob(f"checkpoint-*/{STATE}")
        if (found := _CHECKPOINT.fullmatch(state.parent.name))
    ]
    newest = [max(numbered)[1]] if numbered else []
    return newest + [state for state in [folder / STATE] if state.is_file()]


def _known_log(folder: Path) -> Path | None:
    """Return the first known log that exists; Weights & Biases keeps them in the subfolder `files`."""
    paths = (parent / name for name in LOGS for parent in (folder, folder / "files"))
    return next((path for path in paths if path.is_file()), None)


# Runs: rows become points, one per step, and are split by run. If the file does not name its runs, a metric whose
# step decreases indicates a restart. If the step falls to the first logged step or below, a new run begins.
# Otherwise the same run has resumed from a checkpoint, and its new rows replace all from that step on, as after a
# rollback. A start that failed within its first logged steps does not count as a run.
RUN_STEPS_MIN = 3  # logged steps; with fewer it is a failed start


@dataclass(slots=True)
class _Run:
    steps: dict[int, Values] = field(default_factory=dict)
    first: int | None = None  # the first logged step
    last: dict[str, int] = field(default_factory=dict)  # the last logged step by metric
    timeline: int = 0

    def falls_back(self, step: int, metrics: Iterable[str]) -> bool:
        """Return whether a metric's step falls back to a step that already has it, or to the first or below."""
        back = [name for name in metrics if self.last.get(name, step) > step]
        return any(name in self.steps.get(step, {}) for name in back) or bool(back and self.starts_over(step))

    def starts_over(self, step: int) -> bool:
        return self.first is not None and step <= self.first

    def truncate(self, step: int) -> None:
        """Drop the values from this step on."""
        self.steps = {at: values for at, values in self.steps.items() if at < step}
        self.last = {name: min(last, step - 1) for name, last in self.last.items()}

    def add(self, step: int, values: Values) -> None:
        self.steps.setdefault(step, {}).update(values)
        trained = TRAINING & values.keys()
        if trained and self.first is None:
            self.first = step
        self.last.update(dict.fromkeys(trained, step))

    @property
    def points(self) -> tuple[Point, ...]:
        return tuple(Point(step, self.steps[step]) for step in sorted(self.steps))


def _counts_records(log: Log) -> bool:
    """Return whether no row has a step, so that points are numbered by their records."""
    return all(names.step(row) is None for row in log.rows if names.metrics(row) is not None)


def runs(log: Log) -> list[tuple[str, tuple[Point, ...]]]:
    """Return names and points of the log's runs that have a training metric.

    A single run has the name ""; several have the names in the file, or numbers from 1.
    """
    by_name: dict[str, list[Row]] = defaultdict(list)
    for row in log.rows:
        by_name[names.run(row)].append(row)
    found: list[tuple[str, tuple[Point, ...]]] = []
    for name, rows in by_name.items():
        of_name = [run.points for run in _runs(rows) if run.first is not None]
        for at, points in enumerate(of_name, start=1):
            number = str(at) if len(of_name) > 1 else ""
            found.append(("#".join(filter(None, (name, number))), points))
    return found if len(found) > 1 else [("", points) for _, points in found]


def _runs(rows: Iterable[Row]) -> list[_Run]:
    """Split rows into runs, merging the rows of a step; number rows if none has a step.

    A row of evaluation without a step belongs to the row before it.
    """
    found = [(row, values) for row in rows if (values := names.metrics(row)) is not None]
    counts_records = all(names.step(row) is None for row, _ in found)
    result = [_Run()]
    at = 0
    for row, values in found:
        run, step, timeline = result[-1], names.step(row), row.get(TIMELINE)
        if counts_records and TRAINING & values.keys():
            at += 1
        elif step is not None:
            at = step
        if isinstance(timeline, int):
            if timeline > run.timeline:
                run.timeline = timeline
                run.truncate(at)
        elif run.falls_back(at, TRAINING & values.keys()):
            if run.starts_over(at) and len(run.steps) >= RUN_STEPS_MIN:
                result.append(run := _Run())
            else:
                run.truncate(at)
        run.add(at, values)
    return result
