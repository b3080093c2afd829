"""What the first of a machine's trainer processes has restored, told to the others: one download for all of them.

By a file, not by a collective: fetching may take longer than any collective waits, and it comes before the others
have a process group.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from checkpoint.store.codec import from_json, to_json
from policies.model.vocabulary import PolicyVersion
from tasks.machine.leaving import LeaveNow, Leaving

NOTE = "restored-{attempt}-{launcher}.json"  # of one start: a machine may be started with an attempt again
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint on this machine. `base_model` is its copy of the model that training began from; None where it
    has none, or this machine has the same."""

    at: PolicyVersion
    folder: Path
    base_model: Path | None


@dataclass(frozen=True, slots=True)
class _Note:
    at: str | None = None
    folder: str = ""
    base_model: str | None = None


def told_by_first(
    workdir: Path, attempt: int, restore: Callable[[], Restored | None] | None, leaving: Leaving
) -> Restored | None:
    """Restore and tell the others, in the first process; wait to be told, in the others.

    Args:
        restore: of the first process; None in the others.

    Raises LeaveNow in a process that is told to end while it waits, and what `restore` raises.
    """
    note = workdir / NOTE.format(attempt=attempt, launcher=os.getppid())
    if restore is not None:
        for older in workdir.glob(NOTE.format(attempt="*", launcher="*")):
            older.unlink()
        found = restore()
        part = note.with_suffix(".part")
        part.write_bytes(to_json(_noted(found)))
        part.rename(note)
        return found
    while not note.exists():
        if leaving.asked:  # as where the first one has failed: the launcher ends all
            raise LeaveNow
        time.sleep(LOOK_S)
    told = from_json(note.read_bytes(), _Note, str(note))
    base_model = None if told.base_model is None else Path(told.base_model)
    return None if told.at is None else Restored(PolicyVersion.parse(told.at), Path(told.folder), base_model)


def _noted(found: Restored | None) -> _Note:
    if found is None:
        return _Note()
    return _Note(str(found.at), str(found.folder), None if found.base_model is None else str(found.base_model))
