"""The traces of the runs whose metrics a file or a folder holds, whatever wrote it.

What a file is, its content says: nobody names logs alike. Only TensorBoard's event files begin with nothing of
their own; they are known by name.
"""

from __future__ import annotations

import gzip
import re
import sys
import zlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from pathlib import Path

from orchestrator.traces import folder, trackio
from orchestrator.traces.console import read_console
from orchestrator.traces.documents import notebook_text, parse, read_document
from orchestrator.traces.events import NAME, read_events
from orchestrator.traces.model import EXPECTED, Log, NamedTrace, NotATrace, Row, Trace, Unreadable
from orchestrator.traces.runs import counts_records, runs
from orchestrator.traces.tables import is_table, read_markdown, read_table
from orchestrator.traces.values import columns

STDIN = Path("-")
COLUMNS_SHOWN = 12
WANDB_MAGIC = b":W&B"
WANDB_NEEDED = (
    "a run file of Weights & Biases, which only its own package reads: "
    "python -c \"import wandb; wandb.Api().run('ENTITY/PROJECT/RUN').history(samples=100000).to_csv('run.csv')\", "
    "or, for a run that was never online, `wandb sync` it first"
)
_GZIP = b"\x1f\x8b"
_UTF16 = (BOM_UTF16_LE, BOM_UTF16_BE)  # what PowerShell writes where a command's output goes to a file
_LINE = re.compile(r"\S[^\n\r]*")


def read_traces(path: Path) -> list[NamedTrace]:
    """Read the metrics of each run that the file, the folder, or `-` for standard input holds; at least one.

    Raises NotATrace.
    """
    try:
        log = _log_of_folder(path) if path.is_dir() else _log(path)
        found = runs(log)
        if not found:
            raise Unreadable(f"no metrics of training found{_columns_seen(log)}; {EXPECTED}")
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        raise NotATrace(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    except Unreadable as error:
        raise NotATrace(f"{path}: {error}") from None
    counted, columns = counts_records(log), _columns(log)
    return [
        NamedTrace(f"{path}#{name}" if name else str(path), Trace(points, log.save_steps, counted, columns))
        for name, points in found
    ]


def _columns(log: Log) -> dict[str, str]:
    found: dict[str, str] = {}
    for row in log.rows:
        found.update(columns(row))
    return found


def _columns_seen(log: Log) -> str:
    names = list(_columns(log))
    if not names:
        return ""
    more = f" and {len(names) - COLUMNS_SHOWN} more" if len(names) > COLUMNS_SHOWN else ""
    return f"; columns seen: {', '.join(names[:COLUMNS_SHOWN])}{more}"


def _log_of_folder(path: Path) -> Log:
    states = [_log(state) for state in folder.states(path)]
    if states:
        return max(states, key=lambda log: max((points[-1].step for _, points in runs(log)), default=0))
    rows: list[Row] = []
    file = folder.log(path)
    try:
        event_files = folder.event_files(path)
    except folder.TooMany:
        if file is None:
            raise
        event_files = {}
    for run, files in event_files.items():
        rows += [{**row, "run_name": run} for file in files for row in read_events(file)]
    if rows:
        return Log(rows)
    if file is None:
        raise Unreadable(f"no metrics of training found; {folder.EXPECTED}")
    return _log(file)


def _log(path: Path) -> Log:
    if NAME.search(path.name):
        return Log(list(read_events(path)))
    data = sys.stdin.buffer.read() if path == STDIN else path.read_bytes()
    if data.startswith(WANDB_MAGIC):
        raise Unreadable(WANDB_NEEDED)
    if data.startswith(trackio.MAGIC):
        return Log(list(trackio.read_database(path)))
    text = _text(data)
    del data  # a console's log may have hundreds of megabytes
    return _log_of_text(text, path.suffix == ".json")


def _text(data: bytes) -> str:
    if data.startswith(_GZIP):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise Unreadable(f"as gzip: {error}") from None
    text = data.decode("utf-16" if data.startswith(_UTF16) else "utf-8-sig", errors="replace")
    if not text or text.isspace():
        raise Unreadable(f"it is empty; {EXPECTED}")
    if "\0" in text:
        raise Unreadable(f"it is no text; {EXPECTED}")
    return text


def _log_of_text(text: str, named_json: bool) -> Log:
    document, damage = parse(text)
    if isinstance(document, dict) and isinstance(document.get("cells"), list):
        return _log_of_text(notebook_text(document["cells"]), named_json=False)
    if isinstance(document, (list, dict)):
        return read_document(document)
    first = _LINE.search(text)
    if first and is_table(first.group()):
        return Log(list(read_table([line for line in text.replace("\r", "\n").split("\n") if line.strip()])))
    log = Log(read_console(text))
    if not runs(log):
        log = Log(list(read_markdown(text)) or log.rows)
    if named_json and damage and not runs(log):
        raise Unreadable(f"no metrics of training found; as JSON: {damage}; {EXPECTED}")
    return log
