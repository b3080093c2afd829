"""A run's machines through SkyPilot: one cluster a node, named so that launching twice is launching once.

SkyPilot's calls take from a second to a minute, so the controller's loop makes none: it reads what a thread that
looks every WATCH_S and the calls of the actuator have found (`sky_book`). What the work on a machine does, its
attempt, its exit code, a notice, the machine itself says in the run's store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from checkpoint.records import documents
from checkpoint.records.documents import MachineReport, RunRecord
from checkpoint.store.errors import StoreError
from checkpoint.store.run_store import Store
from checkpoint.store.unreadable import Unreadable
from orchestrator.clouds.local.cloud import lines_of
from orchestrator.clouds.protocol import CloudRefused, CloudUnavailable, Offer, Order
from orchestrator.clouds.sky.calls import told
from orchestrator.clouds.sky.clusters import Book, Entry
from orchestrator.clouds.sky.suspicion import Suspicions
from orchestrator.clouds.sky.types import ClusterState
from orchestrator.clouds.sky.unrecorded import ELSEWHERE, Strays
from orchestrator.clouds.sky.work import places, region_of, resources_for, sole_region, work_for
from orchestrator.clouds.wheel import build_wheel
from orchestrator.home.folder import run_dir
from policies.control.fleet import market_of, wanted_slots
from policies.control.snapshot import Machine
from policies.model import exit_codes
from policies.model.vocabulary import MachineState, Market, Role, slot_and_incarnation

if TYPE_CHECKING:
    from orchestrator.clouds.sky.skypilot import SkyPilot

log = structlog.get_logger()

WATCH_S = 5.0  # between two looks at SkyPilot's records
REPORTS_S = 1.0  # between two readings of what the machines say
STALE_S = 60.0  # what was known longer ago is not known any more
IDLE_EVERY_S = 30.0  # a look at a machine's jobs costs that machine seconds of a core
REST = 4.0  # so many times as long as such a look took, no other one is due
SILENCE_GAP_S = 20.0
REGION_WAIT_S = 5.0
# SkyPilot tries zone after zone within one launch, and sets the machine up; a launch that is cut off here goes on
# where it was, for the next one has the same name.
LAUNCH_TIMEOUT_S = 1800.0
CALL_TIMEOUT_S = 300.0


class SkyCloud:
    """The machines of one run."""

    def __init__(self, sky: SkyPilot, record: RunRecord, store: Store) -> None:
        self._sky = sky
        self._record = record
        self._spec = record.spec
        self._store = store
        self._prefix = f"grpo-{record.run_id}-"
        self._book = Book()
        self._reports: dict[str, MachineReport] = {}
        self._unreadable = Unreadable()
        self._reading = threading.Lock()
        self._looked_at_s: float | None = None
        self._trouble = "SkyPilot has not been asked yet"
        self._silences: dict[str, tuple[float, float]] = {}  # by node: since when, and when last asked about
        self._strays = Strays(sky, self._prefix, places(self._spec.trainer.resources))
        self._suspicions = Suspicions(self._strays, self._book)
        self._wheel: Path | None = None
        self._once = threading.Lock()
        self._watching = False
        self._closed = threading.Event()

    def machines(self) -> dict[str, Machine]:
        """See `Cloud.machines`."""
        self._watch()
        if self._looked_at_s is None or time.monotonic() - self._looked_at_s > STALE_S:
            raise CloudUnavailable(self._trouble)
        # What is being launched is there already: it has to be taken down, should nobody want it any more.
        being_made = (name.removeprefix(self._prefix) for name in self._book.being_made())
        found = {node: Machine(node, MachineState.STARTING, attempt=0) for node in being_made}
        for name, entry in self._book.entries().items():
            node = name.removeprefix(self._prefix)
            found[node] = _machine(node, entry, self._reports.get(node))
        return found

    def launch(self, order: Order) -> None:
        """See `Cloud.launch`."""
        name = self._prefix + order.node
        with self._book.call(name):
            entry = self._book.entries().get(name)
            if entry is not None and (entry.lost or self._attempt(order.node, entry) >= order.attempt):
                return
            if entry is not None and entry.cluster.stray:
                self._book.lose(name, ELSEWHERE)
                return
            work = work_for(order, self._spec, self._shipped(), self._region_for(order))
            try:
                # Only a machine that this process set up has this version of the project for sure.
                if entry is not None and entry.attempt and entry.cluster.state is ClusterState.UP:
                    with told("run_again", name):
                        self._sky.run_again(name, work, CALL_TIMEOUT_S)
                else:
                    with told("launch", name):
                        cluster = self._sky.launch(name, work, LAUNCH_TIMEOUT_S)
                    self._book.saw(cluster)
            except Exception:
                if entry is None:
                    self._book.forget(name)  # the next look says what was left of it
                raise
            self._book.submitted(name, order.attempt)

    def terminate(self, node: str) -> None:
        """See `Cloud.terminate`. A launch of the same machine that is under way is ended by it."""
        name = self._prefix + node
        with self._book.call(name), told("down", name):
            self._strays.down(name, CALL_TIMEOUT_S)
            with self._reading:  # the next one of that name has said nothing yet
                documents.machine(node).drop(self._store)
                self._reports.pop(node, None)
            self._book.forget(name)

    def confirm(self, node: str) -> None:
        """See `Cloud.confirm`."""
        name = self._prefix + node
        if self._suspicions.look(name):
            self._look_for_silent_end(name, node)

    def offers(self) -> list[Offer]:
        """See `Cloud.offers`. Raises CloudRefused when SkyPilot knows no machine that fits."""
        of_role = {
            Role.TRAINER: self._offer(Role.TRAINER, self._spec.trainer.resources),
            Role.ROLLOUT: self._offer(Role.ROLLOUT, self._spec.rollout.resources),
        }
        return [of_role[role] for role, _, _ in wanted_slots(self._spec)]

    def _offer(self, role: Role, resources: dict[str, Any]) -> Offer:
        market = market_of(role, self._spec)
        resources = resources_for(resources, role, market, sole_region(self._spec))
        best = self._sky.offers(resources, spot=market is Market.SPOT)[0]
        what = f"{best.infra} {best.instance_type} {best.accelerators}".strip()
        try:
            other = self._sky.offers(resources, spot=market is not Market.SPOT)[0].price_usd_per_h
        except CloudRefused:
            return Offer(role, market, what, best.price_usd_per_h)
        name = Market.ON_DEMAND if market is Market.SPOT else Market.SPOT
        return Offer(role, market, what, best.price_usd_per_h, f"{name} {other:.2f}")

    def log(self, node: str, *, follow: bool) -> Iterator[str]:
        """See `Cloud.log`."""
        if node == "daemon" and self._daemon_log.exists():
            return lines_of(self._daemon_log, follow)
        return self._sky.tail(self._prefix + self._newest(node), follow=follow)

    def logged_nodes(self) -> list[str]:
        """See `Cloud.logged_nodes`."""
        nodes = self._nodes()
        daemon = ["daemon"] if self._daemon_log.exists() else []
        return sorted({*daemon, *nodes, *(slot_and_incarnation(node)[0] for node in nodes)})

    def clean_up(self) -> None:
        """See `Cloud.clean_up`."""
        self._strays.clean_up()

    def close(self) -> None:
        """See `Cloud.close`."""
        self._closed.set()

    @property
    def _daemon_log(self) -> Path:
        return run_dir(self._record.run_id) / "daemon.log"

    def _nodes(self) -> list[str]:
        return [cluster.name.removeprefix(self._prefix) for cluster in self._sky.clusters(self._prefix)]

    def _newest(self, name: str) -> str:
        """The node that `name`, a node or a slot, means. Raises KeyError."""
        nodes = self._nodes()
        in_slot = [node for node in nodes if slot_and_incarnation(node)[0] == name]
        if name not in nodes and not in_slot:
            raise KeyError(name)
        return max(in_slot, key=lambda node: slot_and_incarnation(node)[1], default=name)

    def _attempt(self, node: str, entry: Entry) -> int:
        report = self._reports.get(node)
        return max(entry.attempt, report.attempt if report else 0)

    def _shipped(self) -> Path:
        """The wheel of this very version of the project."""
        with self._once:
            if self._wheel is None:
                self._wheel = build_wheel(run_dir(self._record.run_id) / "wheel")
        return self._wheel

    def _region_for(self, order: Order) -> str | None:
        """Where the machine has to be: nodes talk over private addresses, which do not reach another region.

        Raises CloudUnavailable while no machine of the run is up, of which the trainer is the first.
        """
        if region := sole_region(self._spec):
            return region
        if (region := self._present_region()) or order.role is Role.TRAINER:
            return region
        self._book.wait_for_change(REGION_WAIT_S)
        if region := self._present_region():
            return region
        raise CloudUnavailable(f"{order.node} waits for the trainer's region")

    def _present_region(self) -> str | None:
        up = (entry for entry in self._book.entries().values() if entry.is_up)
        return next((region_of(entry.cluster.infra) for entry in up), None)

    def _look_for_silent_end(self, name: str, node: str) -> None:
        """Work that ended without a word, as when the set-up before it failed, has failed."""
        now_s = time.monotonic()
        since_s, last_s = self._silences.get(node, (now_s, now_s))
        if now_s - last_s > SILENCE_GAP_S:
            since_s = now_s  # it was heard from in between
        due = now_s - since_s >= IDLE_EVERY_S
        self._silences[node] = (now_s if due else since_s, now_s)
        if not due:
            return
        with told("is_idle", name):
            is_idle = self._strays.is_idle(name, CALL_TIMEOUT_S)
        if not is_idle:
            # A machine that is slow to answer is busy, maybe with being asked.
            rested_s = time.monotonic() + REST * (time.monotonic() - now_s)
            self._silences[node] = (rested_s, rested_s)
            return
        self._read()  # the machine speaks before its job ends
        entry, report = self._book.entries().get(name), self._reports.get(node)
        if entry is None or (report and report.attempt >= entry.attempt and report.exit_code is not None):
            return
        if self._attempt(node, entry) > 0 and not entry.failed:
            log.warning("work_ended_silently", node=node, hint=f"see `grpo-orch logs {node}`")
            self._book.failed(name)

    def _watch(self) -> None:
        """Start the threads that look, once."""
        with self._once:
            if self._watching:
                return
            self._watching = True
        threading.Thread(target=self._look_for_ever, name="watch-clusters", daemon=True).start()
        threading.Thread(target=self._read_for_ever, name="read-reports", daemon=True).start()

    def _look_for_ever(self) -> None:
        while not self._closed.is_set():
            began = self._book.begin_look()
            try:
                strays = {cluster.name: cluster for cluster in self._strays.look()}
                known = {cluster.name: cluster for cluster in self._sky.clusters(self._prefix)}
                self._book.end_look(began, (strays | known).values())
                if self._looked_at_s is None:
                    log.info("machines_found", here=sorted(known), elsewhere=sorted(strays.keys() - known.keys()))
                    self._read()  # which attempts are under way must be known before any is started
                self._looked_at_s = time.monotonic()
            except (CloudUnavailable, StoreError) as error:
                self._trouble = str(error)
                log.warning("clusters_not_seen", error=str(error))
            except Exception as error:
                self._trouble = repr(error)
                log.exception("watch_failed")
            self._closed.wait(WATCH_S)

    def _read_for_ever(self) -> None:
        while not self._closed.wait(REPORTS_S):
            try:
                self._read()
            except StoreError as error:
                log.warning("reports_not_read", error=str(error))
            except Exception:
                log.exception("read_failed")

    def _read(self) -> None:
        """Read what the machines of this run say. Raises StoreError."""
        nodes = [name.removeprefix(self._prefix) for name in self._book.entries()]
        with self._reading:
            # A report that is damaged says nothing, and keeps none of the others from being heard.
            said = {node: documents.machine(node).read(self._store, self._unreadable) for node in nodes}
            self._reports = {node: report for node, report in said.items() if report is not None}


def _machine(node: str, entry: Entry, report: MachineReport | None) -> Machine:
    attempt = max(entry.attempt, report.attempt if report else 0)
    exit_code = report.exit_code if report and report.attempt == attempt else None
    if exit_code is None and entry.failed:
        exit_code = exit_codes.FAILED
    state = MachineState.UP if entry.was_up or report else MachineState.STARTING
    return Machine(
        node=node,
        state=MachineState.GONE if entry.lost else state,
        attempt=attempt,
        exit_code=exit_code,
        why=entry.lost,
        notice=bool(report and report.notice),
        market=Market.SPOT if entry.cluster.spot else Market.ON_DEMAND,
        price_usd_per_h=entry.cluster.price_usd_per_h,
        on_demand_usd_per_h=entry.cluster.on_demand_usd_per_h,
        where=f"{entry.cluster.infra} {entry.cluster.machine}".strip(),
    )
