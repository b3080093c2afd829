"""The evaluations of a run: their results, and which checkpoints they still need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.codec import from_json, to_json
from grpo_orch.checkpoint.store.document import Document
from grpo_orch.checkpoint.store.errors import Corrupt, NotFound
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.vocabulary import Evaluation, Precedence
from grpo_orch.policies.serving.wire import Completion

log = structlog.get_logger()

# An evaluation stores completions as they arrive, then each policy's samples and scores.

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """One policy's scores, column by column, in the order of the dataset's rows.

    Written by the evaluator after the policy's samples; its presence means that they are complete. `scores` are by
    reward function, None without a score; `weights` are the functions' weights in training; `judged_by` is the
    function that gave the `verdicts` (`policies.evaluation.judging`); `readable_by` the one that decided whether
    an answer is readable, "" if none did.
    """

    schema: int
    subject: str
    scores: dict[str, list[float | None]]
    weights: dict[str, float]
    judged_by: str
    readable_by: str
    verdicts: list[str]
    tokens: list[int]  # per completion
    cut: int  # completions cut at `grpo.max_completion_length`
    rows: str = ""  # a digest of the prompts, the same for all policies of an evaluation


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """One scored completion: a line of a policy's samples."""

    row: int  # of the dataset, from 0
    prompt: Any  # a text or chat messages
    completion: Any
    scores: dict[str, float | None]
    verdict: str
    tokens: int


def evaluated(subject: str) -> Document[EvaluationResult]:
    """Return the document with a policy's scores, which exists once all are complete."""
    return Document(layout.evaluated(subject), EvaluationResult)


def write_samples(store: Store, subject: str, samples: Sequence[ScoredSample]) -> None:
    store.put(layout.evaluated_samples(subject), b"".join(to_json(sample) + b"\n" for sample in samples))


def store_completions(
    store: Store, digest: str, by: Precedence, number: int, completions: Sequence[Completion]
) -> None:
    """Store part `number` of the completions of a batch, as the evaluator `by`."""
    store.put(layout.kept_part(digest, by, number, len(completions)), to_json(list(completions)))


def read_completions(store: Store, digest: str) -> dict[int, Completion]:
    """Return the completions of that batch stored by any evaluator, by the request's index."""
    found: dict[int, Completion] = {}
    for entry in store.entries(layout.kept(digest)):
        try:
            part = from_json(store.get(entry.key), list[Completion], entry.key)
        except Corrupt as error:  # a torn part: its completions are generated again
            log.warning("completions_unreadable", key=entry.key, error=str(error))
            continue
        for completion in part:
            found.setdefault(completion.index, completion)
    return found


def count_completions(store: Store) -> int:
    """Return how many completions of unfinished batches are stored."""
    count = 0
    for entry in store.entries(layout.kept("").rstrip("/")):
        with contextlib.suppress(ValueError):
            count += layout.kept_in(entry.key)
    return count


def delete_completions(store: Store) -> None:
    """Delete the stored parts, whose completions the samples hold."""
    store.delete([entry.key for entry in store.entries(layout.kept("").rstrip("/"))])


def evaluations_of(parent: Store) -> Iterator[tuple[Store, Evaluation]]:
    """Yield each evaluation of a run with its store. Raises Corrupt, StoreError."""
    for folder in parent.folders(layout.EVALUATIONS):
        store = Store(f"{parent.url}/{folder}", retry_s=parent.retry_s, options=parent.options)
        try:
            evaluation = documents.read_run(store).evaluation
        except NotFound:  # not started, or deleted
            continue
        if evaluation is not None:
            yield store, evaluation


def still_needed(parent: Store) -> set[str]:
    """Return the checkpoints that are pinned for evaluations and not yet scored. Raises Corrupt, StoreError."""
    return {
        subject.name
        for store, evaluation in evaluations_of(parent)
        for subject in evaluation.subjects
        if subject.pinned and evaluated(subject.name).read(store) is None
    }
