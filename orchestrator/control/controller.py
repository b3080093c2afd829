"""The controller: observe, decide, journal, act. Synchronous, one thread; slow calls run in the actuator.

State changes once its events are durable, and actions start after that: if a controller dies between any two
lines, the next one continues from the journal and the cloud's machines. A controller that was stopped for a while
finds its successor's entry in the journal before it acts.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from grpo_orch.checkpoint.journal import Journal, Record, advance
from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.errors import StoreError
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.control.actuate import Actuator
from grpo_orch.orchestrator.control.observe import Observer
from grpo_orch.orchestrator.control.run_clock import Steadiness
from grpo_orch.policies.control.decide import decide, is_done
from grpo_orch.policies.model.events import CommandTaken, DocumentUnreadable, Event
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.model.state import RunState
from grpo_orch.policies.tick.snapshot import Decision, Snapshot

log = structlog.get_logger()

Decide = Callable[[RunState, Snapshot, RunSpec], Decision]  # pure


class Controller:
    """Controls one run by `decide`. `state` is the journal's, up to this controller's own take-over entry."""

    def __init__(
        self,
        store: Store,
        spec: RunSpec,
        journal: Journal,
        state: RunState,
        observer: Observer,
        actuator: Actuator,
        decide: Decide = decide,
    ) -> None:
        self._store = store
        self._spec = spec
        self._journal = journal
        self._observer = observer
        self._actuator = actuator
        self._decide = decide
        self._reason = ""
        self._steadiness = Steadiness()
        self.state = state
        self.seen: Snapshot | None = None  # by the last tick
        self.finished = False

    def tick(self, now_s: float) -> Decision:
        """Run the loop once. Raises Fenced (another controller took over) or StoreError.

        Args:
            now_s: seconds since the epoch, on a clock that is never set (`run_clock`).
        """
        steady_s = self._steadiness.observe(now_s)
        try:
            return self._tick(now_s, steady_s)
        except StoreError:
            self.interrupt()
            raise

    def interrupt(self) -> None:
        """Record that the store or the cloud did not answer: earlier silence of nodes then proves nothing."""
        self._steadiness.interrupt()

    def fence(self) -> None:
        """Check that no other controller has taken over. Raises Fenced, StoreError."""
        self._journal.check()

    def _tick(self, now_s: float, steady_s: float) -> Decision:
        self._settle(now_s)
        snapshot = self._observer.observe(now_s, self._actuator.collect(), self.state, steady_s)
        if snapshot.machines is None:
            self.interrupt()
        self.seen = snapshot
        decision = self._decide(self.state, snapshot, self._spec)
        if decision.events:
            self.record(now_s, decision.events)
        self._actuator.submit(decision.actions, self.fence)
        self.finished = not decision.actions and is_done(self.state, snapshot)
        if decision.reason != self._reason:
            self._reason = decision.reason
            log.info("tick", reason=decision.reason)
        return decision

    def record(self, now_s: float, events: tuple[Event, ...]) -> None:
        """Journal events, then apply them."""
        self._apply(self._journal.append(now_s, events))

    def _settle(self, now_s: float) -> None:
        """Find out whether the last append succeeded, if the store failed during it, and apply its events."""
        entry = self._journal.settle(now_s)
        if entry is not None:
            self._apply(entry)

    def _apply(self, entry: Record) -> None:
        self.state = advance(self.state, [entry])
        for event in entry.decoded():  # after the state: these calls may raise StoreError
            match event:
                case CommandTaken():
                    documents.command(event.command_id).drop(self._store)
                case DocumentUnreadable() if event.key.startswith(f"{layout.COMMANDS}/"):
                    documents.set_aside(self._store, event.key)
