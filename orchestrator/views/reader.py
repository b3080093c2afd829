"""A run's store, read again and again at little cost.

A view is drawn twice a second, of runs of maybe ten thousand steps: what cannot change is read once. The journal
is read from a little before its end, and whole only for who asks. The catalog of checkpoints is read where it
has a new revision; of the metrics only objects that were written since are fetched. A Reader is good for one run.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from datetime import datetime
from statistics import median

from checkpoint import journal
from checkpoint.journal import Record, entries_after
from checkpoint.records import documents, metrics
from checkpoint.records.documents import RehearsedFault, read_faults
from checkpoint.records.metrics import Row, logged
from checkpoint.store import layout
from checkpoint.store.document import Unreadable
from checkpoint.store.run_store import Entry, Store
from checkpoint.stream.catalog import Catalog, Checkpoint
from orchestrator.control.lease import LeaseWatch
from orchestrator.views.events import EventLine, lines, rehearsed_line
from orchestrator.views.measured import NodeState, phase_state
from policies.ledger.accounting import split_by_line, surviving_rows
from policies.ledger.rentals import ControllerRental
from policies.model.events import Event, NodeMoved, NodeRequested
from policies.model.fold import apply
from policies.model.spec import RunSpec
from policies.model.state import Node, RunState
from policies.model.timelines import lineage, on_lineage
from policies.model.vocabulary import NodePhase
from policies.tick.snapshot import Trainer

EVENTS_KEPT = 200  # the newest, for views; the journal itself is read by `events`
ENDED = (NodePhase.GONE, NodePhase.REFUSED)
KL_START_POINTS = 3  # their median is a run's first KL, as in the detectors


class Reader:
    """What the store holds of a run, as of the last `refresh`.

    Raises NotFound when the store holds no run.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.record = documents.read_run(store)
        self.unreadable = Unreadable()  # optional data that is damaged, which counts as not there
        self.state = RunState()
        self.last: Record | None = None  # the newest journal entry
        self.newest_node: dict[str, Node] = {}  # by slot, kept after the node has gone
        self.states: dict[str, NodeState] = {}  # by slot
        self.events: deque[EventLine] = deque(maxlen=EVENTS_KEPT)
        self.faults: list[RehearsedFault] = []
        self.rows: list[Row] = []  # every step, as last logged
        # The run's present line in the order of time, without what a restarted trainer has yet to make again.
        self.path: list[Row] = []
        self.abandoned: list[Row] = []  # by rollbacks, in the order of time
        self.lease: documents.Lease | None = None
        self.lease_watch = LeaseWatch()
        self.trainer: Trainer | None = None
        self.controller: documents.ControllerMachine | None = None
        self._controllers_gone: tuple[ControllerRental, ...] | None = None  # None: not read since one was there
        self.checkpoints: list[Checkpoint] = []  # in version order
        self._catalog = Catalog(store, "reader")  # which writes nothing
        self._chunks: dict[str, tuple[int, datetime, list[Row]]] = {}

    @property
    def spec(self) -> RunSpec:
        return self.record.spec

    def controllers(self, now_s: float) -> tuple[ControllerRental, ...]:
        """The stays of the controller machines of a `--remote` run, until now."""
        if self.controller is not None:
            return self.controller.stays(now_s)
        return self._controllers_gone or ()

    @property
    def kl_limit(self) -> float | None:
        """The KL that is too much in any case: `policies.kl.limit` above the run's own start, once known."""
        limit = self.spec.policies.kl.limit
        start = logged(self.path, "kl")[:KL_START_POINTS]
        return None if limit is None or len(start) < KL_START_POINTS else limit + median(start)

    @property
    def listed(self) -> list[Checkpoint]:
        """The checkpoints of the run's present line, oldest first."""
        stretches = lineage(self.state.forks, self.state.timeline)
        return [one for one in self.checkpoints if on_lineage(one.at, stretches)]

    def refresh(self) -> None:
        """Read what is new. Raises StoreUnavailable, Corrupt."""
        self._read_journal()
        self._read_metrics()
        self.checkpoints = self._catalog.newest().checkpoints
        self.lease = documents.LEASE.read(self.store, self.unreadable)
        self.trainer = documents.TRAINER.read(self.store, self.unreadable)
        self.controller = documents.CONTROLLER.read(self.store)
        if self.controller is not None:
            self._controllers_gone = None
        elif self._controllers_gone is None:  # which is written before the other is dropped
            before = documents.CONTROLLERS_BEFORE.read(self.store)
            self._controllers_gone = () if before is None else before.stays

    def history(self) -> list[tuple[int, float, tuple[Event, ...]]]:
        """Read the whole journal as `(entry number, time_s, events)`. Raises Corrupt."""
        records = [record for record in journal.read(self.store) if not record.is_void]
        return [(record.number, record.time_s, record.decoded()) for record in records]

    def _read_journal(self) -> None:
        records = entries_after(self.store, after=self.last.number) if self.last else self._recent()
        told = [line for record in records for line in lines(record)]
        for record in records:
            self._read_record(record)
        if self.spec.rehearse is not None:
            fresh = read_faults(self.store, known={fault.number for fault in self.faults})
            self.faults += fresh
            told += [rehearsed_line(fault) for fault in fresh]
        self.events.extend(sorted(told, key=lambda line: line.time_s))

    def _recent(self) -> list[Record]:
        """The entries to begin with: enough for the newest events, and for the last node of every slot."""
        recent = journal.recover(self.store, overlap=1)
        told = {node.slot for node in recent.before.nodes.values()}
        told |= {event.slot for r in recent.records for event in r.decoded() if isinstance(event, NodeRequested)}
        if recent.state.slots.keys() - told:
            return journal.read(self.store)  # a slot that has been empty for hundreds of entries
        self.state = recent.before
        self._see_nodes()
        for slot, node in self.newest_node.items():
            self.states[slot] = NodeState(node.phase)
        return recent.records

    def _read_record(self, record: Record) -> None:
        for event in record.decoded():
            self._fold(event, record.time_s, record.number)
        self.last = record

    def _fold(self, event: Event, time_s: float, number: int) -> None:
        before = self.state
        self.state = apply(before, event, time_s, number)
        self._see_nodes()
        match event:
            case NodeRequested():
                self.states[event.slot] = NodeState.REQUESTED
            case NodeMoved():
                node = before.nodes[event.node]
                if self.newest_node[node.slot].id == node.id:
                    self.states[node.slot] = phase_state(event.phase, node.phase)
                    if event.phase in ENDED:  # the fold forgets it, people want to see it
                        left = replace(node, phase=event.phase, since_s=time_s, reason=event.reason)
                        self.newest_node[node.slot] = left
            case _:
                pass

    def _see_nodes(self) -> None:
        for node in self.state.nodes.values():
            known = self.newest_node.get(node.slot)
            if known is None or known.incarnation <= node.incarnation:
                self.newest_node[node.slot] = node

    def _read_metrics(self) -> None:
        entries = self.store.entries(layout.METRICS)
        # A store's clock may be as coarse as a second: the newest object is read again even if it looks the same.
        newest = max((entry.modified_at for entry in entries), default=None)
        changed = [entry for entry in entries if entry.modified_at == newest or not self._holds(entry)]
        found = metrics.read_chunks(self.store, [entry.key for entry in changed], self.unreadable)
        for entry, rows in zip(changed, found, strict=True):
            self._chunks[entry.key] = (entry.size_bytes, entry.modified_at, rows)
        if changed:
            self.rows = metrics.in_order(row for _, _, rows in self._chunks.values() for row in rows)
        self.path, self.abandoned = split_by_line(surviving_rows(self.rows), self.state.forks)

    def _holds(self, entry: Entry) -> bool:
        chunk = self._chunks.get(entry.key)
        return chunk is not None and chunk[:2] == (entry.size_bytes, entry.modified_at)
