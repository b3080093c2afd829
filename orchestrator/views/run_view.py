"""Build a RunView from a run's store and its gateway's last status; `RunObserver` does so repeatedly."""

from __future__ import annotations

import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from types import MappingProxyType

from grpo_orch.checkpoint.records.documents import Lease
from grpo_orch.checkpoint.records.metrics import MetricsRow, logged, median_timing, step_timings
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.control.lease import LEASE_CHECK_EVERY_S, LEASE_CHECKS, NO_SKEW_S, TTL_S
from grpo_orch.orchestrator.control.metrics_watch import RECENT_ROWS
from grpo_orch.orchestrator.control.observe import GatewayWatch
from grpo_orch.orchestrator.control.run_clock import awake_or_asleep_s
from grpo_orch.orchestrator.views.formatting import stage_words
from grpo_orch.orchestrator.views.reader import EVENTS_KEPT, Reader
from grpo_orch.orchestrator.views.view_model import (
    CheckpointView,
    DaemonView,
    MoneyView,
    NodeState,
    NodeView,
    RollbackView,
    RunView,
    StoppedKindView,
    UnreadableView,
    health_of,
    newest_weights,
    state_now,
)
from grpo_orch.policies.fleet.budget import caps_of, not_counted, on_demand_usd, spent_usd
from grpo_orch.policies.fleet.objective import rollouts_wanted
from grpo_orch.policies.model.breaker import probe_wait_s
from grpo_orch.policies.model.phases import TERMINAL_RUN
from grpo_orch.policies.model.spec import generates_itself
from grpo_orch.policies.model.state import Node, RunState
from grpo_orch.policies.model.vocabulary import NodePhase, PolicyVersion, Role, machine_of
from grpo_orch.policies.serving.gateway_status import GatewayStatus, MemberStatus
from grpo_orch.policies.serving.joining import Stage
from grpo_orch.policies.tick.snapshot import Trainer

RECENT_STEPS = 120  # shown in sparklines
PACE_STEPS = 20  # steps from which the current speed is measured
EVENTS_SHOWN = 20
NO_RATES: Mapping[str, float] = MappingProxyType({})


def view_of(
    reader: Reader,
    now_s: float,
    gateway: GatewayStatus | None,
    tokens_per_s: Mapping[str, float] = NO_RATES,
) -> RunView:
    """Describe the run at `now_s`, as `reader` has read it.

    `gateway` is the gateway's newest status; `tokens_per_s` is by machine.
    """
    if not reader.state.live(Role.TRAINER):
        gateway = None  # the gateway ran on the trainer's machine
    heartbeat, rows, state = reader.trainer, reader.path, reader.state
    if heartbeat is not None and heartbeat.timeline != state.timeline:
        heartbeat = None  # from the trainer before the rollback
    pace = rows[-PACE_STEPS - 1 :]
    step_s = _step_s(pace)
    step = heartbeat.step if heartbeat else (rows[-1].step if rows else 0)
    max_steps = reader.trainer.max_steps if reader.trainer else None
    running = state.phase not in TERMINAL_RUN
    progressing = running and state.parked_at_s is None  # the end of a parked run cannot be estimated
    eta_s = (max_steps - step) * step_s if step_s is not None and max_steps is not None and progressing else None
    return RunView(
        name=reader.spec.name,
        store=reader.store.url,
        now_s=now_s,
        phase=state.phase,
        reason=state.reason,
        timeline=state.timeline,
        rollbacks=len(state.rollbacks),
        rollback=_rollback(state),
        health=health_of(state),
        step=step,
        max_steps=max_steps,
        activity=heartbeat.activity if heartbeat and state.parked_at_s is None else None,
        reward=next(reversed(logged(rows, "reward")), None),
        kl=next(reversed(logged(rows, "kl")), None),
        kl_limit=reader.kl_limit,
        step_s=step_s,
        tokens_per_s=_tokens_per_s(pace),
        eta_s=eta_s,
        requests_waiting=gateway.requests_waiting if gateway else None,
        nodes=_nodes(reader, heartbeat, gateway, tokens_per_s),
        rollouts_wanted=None if generates_itself(reader.spec) else rollouts_wanted(state, reader.spec),
        money=_money(reader, now_s, step, eta_s),
        buying_stopped=_not_bought(state) if running else (),
        checkpoint=_checkpoint(reader, now_s),
        store_slow=state.is_store_slow and running,
        unreadable=_unreadable(reader),
        daemon=_daemon(reader, now_s),
        recent=tuple(rows[-RECENT_STEPS:]),
        parked_s=None if state.parked_at_s is None else max(0.0, now_s - state.parked_at_s),
        step_timing=median_timing(timing for _, timing in step_timings(rows[-RECENT_ROWS:])[-PACE_STEPS:]),
        plan=reader.plan if running else "",
        weights=newest_weights(rows, gateway.versions if gateway else ()),
        events=tuple(sorted(reader.events[-EVENTS_KEPT:], key=lambda line: line.time_s)[-EVENTS_SHOWN:]),
    )


