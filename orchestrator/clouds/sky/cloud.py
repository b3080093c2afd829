"""A run's machines through SkyPilot: one cluster per node, whose name makes a launch idempotent.

SkyPilot's calls take from a second to a minute, so the controller's loop makes none: it reads the results of the
actuator's calls and of a thread (`watch`). A machine reports the state of its work in the store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from grpo_orch.checkpoint.records.documents import MachineReport, RunRecord
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.clouds.local import lines_of
from grpo_orch.orchestrator.clouds.protocol import CloudRefused, CloudUnavailable, LaunchOrder, Offer
from grpo_orch.orchestrator.clouds.sky.calls import CALL_TIMEOUT_S, LAUNCH_TIMEOUT_S
from grpo_orch.orchestrator.clouds.sky.offers import offers_of, pool_of, resources_in
from grpo_orch.orchestrator.clouds.sky.records import ClusterState, SkyOffer, nodes_name
from grpo_orch.orchestrator.clouds.sky.watch import (
    ELSEWHERE,
    Clusters,
    KnownCluster,
    Suspicions,
    UnrecordedClusters,
    Watch,
)
from grpo_orch.orchestrator.clouds.sky.work import (
    Work,
    names_markets,
    places,
    region_of,
    resources_for,
    sole_region,
    work_for,
)
from grpo_orch.orchestrator.clouds.wheel import build_wheel
from grpo_orch.orchestrator.home import run_dir
from grpo_orch.policies.fleet.market import market_of
from grpo_orch.policies.fleet.plan import wanted_slots
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.pools import PoolOffer
from grpo_orch.policies.model.vocabulary import MachineState, Market, Refusal, Role, slot_and_incarnation
from grpo_orch.policies.tick.snapshot import Machine

if TYPE_CHECKING:
    from grpo_orch.orchestrator.clouds.sky.skypilot import SkyPilot

log = structlog.get_logger()

IDLE_EVERY_S = 30.0  # listing a machine's jobs costs the machine seconds of a core
SILENCE_GAP_S = 20.0  # no `confirm` for this long: the machine reported in between


class SkyCloud:
    """The machines of one run. The methods are those of `Cloud`."""

    def __init__(self, sky: SkyPilot, record: RunRecord, store: Store) -> None:
        self._sky = sky
        self._record = record
        self._spec = record.spec
        self._prefix = f"{nodes_name(record.run_id)}-"
        self._clusters = Clusters()
        self._silences: dict[str, tuple[float, float]] = {}  # by node: start, last `confirm`
        self._unrecorded = UnrecordedClusters(sky, self._prefix, places(self._spec.trainer.resources))
        self._unbought: set[str] = set()  # cancelled launches that created no machine
        self._suspicions = Suspicions(self._unrecorded, self._clusters)
        self._watch = Watch(sky, self._unrecorded, self._clusters, store, self._prefix)
        self._wheel: Path | None = None
        self._building = threading.Lock()

    def machines(self) -> dict[str, Machine]:
        self._watch.start()
        self._watch.check_fresh()
        # A launch in progress counts as a machine: it must be taken down if it is no longer wanted.
        launching = (name.removeprefix(self._prefix) for name in self._clusters.launching())
        machines = {node: Machine(node, MachineState.STARTING, attempt=0) for node in launching}
        for name, entry in self._clusters.entries().items():
            node = name.removeprefix(self._prefix)
            machines[node] = _machine(node, entry, self._watch.reports.by_node.get(node))
        return machines

    def launch(self, order: LaunchOrder) -> None:
        name = self._prefix + order.node
        with self._clusters.call(name):
            entry = self._clusters.entries().get(name)
            if entry is not None and (entry.lost or self._attempt(order.node, entry) >= order.attempt):
                return
            if entry is not None and entry.cluster.unrecorded:
                self._clusters.mark_lost(name, ELSEWHERE)
                return
            work = self._work_for(order)
            try:
                # Only a machine that this process set up certainly has this version of the project.
                if entry is not None and entry.attempt and entry.cluster.state is ClusterState.UP:
                    self._sky.run_again(name, work, CALL_TIMEOUT_S)
                else:
                    self._clusters.record(self._sky.launch(name, work, LAUNCH_TIMEOUT_S))
            except Exception as error:
                classified = self._classified(name, error)
                if entry is None and not (isinstance(classified, CloudRefused) and classified.machine_exists):
                    self._clusters.forget(name)  # the next scan finds what remains of it
                if classified is error:
                    raise
                raise classified from error
            finally:
                self._unbought.discard(name)
            self._clusters.mark_submitted(name, order.attempt)

    def terminate(self, node: str) -> None:
        """Also end a launch of the same machine that is in progress."""
        name = self._prefix + node
        is_launching = name in self._clusters.launching()
        with self._clusters.call(name):
            # The launch is about to be cancelled, and SkyPilot does not report how far it got.
            if is_launching and self._sky.is_bought(name) is False:
                self._unbought.add(name)
            self._unrecorded.down(name, CALL_TIMEOUT_S)
            self._watch.forget(node)
            self._clusters.forget(name)

    def confirm(self, node: str) -> None:
        name = self._prefix + node
        if self._suspicions.check(name):
            self._check_unreported_end(name, node)

    def offers(self) -> list[Offer]:
        """Return the offers; raise CloudRefused when SkyPilot knows no machine that fits."""
        by_role = {
            Role.TRAINER: self._offer(Role.TRAINER, self._spec.trainer.resources),
            Role.ROLLOUT: self._offer(Role.ROLLOUT, self._spec.rollout.resources),
        }
        return [by_role[role] for role, _, _ in wanted_slots(self._spec)]

    def pools(self) -> list[PoolOffer]:
        region = sole_region(self._spec)
        roles = {role for role, _, _ in wanted_slots(self._spec)}
        if any(names_markets(self._resources(role)) for role in roles):
            return []  # SkyPilot switches between the markets on its own

        def query(resources: dict[str, Any], spot: bool) -> list[SkyOffer]:
            return self._sky.offers(resources, spot=spot)

        by_role = [offers_of(role, self._resources(role), region, query) for role in sorted(roles)]
        return [offer for offers in by_role for offer in offers] if all(by_role) else []

    def _resources(self, role: Role) -> dict[str, Any]:
        return self._spec.trainer.resources if role is Role.TRAINER else self._spec.rollout.resources

    def _work_for(self, order: LaunchOrder) -> Work:
        if order.pool is None:
            return work_for(order, self._spec, self._project_wheel(), self._region_for(order))
        pinned = resources_in(self._resources(order.role), order.role, order.pool)
        return work_for(order, self._spec, self._project_wheel(), None, pinned)

    def _offer(self, role: Role, resources: dict[str, Any]) -> Offer:
        market = market_of(role, self._spec)
        resources = resources_for(resources, role, market, sole_region(self._spec))
        offers = self._sky.offers(resources, spot=market is Market.SPOT)
        best, most = offers[0], offers[-1].price_usd_per_h
        description = f"{best.infra} {best.instance_type} {best.accelerators}".strip()
        try:
            others = self._sky.offers(resources, spot=market is not Market.SPOT)
        except CloudRefused:
            return Offer(role, market, description, best.price_usd_per_h, max_usd_per_h=most)
        other_least, other_most = others[0].price_usd_per_h, others[-1].price_usd_per_h
        if names_markets(resources):  # a launch may fall back to the other market
            most = max(most, other_most)
        return Offer(role, market, description, best.price_usd_per_h, other_least, most, other_most)

    def log(self, node: str, *, follow: bool) -> Iterator[str]:
        if node == "daemon" and self._daemon_log.exists():
            return lines_of(self._daemon_log, follow)
        return self._sky.log(self._prefix + self._newest(node), follow=follow)

    def logged_nodes(self) -> list[str]:
        nodes = self._nodes()
        daemon = ["daemon"] if self._daemon_log.exists() else []
        return sorted({*daemon, *nodes, *(slot_and_incarnation(node)[0] for node in nodes)})

    def clean_up(self) -> None:
        self._unrecorded.clean_up()

    def close(self) -> None:
        self._watch.close()

    @property
    def _daemon_log(self) -> Path:
        return run_dir(self._record.run_id) / "daemon.log"

    def _nodes(self) -> list[str]:
        return [cluster.name.removeprefix(self._prefix) for cluster in self._sky.clusters(self._prefix)]

    def _newest(self, name: str) -> str:
        """Return the node `name`, or the newest node of slot `name`. Raises KeyError."""
        nodes = self._nodes()
        in_slot = [node for node in nodes if slot_and_incarnation(node)[0] == name]
        if name not in nodes and not in_slot:
            raise KeyError(name)
        return max(in_slot, key=lambda node: slot_and_incarnation(node)[1], default=name)

    def _attempt(self, node: str, entry: KnownCluster) -> int:
        report = self._watch.reports.by_node.get(node)
        return max(entry.attempt, report.attempt if report else 0)

    def _project_wheel(self) -> Path:
        """Return the wheel of this version of the project, built once."""
        with self._building:
            if self._wheel is None:
                self._wheel = build_wheel(run_dir(self._record.run_id) / "wheel")
        return self._wheel

    def _region_for(self, order: LaunchOrder) -> str | None:
        """Return the region of the run's machines: private addresses do not work across regions.

        Raises CloudUnavailable for a rollout node while no machine of the run is up; the trainer comes first.
        """
        if region := sole_region(self._spec):
            return region
        if (region := self._present_region()) or order.role is Role.TRAINER:
            return region
        raise CloudUnavailable(
            f"{order.node} waits until the trainer's machine is up, to launch in the same region"
        )

    def _present_region(self) -> str | None:
        up = (entry for entry in self._clusters.entries().values() if entry.is_up)
        return next((region_of(entry.cluster.infra) for entry in up if entry.cluster.infra), None)

    def _classified(self, name: str, error: Exception) -> Exception:
        """Return the error to raise for a failed launch, depending on what the cloud has of it."""
        if isinstance(error, CloudUnavailable) and name in self._unbought:
            return CloudRefused(Refusal.UNKNOWN, "the launch was cancelled before the cloud created a machine")
        if not isinstance(error, CloudRefused):
            return error
        try:
            cluster = self._unrecorded.confirm(name, CALL_TIMEOUT_S)
        except CloudUnavailable as unknown:
            return CloudUnavailable(f"{error}; cannot determine whether a machine was created: {unknown}")
        if cluster is None:
            return error
        self._clusters.record(cluster)
        return CloudRefused(error.refusal, str(error), machine_exists=True)

    def _check_unreported_end(self, name: str, node: str) -> None:
        """Mark the work as failed if it ended without a report, as when its set-up failed."""
        now_s = time.monotonic()
        since_s, last_s = self._silences.get(node, (now_s, now_s))
        if now_s - last_s > SILENCE_GAP_S:
            since_s = now_s
        self._silences[node] = (since_s, now_s)
        if now_s - since_s < IDLE_EVERY_S:
            return
        try:
            if not self._unrecorded.is_idle(name, CALL_TIMEOUT_S):
                return
        finally:  # a slow answer means a busy machine, which this check may keep busy
            self._silences[node] = (time.monotonic(), time.monotonic())
        self._watch.read()  # the machine reports before its job ends
        entry, report = self._clusters.entries().get(name), self._watch.reports.by_node.get(node)
        if entry is None or (report and report.attempt >= entry.attempt and report.exit_code is not None):
            return
        if self._attempt(node, entry) > 0 and not entry.failed:
            log.warning("work_ended_without_report", node=node, hint=f"see `grpo-orch logs {node}`")
            self._clusters.mark_failed(name)


def _machine(node: str, entry: KnownCluster, report: MachineReport | None) -> Machine:
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
        exit_reason=report.exit_reason if report and report.attempt == attempt else "",
        reason=entry.lost,
        notice=bool(report and report.notice),
        market=Market.SPOT if entry.cluster.spot else Market.ON_DEMAND,
        price_usd_per_h=entry.cluster.price_usd_per_h or 0.0,
        on_demand_usd_per_h=entry.cluster.on_demand_usd_per_h,
        where=f"{entry.cluster.infra} {entry.cluster.machine}".strip(),
        # Without a pool and a price the maximum price of its request keeps counting.
        pool=None if entry.cluster.price_usd_per_h is None else pool_of(entry.cluster),
        rebalance_recommended=bool(report and report.rebalance_recommended),
    )
