"""Prometheus metrics of the daemon and the run, see docs/metrics.md.

Each request returns the values of the last tick. The port listens on the loopback interface only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

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


@dataclass(frozen=True, slots=True)
class Seen:
    """State and observations of a tick. `row` is the newest logged step, `timing` is of the newest timed step."""

    state: RunState
    snapshot: Snapshot
    row: MetricsRow | None
    timing: StepTiming | None
    took_s: float


@dataclass
class Exporter:
    """One daemon's metrics. Counters start at 0 with the daemon; `run` is the label of the run."""

    run: str
    registry: CollectorRegistry = field(default_factory=lambda: CollectorRegistry(auto_describe=False))

    def __post_init__(self) -> None:
        self._collector = _RunCollector(self.run)
        self.registry.register(self._collector)
        ProcessCollector(namespace="grpo_daemon", registry=self.registry)

    def ticked(self, before: RunState, events: Iterable[Event], seen: Seen) -> None:
        """Record a tick: `before` is the state before it, `events` are its decisions."""
        for event in events:
            if isinstance(event, NodeMoved) and event.phase is NodePhase.GONE:
                node = before.nodes.get(event.node)
                if node is not None and node.phase in _HAS_MACHINE:
                    self._collector.losses[node.role] += 1
        self._collector.ticks += 1
        self._collector.seen = seen

    def serve(self, port: int) -> None:
        """Serve metrics on a port of this machine. If the port is in use, log a warning and continue."""
        try:
            start_http_server(port, LOOPBACK, self.registry)
        except OSError as error:
            log.warning("metrics_port_failed", port=port, error=error.strerror)


class _RunCollector(Collector):
    def __init__(self, run: str) -> None:
        self._run = run
        self.seen: Seen | None = None
        self.losses: Counter[Role] = Counter()
        self.ticks = 0

    def collect(self) -> Iterable[Metric]:
        seen = self.seen  # a single tick's, though the daemon ticks on meanwhile
        if seen is None:
            return
        state, trainer = seen.state, seen.snapshot.trainer
        phases = self._gauges("run_phase", "1 for the run's phase, 0 for every other", "phase")
        for phase in RunPhase:
            phases.add_metric([self._run, phase], phase is state.phase)
        yield phases
        if trainer is not None:
            yield self._gauge("run_step", "Finished optimizer steps of the trainer", trainer.step)
            yield self._gauge("run_max_steps", "Last step of the run", trainer.max_steps)
            if trainer.stored_step is not None:
                yield self._gauge("run_stored_step", "Step of the newest stored checkpoint", trainer.stored_step)
        for name in ("kl", "reward"):
            if seen.row is not None and name in seen.row.values:
                yield self._gauge(f"run_{name}", f"`{name}` of the newest logged step", seen.row.values[name])
        if seen.timing is not None:
            yield from self._timing(seen.timing)
        yield self._gauge("run_timeline", "Number of the current timeline", state.timeline)
        yield self._counter("run_rollbacks", "Rollbacks of the run", len(state.rollbacks))
        yield from self._costs(seen)
        yield from self._nodes(seen)
        yield self._gauge("daemon_tick_seconds", "Duration of the last tick", seen.took_s)
        yield self._counter("daemon_ticks", "Ticks of this daemon", self.ticks)

    def _timing(self, timing: StepTiming) -> Iterable[Metric]:
        yield self._gauge("run_step_seconds", "Duration of the newest timed step", timing.step_s)
        parts = {"generate": timing.generate_s, "train": timing.train_s, "sync": timing.sync_s}
        work = self._gauges("run_work_seconds", "Seconds of that step by part: generate, train, sync", "part")
        for part, seconds in parts.items():
            work.add_metric([self._run, part], seconds)
        yield work
        idle = self._gauges("run_idle_seconds", "Idle seconds in that step by side: trainer, fleet", "side")
        for side, seconds in {"trainer": timing.trainer_idle_s, "fleet": timing.fleet_idle_s}.items():
            idle.add_metric([self._run, side], seconds)
        yield idle
        if timing.staleness is not None:
            yield self._gauge(
                "run_staleness", "Optimizer steps between its sampling and its training", timing.staleness
            )

    def _costs(self, seen: Seen) -> Iterable[Metric]:
        spent = spent_usd(seen.state, seen.snapshot.now_s) + seen.snapshot.controller.usd
        per_h = sum(node.usd_per_h for node in seen.state.nodes.values()) + seen.snapshot.controller.usd_per_h
        yield self._gauge("run_spent_usd", "USD spent so far; with a budget, a controller machine included", spent)
        yield self._gauge(
            "run_usd_per_hour", "USD per hour of the present machines, a controller's included", per_h
        )

    def _nodes(self, seen: Seen) -> Iterable[Metric]:
        counted = Counter((node.role, node.market, node.phase) for node in seen.state.nodes.values())
        nodes = self._gauges("run_nodes", "Nodes by role, market and phase", "role", "market", "phase")
        for labels, count in counted.items():
            nodes.add_metric([self._run, *labels], count)
        yield nodes
        losses = CounterMetricFamily(
            "grpo_run_losses", "Machines preempted or lost under this daemon", labels=["run", "role"]
        )
        for role in Role:
            losses.add_metric([self._run, role], self.losses[role])
        yield losses

    def _gauges(self, name: str, description: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"grpo_{name}", description, labels=["run", *labels])

    def _gauge(self, name: str, description: str, value: float) -> GaugeMetricFamily:
        family = self._gauges(name, description)
        family.add_metric([self._run], value)
        return family

    def _counter(self, name: str, description: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"grpo_{name}", description, labels=["run"])
        family.add_metric([self._run], value)
        return family
