"""The evaluations of a run: which there are, and what they still need of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from checkpoint.records import documents
from checkpoint.store import layout
from checkpoint.store.codec import from_json, to_json
from checkpoint.store.document import Document
from checkpoint.store.errors import Corrupt, NotFound
from checkpoint.store.run_store import Store
from policies.model.vocabulary import Evaluation, Precedence
from policies.serving.wire import Completion

log = structlog.get_logger()

# What an evaluation leaves in the store: completions as they come, then each policy's samples and scores.

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One policy's scores, column by column, in the order of the dataset's rows.

    `scores` are by reward function, None where it gave none; `weights` what each counts in training; `judged_by`
    is the function that `verdicts` (`policies.evaluation.judging`) are from, `readable_by` who told whether an
    answer could be read: "" nobody.
    """

    schema: int
    subject: str
    scores: dict[str, list[float | None]]
    weights: dict[str, float]
    judged_by: str
    readable_by: str
    verdicts: list[str]
    tokens: list[int]  # of each completion
    cut: int  # completions that had not ended at `grpo.max_completion_length`
    rows: str = ""  # a digest of the prompts, which are the same for all policies of an evaluation


@dataclass(frozen=True, slots=True)
class Scored:
    """One line of the samples."""

    row: int  # of the dataset, from 0
    prompt: Any  # a text, or a chat's messages
    completion: Any
    scores: dict[str, float | None]
    verdict: str
    tokens: int


def evaluated(subject: str) -> Document[Evaluated]:
    """A policy's scores; there once all of it is done."""
    return Document(layout.evaluated(subject), Evaluated)


def write_samples(store: Store, subject: str, samples: Sequence[Scored]) -> None:
    store.put(layout.samples(subject), b"".join(to_json(one) + b"\n" for one in samples))


def keep(store: Store, digest: str, by: Precedence, number: int, completions: Sequence[Completion]) -> None:
    """Store part `number` of what has come of the batch of that digest, as the evaluator `by`."""
    store.put(layout.kept_part(digest, by, number, len(completions)), to_json(list(completions)))


def kept(store: Store, digest: str) -> dict[int, Completion]:
    """What any evaluator has stored of that batch, by the request's index."""
    found: dict[int, Completion] = {}
    for entry in store.entries(layout.kept(digest)):
        try:
            part = from_json(store.get(entry.key), list[Completion], entry.key)
        except Corrupt as error:  # a torn one: its completions are made again
            log.warning("completions_unreadable", key=entry.key, error=str(error))
            continue
        for one in part:
            found.setdefault(one.index, one)
    return found


def count_kept(store: Store) -> int:
    """How many completions are stored of what is under way."""
    count = 0
    for entry in store.entries(layout.kept("").rstrip("/")):
        with contextlib.suppress(ValueError):
            count += layout.kept_in(entry.key)
    return count


def drop_kept(store: Store) -> None:
    """Forget the parts: all that they hold is in the samples."""
    store.delete([entry.key for entry in store.entries(layout.kept("").rstrip("/"))])


def of_run(parent: Store) -> Iterator[tuple[Store, Evaluation]]:
    """Each with its own store. Raises Corrupt, StoreError."""
    for folder in parent.folders(layout.EVALUATIONS):
        store = Store(f"{parent.url}/{folder}", retry_s=parent.retry_s, options=parent.options)
        try:
            evaluation = documents.read_run(store).evaluation
        except NotFound:  # not begun, or deleted
            continue
        if evaluation is not None:
            yield store, evaluation


def still_needed(parent: Store) -> set[str]:
    """The checkpoints that are pinned for an evaluation which has no scores of them yet. Raises Corrupt,
    StoreError."""
    return {
        subject.name
        for store, evaluation in of_run(parent)
        for subject in evaluation.subjects
        if subject.pinned and evaluated(subject.name).read(store) is None
    }
