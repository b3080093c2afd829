"""Keeps the fleet's plan in the store, where `grpo-orch explain` reads it."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

from checkpoint.records import documents
from checkpoint.store.errors import StoreError
from checkpoint.store.run_store import Store
from policies.fleet.explain import Explanation, explain
from policies.model.spec import RunSpec
from policies.model.state import RunState
from policies.tick.snapshot import Snapshot

EVERY_S = 30.0  # at most that often, and only where something but the time has changed


class PlanWriter:
    """Writes the plan of a tick. No error: without it a run loses nothing."""

    def __init__(self, store: Store, spec: RunSpec) -> None:
        self._store, self._spec = store, spec
        self._written: Explanation | None = None
        self._looked_at_s = -math.inf

    def ticked(self, state: RunState, snapshot: Snapshot) -> None:
        before = self._written
        if snapshot.now_s - self._looked_at_s < EVERY_S:
            return
        found = explain(state, snapshot, self._spec)
        self._looked_at_s = snapshot.now_s
        if before is None or replace(found, at_s=before.at_s) != before:
            with contextlib.suppress(StoreError):  # it is written half a minute later
                documents.PLAN.write(self._store, found)
                self._written = found