def _rollback(state: RunState) -> RollbackView | None:
    rollback = state.rollback
    if rollback is None:
        return None
    return RollbackView(
        timeline=rollback.fork.timeline,
        cause=rollback.cause,
        reason=rollback.fork.reason,
        from_step=rollback.from_step,
        start=rollback.fork.start,
        stage=rollback.stage,
        since_s=rollback.since_s,
        probation_until_step=rollback.probation_until_step,
        text=stage_words(rollback),
    )


def _money(reader: Reader, now_s: float, step: int, eta_s: float | None) -> MoneyView:
    """Return the cost of the run's machines so far, and the forecast for its end."""
    state, controller = reader.state, reader.controller
    controllers_usd = sum(rental.usd for rental in reader.controllers(now_s))
    spent = spent_usd(state, now_s) + controllers_usd
    controller_usd_per_h = 0.0 if controller is None else controller.usd_per_h
    on_demand = on_demand_usd(state, now_s) + controllers_usd
    rate = sum(node.usd_per_h for node in state.nodes.values()) + controller_usd_per_h
    tokens = sum(row.tokens for row in reader.path)
    caps = caps_of(state, reader.spec)
    return MoneyView(
        spent_usd=spent,
        all_on_demand_usd=on_demand,
        saved_usd=max(0.0, on_demand - spent),
        usd_per_h=rate,
        usd_per_step=spent / step if step else None,
        usd_per_million_tokens=spent / tokens * 1e6 if tokens else None,
        forecast_usd=None if eta_s is None else spent + rate * eta_s / 3600,
        budget_usd=caps.usd,
        not_counted=not_counted(reader.spec),
    )


def _not_bought(state: RunState) -> tuple[StoppedKindView, ...]:
    stopped = [(name, kind) for name, kind in sorted(state.kinds.items()) if kind.stopped]
    return tuple(
        StoppedKindView(
            name, kind.stopped, kind.stopped_at_s, kind.failed_at_s + probe_wait_s(kind, needed=True), kind.probes
        )
        for name, kind in stopped
    )


def _nodes(
    reader: Reader, heartbeat: Trainer | None, gateway: GatewayStatus | None, tokens_per_s: Mapping[str, float]
) -> tuple[NodeView, ...]:
    """Return a view of each slot, the trainer first, `rollout-10` after `rollout-9`."""
    members = defaultdict[str, list[MemberStatus]](list)
    for member in gateway.members if gateway else []:
        members[machine_of(member.node)].append(member)
    joining = {node.node: node.stage for node in (gateway.joining if gateway else ())}
    newest = sorted(reader.newest_node.values(), key=lambda n: (n.role is not Role.TRAINER, len(n.slot), n.slot))
    return tuple(
        _node(
            node,
            reader.states[node.slot],
            heartbeat,
            members[node.id],
            joining.get(node.id),
            tokens_per_s.get(node.id),
        )
        for node in newest
    )


