"""Evaluated checkpoints are kept from their run's retention until they are evaluated."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace

from checkpoint.journal import journal
from checkpoint.records import evaluations
from checkpoint.store.run_store import Store
from checkpoint.stream.catalog import Catalog
from orchestrator.cli.console import Stop
from policies.model import exit_codes
from policies.model.evaluation import BASE, Subject
from policies.model.vocabulary import RunPhase


def pin(parent: Store, subjects: Sequence[Subject]) -> tuple[Subject, ...]:
    """Keep each checkpoint from its run's retention until it is evaluated, unless somebody keeps it already.

    The last evaluation of a checkpoint unpins what the first has pinned. Raises Stop where one is gone.
    """
    catalog = Catalog(parent, f"{socket.gethostname()}/{os.getpid()}")
    listed, shared = catalog.newest().checkpoints, _pinned_by_others(parent)
    there = {(one.version, one.digest): one for one in listed}
    if gone := [one.name for one in subjects if one.name != BASE and (one.name, one.digest) not in there]:
        hint = f"`grpo-orch checkpoints ls {parent.quoted}` shows what is left"
        raise Stop(f"{', '.join(gone)}: retired meanwhile; {hint}", exit_codes.FAILED)
    made: list[Subject] = []
    for subject in subjects:
        one = there.get((subject.name, subject.digest))
        if one is not None and not one.pinned:
            catalog.pin(time.time(), one.at, pinned=True)
        ours = one is not None and (subject.pinned or not one.pinned or one.version in shared)
        made.append(replace(subject, pinned=ours))
    return tuple(made)


def _pinned_by_others(parent: Store) -> set[str]:
    """The checkpoints that evaluations which are not done have pinned."""
    return {
        subject.name
        for store, evaluation in evaluations.of_run(parent)
        if journal.recover(store).state.phase is not RunPhase.FINISHED
        for subject in evaluation.subjects
        if subject.pinned
    }
