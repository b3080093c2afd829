"""The daemon's and the run's numbers for Prometheus, see docs/monitoring.md.

They are read from what the last tick saw, when somebody asks. Only this machine can ask.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from checkpoint.records.metrics import Row, StepTiming
from policies.fleet.budget import spent_usd
from policies.model.events import Event, NodeMoved
from policies.model.state import RunState
from policies.model.vocabulary import NodePhase, Role, RunPhase
from policies.tick.snapshot import Snapshot

log = structlog.get_logger()

LOOPBACK = "127.0.0.1"
_HAD = (NodePhase.BOOTING, NodePhase.SERVING, NodePhase.DRAINING)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a tick saw and made of it. `row` is the newest logged step, `timing` of the newest that has one."""

    state: RunState
    snapshot: Snapshot
    row: Row | None
    timing: StepTiming | None
    took_s: float


@dataclass
class Exporter:
    """One daemon's numbers. Counters begin with it, as Prometheus' do; `run` is the label by which runs differ."""

    run: str
    registry: CollectorRegistry = field(default_factory=lambda: CollectorRegistry(auto_describe=False))

    def __post_init__(self) -> None:
        self._numbers = _Numbers(self.run)
        self.registry.register(self._numbers)
        ProcessCollector(namespace="grpo_daemon", registry=self.registry)

    def ticked(self, before: RunState, events: Iterable[Event], seen: Seen) -> None:
        """Take in a tick: `before` is the state that it began with, `events` what it decided."""
        for event in events:
            if isinstance(event, NodeMoved) and event.phase is NodePhase.GONE:
                node = before.nodes.get(event.node)
                if node is not None and node.phase in _HAD:
                    self._numbers.losses[node.role] += 1
        self._numbers.ticks += 1
        self._numbers.seen = seen

    def serve(self, port: int) -> None:
        """Answer on a port of this machine. One that is in use is a warning: the run goes on without."""
        try:
            start_http_server(port, LOOPBACK, self.registry)
        except OSError as error:
            log.warning("no_metrics", port=port, error=error.strerror)


class _Numbers(Collector):
    def __init__(self, run: str) -> None:
        self._run = run
        self.seen: Seen | None = None
        self.losses: Counter[Role] = Counter()
        self.ticks = 0

    def collect(self) -> Iterable[Metric]:
        seen = self.seen  # one tick's, whatever the daemon does meanwhile
        if seen is None:
            return
        state, trainer = seen.state, seen.snapshot.trainer
        phase = self._gauges("run_phase", "1 for the run's phase", "phase")
        for one in RunPhase:
            phase.add_metric([self._run, one], one is state.phase)
        yield phase
        if trainer is not None:
            yield self._gauge("run_step", "Finished optimizer steps", trainer.step)
            yield self._gauge("run_max_steps", "Where the run ends", trainer.max_steps)
            if trainer.stored_step is not None:
                yield self._gauge("run_stored_step", "Of the newest stored checkpoint", trainer.stored_step)
        for name in ("kl", "reward"):
            if seen.row is not None and name in seen.row.values:
                yield self._gauge(f"run_{name}", f"`{name}` of the newest logged step", seen.row.values[name])
        if seen.timing is not None:
            yield from self._timing(seen.timing)
        yield self._gauge("run_timeline", "What the run is on", state.timeline)
        yield self._counter("run_rollbacks", "Rollbacks of the run", len(state.rollbacks))
        yield from self._money(seen)
        yield from self._nodes(seen)
        yield self._gauge("daemon_tick_seconds", "What the last tick took", seen.took_s)
        yield self._counter("daemon_ticks", "Ticks of this daemon", self.ticks)

    def _timing(self, timing: StepTiming) -> Iterable[Metric]:
        yield self._gauge("run_step_seconds", "What the newest timed step took", timing.step_s)
        parts = {"generate": timing.generate_s, "train": timing.train_s, "sync": timing.sync_s}
        work = self._gauges("run_work_seconds", "Of a step: generation, training, new weights", "part")
        for part, seconds in parts.items():
            work.add_metric([self._run, part], seconds)
        yield work
        idle = self._gauges("run_idle_seconds", "Of a step: trainer and rollout nodes without work", "side")
        for side, seconds in {"trainer": timing.trainer_idle_s, "fleet": timing.fleet_idle_s}.items():
            idle.add_metric([self._run, side], seconds)
        yield idle
        if timing.staleness is not None:
            yield self._gauge("run_staleness", "Steps between sampling and training", timing.staleness)

    def _money(self, seen: Seen) -> Iterable[Metric]:
        spent = spent_usd(seen.state, seen.snapshot.now_s) + seen.snapshot.controller.usd
        per_h = sum(node.usd_per_h for node in seen.state.nodes.values()) + seen.snapshot.controller.usd_per_h
        yield self._gauge("run_spent_usd", "What the run's machines have cost", spent)
        yield self._gauge("run_usd_per_hour", "What they cost now", per_h)

    def _nodes(self, seen: Seen) -> Iterable[Metric]:
        counted = Counter((node.role, node.market, node.phase) for node in seen.state.nodes.values())
        nodes = self._gauges("run_nodes", "Nodes", "role", "market", "phase")
        for labels, count in counted.items():
            nodes.add_metric([self._run, *labels], count)
        yield nodes
        losses = CounterMetricFamily("grpo_run_losses", "Machines lost under this daemon", labels=["run", "role"])
        for role in Role:
            losses.add_metric([self._run, role], self.losses[role])
        yield losses

    def _gauges(self, name: str, says: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"grpo_{name}", says, labels=["run", *labels])

    def _gauge(self, name: str, says: str, value: float) -> GaugeMetricFamily:
        family = self._gauges(name, says)
        family.add_metric([self._run], value)
        return family

    def _counter(self, name: str, says: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"grpo_{name}", says, labels=["run"])
        family.add_metric([self._run], value)
        return family
