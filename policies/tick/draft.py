"""A tick in progress. Events are folded as they are decided, so each decision sees the effects of earlier ones."""

from __future__ import annotations

from dataclasses import dataclass, field

from grpo_orch.policies.costs import disks
from grpo_orch.policies.model.events import Event, JobExited, JobRestarted, MachineBought, NodeMoved, RunMoved
from grpo_orch.policies.model.fold import apply, copied
from grpo_orch.policies.model.reports import is_news
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.model.state import Node, RunState
from grpo_orch.policies.model.vocabulary import NodePhase, Refusal, RunPhase
from grpo_orch.policies.tick.snapshot import Machine, Snapshot


@dataclass(slots=True)
class Tick:
    """State and events of one tick. Mutable, and used for that tick only.

    `state` is a draft: do not iterate over its mappings while events are decided.
    """

    state: RunState
    snapshot: Snapshot
    spec: RunSpec
    events: list[Event] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state = copied(self.state)

    def emit(self, event: Event, reason: str) -> None:
        """Add an event with its reason. Raises IllegalMove when a phase table forbids it."""
        self.state = apply(self.state, event, self.snapshot.now_s, self.state.epoch)
        self.events.append(event)
        self.reasons.append(reason)

    def report(self, event: Event, reason: str) -> None:
        """Add an event, unless it reports the same state as the last report of its topic."""
        if is_news(self.state.reports, event):
            self.emit(event, reason)

    def move(self, node: Node, phase: NodePhase, reason: str, refusal: Refusal | None = None) -> None:
        self.emit(NodeMoved(node.id, phase, reason, refusal), f"{node.id} {phase}: {reason}")

    def move_run(self, phase: RunPhase, reason: str) -> None:
        since_s = self.state.parked_at_s
        parked_s = None if since_s is None else self.waited_s(since_s)
        self.emit(RunMoved(phase, reason, parked_s), f"run {phase}: {reason}")

    def bought(self, machine: Machine) -> None:
        prices = machine.price_usd_per_h, machine.on_demand_usd_per_h
        disk = None
        if machine.pool is not None:
            disk = disks.usd_per_h_in(self.spec, self.state.nodes[machine.node].role, machine.pool)
        event = MachineBought(machine.node, machine.market, machine.where, *prices, machine.pool, disk)
        self.emit(event, f"{machine.node} costs {machine.price_usd_per_h:.2f} USD/h")

    def exited(self, node: Node, exit_code: int, reason: str) -> None:
        step = self.snapshot.trainer.step if self.snapshot.trainer else 0
        event = JobExited(node.id, node.attempt, exit_code, step, reason)
        self.emit(event, f"{node.id}: its work ended with {exit_code}")

    def restart(self, node: Node, reason: str) -> None:
        self.emit(JobRestarted(node.id, node.attempt + 1, reason), f"{node.id}: {reason}")

    def waited_s(self, since_s: float) -> float:
        """Return the seconds since then, for waits before a retry."""
        return self.snapshot.now_s - since_s

    def silent_s(self, since_s: float) -> float:
        """Return the seconds since then in which this controller would have noticed activity of a node."""
        return self.snapshot.silent_s(since_s)

    def node(self, node_id: str) -> Node | None:
        return self.state.nodes.get(node_id)
