"""Write the fleet's plan to the store, for `grpo-orch explain`."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.store.errors import StoreError
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.fleet.explain import Explanation, explain
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.model.state import RunState
from grpo_orch.policies.tick.snapshot import Snapshot

EVERY_S = 30.0  # minimum interval between writes; unchanged plans are not written


class PlanWriter:
    """Writes the plan of a tick. Ignores store errors: a run does not need it."""

    def __init__(self, store: Store, spec: RunSpec) -> None:
        self._store, self._spec = store, spec
        self._written: Explanation | None = None
        self._explained_at_s = -math.inf

    def ticked(self, state: RunState, snapshot: Snapshot) -> None:
        previous = self._written
        if snapshot.now_s - self._explained_at_s < EVERY_S:
            return
        plan = explain(state, snapshot, self._spec)
        self._explained_at_s = snapshot.now_s
        if previous is None or replace(plan, at_s=previous.at_s) != previous:
            with contextlib.suppress(StoreError):  # retried after EVERY_S
                documents.PLAN.write(self._store, plan)
                self._written = plan
