"""TensorBoard's folder on a machine that has none of the run: the past steps, as the run's store has them.

A folder on the trainer's own disk goes with its machine. The rows in the store have all that the trainer logged,
so nothing else is kept for it: 10,000 steps of 38 metrics are 25 MB of event files, written in 13 s.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from transformers.integrations.integration_utils import rewrite_logs

from checkpoint.records.metrics import NONFINITE, OURS, Row

PART = "past.part"  # TensorBoard reads what has `tfevents` in its name


def has_events(folder: Path) -> bool:
    """Whether a trainer has reported into the folder. Each machine has a folder of its own, so it has all then."""
    return any("tfevents" in path.name for path in folder.glob("*"))


def write_past(new_writer: Callable[..., Any], rows: Iterable[Row], folder: Path) -> None:
    """Put the steps of `rows` into the folder, in one file that is there whole or not at all.

    Args:
        new_writer: makes a SummaryWriter.
    """
    with tempfile.TemporaryDirectory() as made:
        writer = new_writer(log_dir=made)
        for row in rows:
            for name, value in rewrite_logs(dict(logged(row))).items():
                writer.add_scalar(name, value, row.step, row.time_s)
        writer.close()
        folder.mkdir(parents=True, exist_ok=True)
        for path in Path(made).iterdir():
            shutil.copyfile(path, folder / PART)
            os.replace(folder / PART, folder / path.name)


def logged(row: Row) -> Iterator[tuple[str, float]]:
    """What the trainer logged of a row, by TRL's names: what we have added to it is for the run's own readers."""
    for name, value in row.values.items():
        if name.startswith(NONFINITE):
            yield name.removeprefix(NONFINITE), math.nan
        elif not name.startswith(OURS):
            yield name, value
