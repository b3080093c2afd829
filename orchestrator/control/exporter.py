"""Prometheus metrics of the daemon and the run, see docs/metrics.md.

Each request returns the values of the last tick. The port listens on the loopback interface only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from grpo_orch.checkpoint.records.metrics import MetricsRow, StepTiming
from grpo_orch.policies.fleet.budget import spent_usd
from grpo_orch.policies.model.events import Event, NodeMoved
from grpo_orch.policies.model.state import RunState
from grpo_orch.policies.model.vocabulary import NodePhase, Role, RunPhase
from grpo_orch.policies.tick.snapshot import Snapshot

log = structlog.get_logger()

LOOPBACK = "127.0.0.1"
_HAS_MACHINE = (NodePhase.BOOTING, NodePhase.SERVING, NodePhase.DRAINING)
_COUNTERS = ("run_rollbacks", "run_losses", "daemon_ticks")
_Values = Mapping[tuple[str, ...], float]  # by the labels' values
_Family = tuple[str, str, tuple[str, ...], _Values | None]


@dataclass(frozen=True, slots=True)
class Seen:
    """State and observations of a tick. `row` is the newest logged step, `timing` is of the newest timed step."""

    state: RunState
    snapshot: Snapshot
    row: MetricsRow | None
    timing: StepTiming | None
    took_s: float


class Exporter(Collector):
    """One daemon's metrics. Counters start at 0 with the daemon; `run` is the label of the run."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._seen: Seen | None = None
        self._losses = Counter[tuple[str, ...]]({(role,): 0 for role in Role})
        self._ticks = 0
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(namespace="grpo_daemon", registry=self.registry)

    def ticked(self, before: RunState, events: Iterable[Event], seen: Seen) -> None:
        """Record a tick: `before` is the state before it, `events` are its decisions."""
        for event in events:
            if isinstance(event, NodeMoved) and event.phase is NodePhase.GONE:
                node = before.nodes.get(event.node)
                if node is not None and node.phase in _HAS_MACHINE:
                    self._losses[node.role,] += 1
        self._ticks += 1
        self._seen = seen

    def serve(self, port: int) -> None:
        """Serve metrics on a port of this machine. If the port is in use, log a warning and continue."""
        try:
            start_http_server(port, LOOPBACK, self.registry)
        except OSError as error:
            log.warning("metrics_port_failed", port=port, error=error.strerror)

    def collect(self) -> Iterable[Metric]:
        seen = self._seen  # a single tick's, though the daemon ticks on meanwhile
        for name, description, labels, values in () if seen is None else self._families(seen):
            if values is not None:
                kind: type[CounterMetricFamily | GaugeMetricFamily]
                kind = CounterMetricFamily if name in _COUNTERS else GaugeMetricFamily
                family = kind(f"grpo_{name}", description, labels=["run", *labels])
                for label_values, value in values.items():
                    family.add_metric([self._run, *label_values], value)
                yield family

    def _families(self, seen: Seen) -> Iterable[_Family]:
        """Yield a family's name, description, labels, and its values, if known, by the labels' values."""
        state, trainer, timing, controller = (
            seen.state,
            seen.snapshot.trainer,
            seen.timing,
            seen.snapshot.controller,
        )
        nodes, logged = state.nodes.values(), {} if seen.row is None else seen.row.values
        phases: _Values = {(phase,): float(phase is state.phase) for phase in RunPhase}
        yield "run_phase", "1 for the run's phase, 0 for every other", ("phase",), phases
        if trainer is not None:
            yield "run_step", "Finished optimizer steps of the trainer", (), {(): trainer.step}
            yield "run_max_steps", "Last step of the run", (), {(): trainer.max_steps}
            stored: _Values | None = None if trainer.stored_step is None else {(): trainer.stored_step}
            yield "run_stored_step", "Step of the newest stored checkpoint", (), stored
        for name in ("kl", "reward"):
            value: _Values | None = {(): logged[name]} if name in logged else None
            yield f"run_{name}", f"`{name}` of the newest logged step", (), value
        if timing is not None:
            work: _Values = {
                ("generate",): timing.generate_s,
                ("train",): timing.train_s,
                ("sync",): timing.sync_s,
            }
            idle: _Values = {("trainer",): timing.trainer_idle_s, ("fleet",): timing.fleet_idle_s}
            stale: _Values | None = None if timing.staleness is None else {(): timing.staleness}
            yield "run_step_seconds", "Duration of the newest timed step", (), {(): timing.step_s}
            yield "run_work_seconds", "Seconds of that step by part: generate, train, sync", ("part",), work
            yield "run_idle_seconds", "Idle seconds in that step by side: trainer, fleet", ("side",), idle
            yield "run_staleness", "Optimizer steps between its sampling and its training", (), stale
        yield "run_timeline", "Number of the current timeline", (), {(): state.timeline}
        yield "run_rollbacks", "Rollbacks of the run", (), {(): len(state.rollbacks)}
        spent = spent_usd(state, seen.snapshot.now_s) + controller.usd
        yield "run_spent_usd", "USD spent so far; with a budget, a controller machine included", (), {(): spent}
        per_h = sum(node.usd_per_h for node in nodes) + controller.usd_per_h
        yield "run_usd_per_hour", "USD per hour of the present machines, a controller's included", (), {(): per_h}
        counted = Counter[tuple[str, ...]]((node.role, node.market, node.phase) for node in nodes)
        yield "run_nodes", "Nodes by role, market and phase", ("role", "market", "phase"), counted
        yield "run_losses", "Machines preempted or lost under this daemon", ("role",), self._losses
        yield "daemon_tick_seconds", "Duration of the last tick", (), {(): seen.took_s}
        yield "daemon_ticks", "Ticks of this daemon", (), {(): self._ticks}
