"""Which files of a folder hold its run's metrics."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from orchestrator.traces.events import NAME
from orchestrator.traces.model import Unreadable

STATE = "trainer_state.json"
# LLaMA-Factory's, ms-swift's, and those of Weights & Biases.
LOGS = ("trainer_log.jsonl", "logging.jsonl", "wandb-history.jsonl", "output.log")
EXPECTED = f"expected {STATE}, checkpoint-*/{STATE}, TensorBoard event files or one of {', '.join(LOGS)} in it"

# Far more than runs have beside their event files; somebody's whole disk has millions.
LOOKED_AT_MAX = 100_000

_CHECKPOINT = re.compile(r"checkpoint-(\d{1,18})")


class TooMany(Unreadable):
    """So many files that the folder is hardly that of runs; it says what was looked for."""


def states(folder: Path) -> list[Path]:
    """The state of the newest checkpoint, and that of the end of training, of which either may be the newer."""
    numbered = [
        (int(found[1]), state)
        for state in folder.glob(f"checkpoint-*/{STATE}")
        if (found := _CHECKPOINT.fullmatch(state.parent.name))
    ]
    newest = [max(numbered)[1]] if numbered else []
    return newest + [state for state in [folder / STATE] if state.is_file()]


def event_files(folder: Path) -> dict[str, Sequence[Path]]:
    """By the run's name, its folder: a folder is a run, as for TensorBoard, and its files follow one another.

    Raises TooMany.
    """
    found: dict[str, list[Path]] = {}
    for path in sorted(_event_files_below(folder)):
        found.setdefault(str(path.parent.relative_to(folder)), []).append(path)
    return dict(found)


def _event_files_below(top: Path) -> Iterator[Path]:
    looked_at, folders = 0, [top]
    for folder in folders:
        with contextlib.suppress(OSError), os.scandir(folder) as listed:  # one that may not be read, or has gone
            for entry in listed:
                looked_at += 1
                if looked_at > LOOKED_AT_MAX:
                    raise TooMany(f"more than {LOOKED_AT_MAX:,} files and folders below it; {EXPECTED}")
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry))
                elif NAME.search(entry.name) and entry.is_file():
                    yield Path(entry)


def log(folder: Path) -> Path | None:
    """The first of the logs that the folder has; a run's folder of Weights & Biases has them in `files`."""
    paths = (parent / name for name in LOGS for parent in (folder, folder / "files"))
    return next((path for path in paths if path.is_file()), None)
