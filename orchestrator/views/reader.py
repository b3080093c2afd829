"""Read a run's store repeatedly at little cost.

A view is drawn twice a second, for runs of maybe ten thousand steps, so data that cannot change are read once. The
journal is read from shortly before its end unless all of it is needed. The catalog of checkpoints is read when it
has a new revision, and only new metric objects are fetched. A Reader serves one run.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from statistics import median

from grpo_orch.checkpoint import journal
from grpo_orch.checkpoint.journal import Record, entries_after
from grpo_orch.checkpoint.records import documents, metrics
from grpo_orch.checkpoint.records.documents import RehearsedFault, read_faults
from grpo_orch.checkpoint.records.metrics import MetricsRow, logged
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.document import UnreadableDocuments
from grpo_orch.checkpoint.store.run_store import Entry, Store
from grpo_orch.checkpoint.stream.catalog import Catalog, Checkpoint
from grpo_orch.orchestrator.control.lease import LeaseWatch
from grpo_orch.orchestrator.views.events import EventLine, lines, rehearsed_line
from grpo_orch.orchestrator.views.view_model import NodeState, phase_state
from grpo_orch.policies.ledger.accounting import split_by_line, surviving_rows
from grpo_orch.policies.ledger.rentals import ControllerRental
from grpo_orch.policies.model.events import Event, NodeMoved, NodeRequested
from grpo_orch.policies.model.fold import fold
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.model.state import Node, RunState
from grpo_orch.policies.model.timelines import lineage, on_lineage
from grpo_orch.policies.model.vocabulary import NodePhase
from grpo_orch.policies.tick.snapshot import Trainer

EVENTS_KEPT = 200  # the newest, unless the whole journal is read
ENDED = (NodePhase.GONE, NodePhase.REFUSED)
KL_START_POINTS = 3  # their median is the run's initial KL, as in the detectors


class Reader:
    """The contents of a run's store, as of the last `refresh`.

    `whole`: read the journal from its start, for `history` and all `events`.
    Raises NotFound when the store holds no run.
    """

    def __init__(self, store: Store, *, whole: bool = False) -> None:
        self.store = store
        self._is_whole = whole
        self.record = documents.read_run(store)
        self.unreadable = UnreadableDocuments()  # damaged optional data, treated as absent
        self.state = RunState()
        self.last: Record | None = None  # the newest journal entry
        self.newest_node: dict[str, Node] = {}  # by slot, kept after the node is gone
        self.states: dict[str, NodeState] = {}  # by slot
        self.history: list[tuple[int, float, tuple[Event, ...]]] = []  # entry number, time_s, events
        self.events: list[EventLine] = []
        self.faults: list[RehearsedFault] = []
        self.rows: list[MetricsRow] = []  # every step, as last logged
        # Rows of the current timeline and its ancestors by time, without steps that the trainer will repeat.
        self.path: list[MetricsRow] = []
        self.abandoned: list[MetricsRow] = []  # by rollbacks, in the order of time
        self.lease: documents.Lease | None = None
        self.lease_watch = LeaseWatch()
        self.trainer: Trainer | None = None
        self.plan = ""  # of the fleet, one sentence; empty while nothing is compared
        self.controller: documents.ControllerMachine | None = None
        # None: not read since the last controller machine ended.
        self._past_controllers: tuple[ControllerRental, ...] | None = None
        self.checkpoints: list[Checkpoint] = []  # in version order
        self._catalog = Catalog(store, "reader")  # read-only
        self._chunks: dict[str, tuple[int, datetime, list[MetricsRow]]] = {}

    @property
    def spec(self) -> RunSpec:
        return self.record.spec

    def controllers(self, now_s: float) -> tuple[ControllerRental, ...]:
        """Return the rentals of the controller machines of a `--remote` run, until now."""
        if self.controller is not None:
            return self.controller.rentals(now_s)
        return self._past_controllers or ()

    @property
    def kl_limit(self) -> float | None:
        """Initial KL plus `policies.kl.limit`, the KL at which the run trips; None until known."""
        limit = self.spec.policies.kl.limit
        start = logged(self.path, "kl")[:KL_START_POINTS]
        return None if limit is None or len(start) < KL_START_POINTS else limit + median(start)

    @property
    def listed(self) -> list[Checkpoint]:
        """The checkpoints of the current timeline and its ancestors, oldest first."""
        stretches = lineage(self.state.forks, self.state.timeline)
        return [checkpoint for checkpoint in self.checkpoints if on_lineage(checkpoint.at, stretches)]

    def refresh(self) -> None:
        """Read what is new. Raises StoreUnavailable, Corrupt."""
        self.read_journal()
        self._read_metrics()
        self.checkpoints = self._catalog.newest().checkpoints
        self.lease = documents.LEASE.read(self.store, self.unreadable)
        self.trainer = documents.TRAINER.read(self.store, self.unreadable)
        explanation = documents.PLAN.read(self.store, self.unreadable)
        self.plan = "" if explanation is None else explanation.plan
        self.controller = documents.CONTROLLER.read(self.store)
        if self.controller is not None:
            self._past_controllers = None
        elif self._past_controllers is None:  # written before CONTROLLER is deleted
            before = documents.CONTROLLERS_BEFORE.read(self.store)
            self._past_controllers = () if before is None else before.rentals

    def read_journal(self) -> None:
        """Read new entries of the journal and new rehearsed faults. Raises StoreUnavailable, Corrupt."""
        records = entries_after(self.store, after=self.last.number) if self.last else self._recent()
        found = [line for record in records for line in lines(record)]
        for record in records:
            self._read_record(record)
        if self.spec.rehearse is not None:
            fresh = read_faults(self.store, known={fault.number for fault in self.faults})
            self.faults += fresh
            found += [rehearsed_line(fault) for fault in fresh]
        if self._is_whole:
            decoded = [(r.number, r.time_s, r.decoded()) for r in records if not r.is_void]
            self.history = [*self.history, *decoded]
        events = [*self.events, *sorted(found, key=lambda line: line.time_s)]
        self.events = events if self._is_whole else events[-EVENTS_KEPT:]

    def _recent(self) -> list[Record]:
        """Read enough entries for the newest events and the last node of every slot, or all."""
        if self._is_whole:
            return journal.read(self.store)
        recent = journal.recover(self.store, overlap=1)
        known = {node.slot for node in recent.before.nodes.values()}
        known |= {event.slot for r in recent.records for event in r.decoded() if isinstance(event, NodeRequested)}
        if recent.state.slots.keys() - known:
            return journal.read(self.store)  # a slot has been empty for hundreds of entries
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
        self.state = fold([(number, time_s, (event,))], before)
        self._see_nodes()
        match event:
            case NodeRequested():
                self.states[event.slot] = NodeState.REQUESTED
            case NodeMoved():
                node = before.nodes[event.node]
                if self.newest_node[node.slot].id == node.id:
                    self.states[node.slot] = phase_state(event.phase, node.phase)
                    if event.phase in ENDED:  # the fold drops the node; views still show it
                        ended = replace(node, phase=event.phase, since_s=time_s, reason=event.reason)
                        self.newest_node[node.slot] = ended
            case _:
                pass

    def _see_nodes(self) -> None:
        for node in self.state.nodes.values():
            known = self.newest_node.get(node.slot)
            if known is None or known.incarnation <= node.incarnation:
                self.newest_node[node.slot] = node

    def _read_metrics(self) -> None:
        entries = self.store.entries(layout.METRICS)
        # Some stores date by the second, so the newest object is read again even if it looks unchanged.
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
