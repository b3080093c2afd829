"""The evaluations of a run: their results, and which checkpoints they still need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.codec import to_json
from grpo_orch.checkpoint.store.document import Document
from grpo_orch.checkpoint.store.errors import NotFound
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.vocabulary import Evaluation

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """One policy's scores, column by column, in the order of the dataset's rows.

    Written by the evaluator after the policy's samples; its presence means that they are complete. `scores` are by
    reward function, None without a score; `judged_by` is the function that gave the `verdicts`
    (`policies.evaluation.judging`); `readable_by` the one that decided whether an answer is readable, "" if none
    did.
    """

    schema: int
    subject: str
    scores: dict[str, list[float | None]]
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
    """Return the checkpoints that evaluations without all of their results have pinned.

    Raises Corrupt, StoreError.
    """
    return {
        subject.name
        for store, evaluation in evaluations_of(parent)
        if any(evaluated(subject.name).read(store) is None for subject in evaluation.subjects)
        for subject in evaluation.subjects
        if subject.pinned
    }
