"""trackio's database, with the tables of its several versions."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from orchestrator.traces.read import NotATrace, read_traces

COLUMNS = {
    "first": "id INTEGER, timestamp TEXT, project_name TEXT, run_name TEXT, step INTEGER, metrics TEXT",
    "later": "id INTEGER, timestamp TEXT, run_name TEXT, step INTEGER, metrics TEXT",
}


def write(path: Path, columns: str, runs: dict[str, int], *, as_bytes: bool = False) -> None:
    """trackio counts its own steps; a Trainer logs its step beside them, and strings for what is no number."""
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute(f"CREATE TABLE metrics ({columns})")
        for run, count in runs.items():
            for at in range(count):
                logged = {
                    "train/kl": at / 8 if at else "NaN",
                    "train/reward": 0.5,
                    "train/global_step": 10 * at + 10,
                }
                text = json.dumps(logged)
                database.execute(
                    "INSERT INTO metrics (timestamp, run_name, step, metrics) VALUES (?, ?, ?, ?)",
                    ("2026-01-01T00:00:00", run, at, text.encode() if as_bytes else text),
                )
        database.commit()


@pytest.mark.parametrize("version", COLUMNS)
@pytest.mark.parametrize("as_bytes", [False, True])
def test_every_run_of_the_database_is_a_trace(version: str, as_bytes: bool, tmp_path: Path) -> None:
    path = tmp_path / "my project #1.db"
    write(path, COLUMNS[version], {"first": 3, "second": 5}, as_bytes=as_bytes)
    first, second = read_traces(path)
    assert (first.name, second.name) == (f"{path}#first", f"{path}#second")
    assert [point.step for point in first.trace.points] == [10, 20, 30]
    assert [point.values for point in second.trace.points[:2]] == [
        {"kl": None, "reward": 0.5},
        {"kl": 0.125, "reward": 0.5},
    ]


def test_another_database_is_refused_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE people (name TEXT)")
    with pytest.raises(NotATrace, match=r"other\.db: as a trackio database: no such table: metrics"):
        read_traces(path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(NotATrace, match=r"other\.db: as a trackio database: "):
        read_traces(path)