def _node(
    node: Node,
    journalled: NodeState,
    heartbeat: Trainer | None,
    members: Sequence[MemberStatus],
    stage: Stage | None,
    tokens_per_s: float | None,
) -> NodeView:
    if node.phase in (NodePhase.GONE, NodePhase.REFUSED):
        heartbeat, members, stage = None, (), None
    # The content digest after the version is not shown.
    held = Counter(member.policy.partition("@")[0] for member in members if member.policy).most_common(1)
    policy = held[0][0] if held else None
    if heartbeat is not None and heartbeat.node == node.id:
        policy, stage = str(PolicyVersion(heartbeat.timeline, heartbeat.step)), heartbeat.stage
    stage = next((member.stage for member in members if member.stage is not None), stage)
    return NodeView(
        slot=node.slot,
        node=node.id,
        role=node.role,
        phase=node.phase,
        reason=node.reason,
        market=node.market,
        policy=policy,
        since_s=node.since_s,
        price_usd_per_h=node.price_usd_per_h,
        unfit=next((_unfit_words(member) for member in members if member.unfit), ""),
        stage=stage,
        engines=max((member.engines for member in members), default=1),
        engines_serving=sum(member.serving for member in members),
        pool=str(node.pool or ""),
        state=state_now(journalled, node.role, members),
        tokens_per_s=tokens_per_s,
        running=sum(member.requests_running for member in members) if members else None,
        queue=sum(member.engine.waiting for member in members if member.engine) if members else None,
    )


def _unfit_words(member: MemberStatus) -> str:
    return member.unfit if member.engines == 1 else f"{member.node}: {member.unfit}"


def _checkpoint(reader: Reader, now_s: float) -> CheckpointView | None:
    listed = reader.listed
    if not listed:
        return None
    newest = listed[-1]
    return CheckpointView(newest.version, max(0.0, now_s - newest.created_at_s))


def _unreadable(reader: Reader) -> tuple[UnreadableView, ...]:
    """Return the unreadable objects that the controller journalled, and those found here."""
    journalled = reader.state.unreadable
    return tuple(UnreadableView(key, why) for key, why in (journalled | reader.unreadable.found).items())


def _daemon(reader: Reader, now_s: float) -> DaemonView:
    lease = reader.lease
    if lease is None:
        return DaemonView(alive=False)
    return DaemonView(reader.lease_watch.observe(lease, now_s), lease.host, lease.pid)


def _step_s(rows: Sequence[MetricsRow]) -> float | None:
    """Return the median time of a step; None before the second step."""
    gaps = [b.time_s - a.time_s for a, b in pairwise(rows)]
    return median(gaps) if gaps else None


def _tokens_per_s(rows: Sequence[MetricsRow]) -> float | None:
    if len(rows) < 2 or rows[-1].time_s <= rows[0].time_s:
        return None
    return sum(row.tokens for row in rows[1:]) / (rows[-1].time_s - rows[0].time_s)


# Reading a run repeatedly.


class RunObserver:
    """Reads a run repeatedly; each `observe` reads only what is new. Raises NotFound when there is no run.

    `whole` as in Reader.
    """

    def __init__(self, store: Store, *, whole: bool = False) -> None:
        self.reader = Reader(store, whole=whole)
        self.gateway: GatewayStatus | None = None  # as of the last look; None without a recent status
        self.rates = Rates()
        self._time = RunTime()
        self._watch = GatewayWatch(store, trust_first=True, unreadable=self.reader.unreadable)

    def observe(self) -> RunView:
        """Return the current view of the run. Raises StoreError."""
        self.gateway = self._watch.observe()
        self.rates.update(self.gateway)
        self.reader.refresh()
        return view_of(self.reader, self._now_s(), self.gateway, self.rates.by_machine)

    def settle(self, wait: Callable[[float], object] = time.sleep) -> float:
        """Read the run and return its time, for a command that looks once. Raises StoreError.

        If the controller runs on another machine and this machine's clock disagrees with the lease, wait some
        seconds for a renewal. Without a renewal the holder is dead, and this machine's clock is used.
        """
        self.reader.refresh()
        now_s = self._now_s()
        for _ in range(LEASE_CHECKS):
            if self.reader.state.phase in TERMINAL_RUN or self._time.is_settled(self.reader.lease):
                break
            wait(LEASE_CHECK_EVERY_S)
            self.reader.refresh()
            now_s = self._now_s()
        return now_s

    def _now_s(self) -> float:
        return self._time.now_s(self.reader.lease, self.reader.state.last_event_s)


