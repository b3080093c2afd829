"""A run's store, read again and again at little cost.

A view is drawn twice a second, of runs of maybe ten thousand steps: what cannot change is read once. Journal
entries and checkpoints are listed from the last known one on; of the metrics only objects that were written since
are fetched. A Reader is good for one run.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from datetime import datetime

from checkpoint import documents, journal, layout, manifest, metrics
from checkpoint.errors import NotFound
from checkpoint.metrics import Row
from checkpoint.rehearsals import RehearsedFault, read_faults
from checkpoint.store import Entry, Store
from orchestrator.views.events import EventLine, lines, rehearsed_line
from policies.accounting import lived
from policies.events import Event, NodeMoved
from policies.snapshot import Trainer
from policies.spec import RunSpec
from policies.state import Node, RunState, apply
from policies.vocabulary import NodePhase, PolicyVersion

EVENTS_KEPT = 200  # the newest, for views; the journal itself is read by `events`


class Reader:
    """What the store holds of a run, as of the last `refresh`.

    Raises NotFound when the store holds no run.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.record = documents.read_run(store)
        self.state = RunState()
        self.history: list[tuple[int, float, tuple[Event, ...]]] = []
        self.newest_node: dict[str, Node] = {}  # by slot, kept after the node has gone
        self.events: deque[EventLine] = deque(maxlen=EVENTS_KEPT)
        self.faults: list[RehearsedFault] = []
        self.rows: list[Row] = []  # every step, as last logged
        self.path: list[Row] = []  # in the order of time, without what a restarted trainer has yet to make again
        self.lease: documents.Lease | None = None
        self.trainer: Trainer | None = None
        self.checkpoint: tuple[PolicyVersion, float] | None = None  # and when it was made
        self._chunks: dict[str, tuple[int, datetime, list[Row]]] = {}

    @property
    def spec(self) -> RunSpec:
        return self.record.spec

    def refresh(self) -> None:
        """Read what is new. Raises StoreUnavailable, Corrupt."""
        self._read_journal()
        self._read_metrics()
        self._read_checkpoint()
        self.lease = documents.read_lease(self.store)
        self.trainer = documents.read_trainer(self.store)

    def _read_journal(self) -> None:
        told: list[EventLine] = []
        for record in journal.read(self.store, after=self.history[-1][0] if self.history else 0):
            events = record.decoded()
            for event in events:
                self._fold(event, record.time_s, record.number)
            self.history.append((record.number, record.time_s, events))
            told += lines(record)
        if self.spec.rehearse is not None:
            fresh = read_faults(self.store, known={fault.number for fault in self.faults})
            self.faults += fresh
            told += [rehearsed_line(fault) for fault in fresh]
        self.events.extend(sorted(told, key=lambda line: line.time_s))

    def _fold(self, event: Event, time_s: float, number: int) -> None:
        before = self.state
        self.state = apply(before, event, time_s, number)
        for node in self.state.nodes.values():
            known = self.newest_node.get(node.slot)
            if known is None or known.incarnation <= node.incarnation:
                self.newest_node[node.slot] = node
        match event:
            case NodeMoved(phase=NodePhase.GONE | NodePhase.REFUSED):  # the fold forgets it, people want to see it
                node = before.nodes[event.node]
                if self.newest_node[node.slot].id == node.id:
                    left = replace(node, phase=event.phase, since_s=time_s, reason=event.reason)
                    self.newest_node[node.slot] = left
            case _:
                pass

    def _read_metrics(self) -> None:
        entries = self.store.entries(layout.METRICS)
        # A store's clock may be as coarse as a second: the newest object is read again even if it looks the same.
        newest = max((entry.modified_at for entry in entries), default=None)
        changed = [entry for entry in entries if entry.modified_at == newest or not self._holds(entry)]
        for entry in changed:
            rows = metrics.read_chunk(self.store, entry.key)
            self._chunks[entry.key] = (entry.size_bytes, entry.modified_at, rows)
        if changed:
            self.rows = metrics.in_order(row for _, _, rows in self._chunks.values() for row in rows)
            self.path = lived(self.rows)

    def _holds(self, entry: Entry) -> bool:
        chunk = self._chunks.get(entry.key)
        return chunk is not None and chunk[:2] == (entry.size_bytes, entry.modified_at)

    def _read_checkpoint(self) -> None:
        after = None
        if self.checkpoint is not None:
            after = f"{layout.checkpoint(self.checkpoint[0])}/{layout.MANIFEST}"
        for version in reversed(manifest.committed(self.store, layout.CHECKPOINTS, after=after)):
            try:
                made = manifest.load(self.store, layout.checkpoint(version)).created_at_s
            except NotFound:
                continue  # removed by retention between the listing and now
            self.checkpoint = (version, made)
            return
