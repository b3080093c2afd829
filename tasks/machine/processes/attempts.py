"""The attempts of a node's work on one machine: one at a time, under a lock, and the newest on record."""

from __future__ import annotations

import fcntl
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from checkpoint.store.codec import from_json, to_json
from policies.model.node_contract import MACHINE


@dataclass(frozen=True, slots=True)
class Started:
    """The newest attempt that was started here, by process `pid`. `exit_code` is None until its end was seen;
    `reason` is the work's own last line."""

    attempt: int
    exit_code: int | None = None
    pid: int = 0
    reason: str = ""


def take(lock: TextIO) -> bool:
    """Take the lock, which lasts as long as the file is open. Returns False where another process has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def started(folder: Path) -> Started:
    """What is on record; attempt 0 before the first."""
    path = folder / MACHINE
    return from_json(path.read_bytes(), Started, str(path)) if path.exists() else Started(0)


def record(folder: Path, newest: Started) -> None:
    """Put it on record, whole or not at all."""
    part = folder / "machine.part"
    part.write_bytes(to_json(newest))
    part.replace(folder / MACHINE)
