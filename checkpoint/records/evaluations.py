"""The evaluations of a run: which there are, and what they still need of it."""

from __future__ import annotations

from collections.abc import Iterator

from checkpoint.records import documents
from checkpoint.records.evaluated import evaluated
from checkpoint.store import layout
from checkpoint.store.errors import NotFound
from checkpoint.store.run_store import Store
from policies.model.spec import Evaluation


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
