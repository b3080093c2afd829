"""The controller: observe, decide, journal, act. Synchronous, one thread; slow calls are the actuator's.

State changes only once its events are durable, and actions start only after that: a controller that dies between
any two lines is continued by the next one from the journal and from what the cloud shows.
"""

from __future__ import annotations

import structlog

from checkpoint import documents
from checkpoint.journal import Journal, Record
from checkpoint.store import Store
from orchestrator.actuate import Actuator
from orchestrator.observe import Observer
from policies.decide import decide, done
from policies.events import CommandTaken, Event
from policies.snapshot import Decision
from policies.spec import RunSpec
from policies.state import RunState, apply, fold

log = structlog.get_logger()


class Controller:
    """Steers one run. `records` is the journal up to this controller's own take-over entry."""

    def __init__(
        self,
        store: Store,
        spec: RunSpec,
        journal: Journal,
        records: list[Record],
        observer: Observer,
        actuator: Actuator,
    ) -> None:
        self._store = store
        self._spec = spec
        self._journal = journal
        self._observer = observer
        self._actuator = actuator
        self._reason = ""
        self.state: RunState = fold((r.number, r.time_s, r.decoded()) for r in records)
        self.finished = False

    def tick(self, now_s: float) -> Decision:
        """Run the loop once. Raises Fenced (another controller took over) or StoreError (the store is away)."""
        snapshot = self._observer.look(now_s, self._actuator.collect())
        decision = decide(self.state, snapshot, self._spec)
        if decision.events:
            self.record(now_s, decision.events)
        self._actuator.submit(decision.actions)
        self.finished = not decision.actions and done(self.state, snapshot)
        if decision.reason != self._reason:
            self._reason = decision.reason
            log.info("tick", reason=decision.reason)
        return decision

    def record(self, now_s: float, events: tuple[Event, ...]) -> None:
        """Journal events, then let them be so."""
        entry = self._journal.append(now_s, events)
        for event in events:
            self.state = apply(self.state, event, now_s, entry.number)
            if isinstance(event, CommandTaken):
                documents.drop_command(self._store, event.command_id)
