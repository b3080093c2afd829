"""What the rehearsal did, and when: one small object per fault, so that a report can say what each one cost."""

from __future__ import annotations

import contextlib
from collections.abc import Container
from dataclasses import dataclass

from checkpoint.store import layout
from checkpoint.store.codec import from_json, to_json
from checkpoint.store.errors import Corrupt
from checkpoint.store.run_store import Store


@dataclass(frozen=True, slots=True)
class RehearsedFault:
    """One fault as it was done. `target` is a slot, `rollouts`, `gateway`, `trainer` or `daemon`."""

    number: int  # place in run.yaml's list, from 1; the order in which they are done is that of their steps
    fault: str  # kill, preempt, no_capacity
    target: str
    at_step: int
    time_s: float  # just before it was done, seconds since the epoch
    detail: str  # for people: what exactly was hit


def write_fault(store: Store, fault: RehearsedFault) -> None:
    """Record a fault. Recording the same number again replaces it."""
    store.put(layout.rehearsal(fault.number), to_json(fault))


def read_faults(store: Store, known: Container[int] = ()) -> list[RehearsedFault]:
    """Return the faults whose number is not in `known`, in the order in which they were done. Unreadable ones are
    left out: only the report needs them."""
    found = []
    for entry in store.entries(layout.REHEARSAL):
        number = layout.rehearsal_of(entry.key)
        if number is not None and number not in known:
            with contextlib.suppress(Corrupt):
                found.append(from_json(store.get(entry.key), RehearsedFault, entry.key))
    return sorted(found, key=lambda fault: fault.time_s)
