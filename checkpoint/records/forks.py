"""The run's forks in the store: one small document for each timeline that a rollback began, written once.

The document is also a fence: once it is written the run goes on from there, and a trainer of an older timeline
stops when it sees it.
"""

from __future__ import annotations

from checkpoint.store import layout
from checkpoint.store.codec import from_json, to_json
from checkpoint.store.errors import AlreadyExists, Corrupt
from checkpoint.store.run_store import Store
from policies.model.timelines import Fork
from policies.model.vocabulary import PolicyVersion


def write_fork(store: Store, fork: Fork) -> None:
    """Begin a timeline. Writing the same fork again, after a lost answer or by another controller, changes
    nothing.

    Raises Corrupt if that timeline has begun differently, StoreError.
    """
    key = layout.timeline(fork.timeline)
    try:
        store.create(key, to_json(fork))
    except AlreadyExists as error:
        there = _read(store, key)
        if there != fork:
            was = f"from {there.start or 'the start'}, {there.reason!r}"
            raise Corrupt(f"{key} exists: {was}", "another fork was to be written") from error


def read_forks(store: Store) -> tuple[Fork, ...]:
    """Return how each timeline but the first began, oldest first.

    Raises Corrupt, also for a timeline that goes on from one that never began, StoreError.
    """
    forks = tuple(_read(store, layout.timeline(number)) for number in _numbers(store))
    begun = {0}
    for fork in forks:
        if fork.start_at is not None and fork.start_at.timeline not in begun:
            raise Corrupt(f"{layout.timeline(fork.timeline)}: begins at {fork.start}, on no earlier timeline")
        begun.add(fork.timeline)
    return forks


def newest_timeline(store: Store) -> int:
    """Return the number of the newest timeline, 0 before any rollback. One listing. Raises StoreError."""
    return max(_numbers(store), default=0)


def _numbers(store: Store) -> list[int]:
    found = (layout.timeline_of(entry.key) for entry in store.entries(layout.TIMELINES))
    return sorted(number for number in found if number is not None)


def _read(store: Store, key: str) -> Fork:
    """Raises NotFound, Corrupt."""
    return from_json(store.get(key), Fork, key, _check)


def _check(fork: Fork, key: str) -> None:
    if layout.timeline(fork.timeline) != key:
        raise ValueError(f"holds timeline {fork.timeline}")
    if fork.start is not None:
        PolicyVersion.parse(fork.start)