class Rates:
    """Measures the tokens a second of each machine, from its engines' counts in two gateway statuses.

    A restarted engine counts from its restart.
    """

    def __init__(self) -> None:
        self._counts: dict[
            str, tuple[float, int]
        ] = {}  # by member: gateway uptime in seconds, engine's token count
        self.by_machine: Mapping[str, float] = {}

    def update(self, gateway: GatewayStatus | None) -> None:
        """Take the gateway's newest status; None without a recent one."""
        members = [] if gateway is None else gateway.members
        counts = {
            member.node: (gateway.up_s, member.engine.tokens) for member in members if member.engine and gateway
        }
        rates = defaultdict[str, float](float)
        moved = False
        for node, (at_s, tokens) in counts.items():
            before_s, before = self._counts.get(node, (at_s, tokens))
            moved |= at_s != before_s
            if at_s > before_s and tokens >= before:
                rates[machine_of(node)] += (tokens - before) / (at_s - before_s)
        if moved or not counts:
            self.by_machine = dict(rates)
        self._counts = counts


class RunTime:
    """The run's clock: the controller's, not the viewer's, which may be hours off.

    The holder of the lease writes its own time with each renewal. `wall` is this machine's clock, used until the
    first renewal is seen; `clock` is monotonic.
    """

    def __init__(
        self, wall: Callable[[], float] = time.time, clock: Callable[[], float] = awake_or_asleep_s
    ) -> None:
        self._wall, self._clock = wall, clock
        self._lease: Lease | None = None
        self._looked_at_s: float | None = None
        self._ahead_s: float | None = None  # run time minus `clock`, from the renewal that was seen soonest
        self._epoch = 0  # epoch of the controller whose clock that is

    def now_s(self, lease: Lease | None, journalled_s: float) -> float:
        """Return the seconds since the epoch, for the run.

        Args:
            lease: as just read.
            journalled_s: time of the last journal entry, a lower bound.
        """
        at_s = self._clock()
        if lease is not None and self._is_fresh(lease, at_s):
            self._see(lease, at_s)
        self._lease, self._looked_at_s = lease, at_s
        estimate_s = self._wall() + _set_by_s(lease) if self._ahead_s is None else at_s + self._ahead_s
        return max(estimate_s, journalled_s, 0.0 if lease is None else lease.run_time_s)

    def is_settled(self, lease: Lease | None) -> bool:
        """Return whether the run's time is known, or no renewal of this lease can be expected."""
        if self._ahead_s is not None or lease is None or lease.host == socket.gethostname():
            return True
        clock_lag_s = self._wall() - lease.renewed_at_s
        return abs(clock_lag_s) < lease.ttl_s or clock_lag_s > NO_SKEW_S

    def _is_fresh(self, lease: Lease, at_s: float) -> bool:
        """Return whether the lease was written since the previous look, less than TTL_S ago."""
        looked_at_s = self._looked_at_s
        return lease != self._lease and looked_at_s is not None and at_s - looked_at_s <= TTL_S

    def _see(self, lease: Lease, at_s: float) -> None:
        ahead_s = lease.run_time_s - at_s
        known_s = self._ahead_s if lease.epoch == self._epoch else None
        self._ahead_s, self._epoch = max(ahead_s, ahead_s if known_s is None else known_s), lease.epoch


def _set_by_s(lease: Lease | None) -> float:
    """Return how far the run's clock is ahead of the holder's wall clock, which may be set while it runs."""
    return 0.0 if lease is None else lease.run_time_s - lease.renewed_at_s
