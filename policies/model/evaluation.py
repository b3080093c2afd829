"""What an evaluation is of: the policies of another run. `run.json` of an evaluation's own run holds it."""

from __future__ import annotations

from dataclasses import dataclass

BASE = "base"  # the name of the model that training began from, among checkpoints


@dataclass(frozen=True, slots=True)
class Subject:
    """One policy. `name` is BASE, or a checkpoint's PolicyVersion as text.

    Of a checkpoint `manifest` and `digest` are what the run's catalog said when the evaluation was begun: nothing
    else is evaluated in its place. `pinned`: by the evaluation, which unpins it.
    """

    name: str
    manifest: str = ""
    digest: str = ""
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Which policies of the run at the store URL `of`; of the dataset the first `rows`, None: all."""

    of: str
    subjects: tuple[Subject, ...]
    rows: int | None = None
