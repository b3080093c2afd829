"""How long ago an entry was written, by the clock of the store: it outlives every host, and none of them sets it.

A controller that takes over knows by its own clock how long nobody steered, unless that is behind the clock of the
one before it. The store dates what it holds. Only dates of one store are compared, so that it may be years off.
What it says is a floor: time never goes back, or slower, for it.
"""

from __future__ import annotations

import math
from datetime import datetime

from checkpoint.records import documents
from checkpoint.store import layout
from checkpoint.store.run_store import Store
from checkpoint.store.unreadable import Unreadable

JITTER_S = 60.0  # so late a gateway may tell the store that it began, and a store's own servers differ


def seconds_since(store: Store, number: int) -> float:
    """Return how long ago entry `number` was written, in whole seconds, as some stores date by them. 0: it cannot
    be told. Raises StoreError."""
    store.put(layout.CLOCK, b"{}")
    now, then = _date(store, layout.CLOCK), _date(store, layout.journal_entry(number))
    if now is None or then is None:
        return 0.0
    return max(0.0, math.floor((now - then).total_seconds() - _jumped_s(store)))


def _jumped_s(store: Store) -> float:
    """How far the store's clock was set ahead while the run's gateway lived, which counts its own seconds. 0: not
    at all, or there is no gateway to ask."""
    if (by := documents.newest_gateway(store)) is None:
        return 0.0
    unreadable = Unreadable()
    address, status = documents.gateway(by).read(store, unreadable), documents.members(by).read(store, unreadable)
    if address is None or status is None or address.boot_id != status.boot_id:
        return 0.0
    began, told = _date(store, layout.gateway(by)), _date(store, layout.members(by))
    if began is None or told is None:
        return 0.0
    ahead_s = (told - began).total_seconds() - status.up_s
    return ahead_s if ahead_s > JITTER_S else 0.0


def _date(store: Store, key: str) -> datetime | None:
    """When the store says that an object was written; None where it lists none."""
    folder, _, name = key.rpartition("/")
    before = f"{folder}/{name[:-1]}"  # a name right before it: only what follows is asked for
    return next((one.modified_at for one in store.entries(folder, after=before) if one.key == key), None)
