"""The journal in larger pieces: SEGMENT_ENTRIES entries in an object, with the run's state after the last.

A segment only makes reading faster. Its name, bounds and content follow from the entries alone, so two
controllers, even a late one, write the same object; where it is missing, unreadable, or its state of another
version, the entries are read instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import structlog

from checkpoint.journal.entries import Record, entries, in_parallel
from checkpoint.store import layout
from checkpoint.store.codec import STATE_SCHEMA, from_json, state_from_plain, state_to_plain, to_json
from checkpoint.store.errors import Corrupt, NotFound
from checkpoint.store.run_store import Store
from policies.model.state import RunState

log = structlog.get_logger()

SCHEMA = 1
SEGMENT_ENTRIES = 256  # part of the format: segments end at its multiples
STATES_TRIED = 2  # newest first; if neither serves, all of them were written by another version


@dataclass(frozen=True, slots=True)
class Segment:
    """`records` are the SEGMENT_ENTRIES up to the number in its name, `state` is the run's after them."""

    schema: int
    records: list[Record]
    state_schema: int
    state: dict[str, Any]


def write(store: Store, records: list[Record], state: RunState) -> None:
    """Store a segment; one of the same bounds is replaced by its equal."""
    segment = Segment(SCHEMA, records, STATE_SCHEMA, state_to_plain(state))
    store.put(layout.segment(records[-1].number), to_json(segment))


def newest(store: Store, after: int = 0) -> int:
    """Return the last number of the newest segment beyond `after` in the listing, or 0."""
    start = layout.segment(after) if after else None
    numbers = (layout.number_of(one.key) for one in store.entries(layout.SEGMENTS, after=start))
    return max((number for number in numbers if number and number % SEGMENT_ENTRIES == 0), default=0)


def records_between(store: Store, after: int, last: int) -> list[Record]:
    """Return the entries above `after`, up to `last`, which ends a segment. Raises Corrupt."""
    whole = after // SEGMENT_ENTRIES * SEGMENT_ENTRIES
    ends = range(whole + SEGMENT_ENTRIES, last + 1, SEGMENT_ENTRIES)
    pieces = in_parallel(lambda end: _records(store, end), ends)
    return [record for piece in pieces for record in piece if record.number > after]


def newest_state(store: Store, last: int) -> tuple[int, RunState]:
    """Return the number and the state of the newest segment up to `last` that this version can continue.

    `(0, RunState())`, the beginning, where none of the STATES_TRIED newest serves.
    """
    for end in range(last, max(0, last - STATES_TRIED * SEGMENT_ENTRIES), -SEGMENT_ENTRIES):
        try:
            return end, _state(store, end)
        except (Corrupt, NotFound) as error:
            _passed_over(end, error)
    return 0, RunState()


def _records(store: Store, end: int) -> list[Record]:
    try:
        return _load(store, end).records
    except (Corrupt, NotFound) as error:
        _passed_over(end, error)
        return entries(store, range(end - SEGMENT_ENTRIES + 1, end + 1))


def _state(store: Store, end: int) -> RunState:
    segment = _load(store, end)
    where = layout.segment(end)
    if segment.state_schema != STATE_SCHEMA:
        raise Corrupt(f"{where}: state of schema {segment.state_schema}, this grpo-orch has {STATE_SCHEMA}")
    return state_from_plain(segment.state, where)


def _load(store: Store, end: int) -> Segment:
    """Raises NotFound, and Corrupt for what is not a segment with that end."""
    key = layout.segment(end)
    segment = from_json(store.get(key), Segment, key)
    if segment.schema != SCHEMA:
        raise Corrupt(f"{key}: segment of schema {segment.schema}, this grpo-orch has {SCHEMA}")
    if [record.number for record in segment.records] != list(range(end - SEGMENT_ENTRIES + 1, end + 1)):
        raise Corrupt(f"{key}: does not hold the {SEGMENT_ENTRIES} entries up to {end}")
    return segment


def _passed_over(end: int, error: Exception) -> None:
    log.warning("segment_passed_over", last=end, error=str(error))
