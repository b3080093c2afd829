"""A run in a memory store, written as daemon, trainer and rehearsal would write it, at chosen times."""

from __future__ import annotations

import itertools
from pathlib import Path

from grpo_orch.checkpoint.journal import Journal
from grpo_orch.checkpoint.records import documents, metrics
from grpo_orch.checkpoint.records.documents import RehearsedFault, write_fault
from grpo_orch.checkpoint.records.metrics import MetricsRow
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import transfer
from grpo_orch.checkpoint.stream.catalog import Catalog
from grpo_orch.checkpoint.stream.manifest import files_below
from grpo_orch.orchestrator.views.reader import Reader
from grpo_orch.orchestrator.views.report import Report, build_report
from grpo_orch.orchestrator.views.run_view import view_of
from grpo_orch.orchestrator.views.view_model import RunView
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.events import (
    Diverged,
    DivergenceSuspected,
    Event,
    FleetMoved,
    GatewayRestarted,
    JobExited,
    JobRestarted,
    MachineBought,
    NodeMoved,
    NodeRequested,
    RollbackStarted,
    RunMoved,
    TimelineForked,
    TimelineResumed,
    TrainerFenced,
)
from grpo_orch.policies.model.spec import (
    Dataset,
    KlPolicy,
    PoliciesSpec,
    Prices,
    Rehearsal,
    RehearsedPrices,
    RolloutSpec,
    RunSpec,
    TrainerSpec,
)
from grpo_orch.policies.model.timelines import Fork, Skipped
from grpo_orch.policies.model.vocabulary import Cause, Market, NodePhase, PolicyVersion, Role, RunPhase
from grpo_orch.policies.serving.gateway_status import GatewayStatus
from grpo_orch.policies.tick.snapshot import Trainer

T0 = 1_700_000_000.0
EVIDENCE = ("KL 3.21, 41 times its calm level of 0.078", "reward 0.1, down from 0.8")
FIRST_FORK = Fork(
    timeline=1,
    start="0-5",
    changes={"learning_rate": 0.0005, "beta": 0.04},
    skipped=(Skipped(0, 7, 10),),
    reason=f"diverged since step 7: {EVIDENCE[0]}",
)
_names = itertools.count()
REHEARSAL = Rehearsal(
    prices=RehearsedPrices(
        trainer=Prices(on_demand_usd_per_h=7.2, spot_usd_per_h=3.6),
        rollout=Prices(on_demand_usd_per_h=3.6, spot_usd_per_h=0.9),
    ),
)


class World:
    """One run. Times are seconds after T0."""

    def __init__(
        self,
        rehearse: Rehearsal | None = REHEARSAL,
        kl_limit: float | None = 0.5,
        rollout: RolloutSpec | None = None,
    ) -> None:
        self.store = Store(f"memory://views-{next(_names)}")
        spec = RunSpec(
            name="digits",
            storage=self.store.url,
            trainer=TrainerSpec(model="m", dataset=Dataset(path="d"), reward_funcs=("rewards.digits",)),
            grpo={"learning_rate": 0.001, "beta": 0.02},
            rollout=rollout or RolloutSpec(),
            policies=PoliciesSpec(kl=KlPolicy(limit=kl_limit)),
            rehearse=rehearse,
        )
        documents.create_run(self.store, documents.RunRecord(1, "id", T0, spec))
        self._prices = rehearse is not None
        self._journal = Journal(self.store, "build-7/42")

    def take_over(self, at_s: float, pid: int = 42) -> None:
        self._journal.take_over(T0 + at_s, "build-7", pid, "up")

    def happens(self, at_s: float, *events: Event) -> None:
        self._journal.append(T0 + at_s, events)

    def moves(self, at_s: float, node: str, phase: NodePhase, reason: str = "because") -> None:
        """A machine that is seen has its price: a trainer 7.20, a rollout node 0.90, on demand 3.60."""
        events: list[Event] = [NodeMoved(node, phase, reason)]
        if phase is NodePhase.BOOTING and self._prices:
            trainer = node.startswith(Role.TRAINER)
            prices = (Market.ON_DEMAND, "", 7.2, 7.2) if trainer else (Market.SPOT, "", 0.9, 3.6)
            events.append(MachineBought(node, *prices))
        self.happens(at_s, *events)

    def asks_for(self, at_s: float, node: str) -> None:
        self.happens(at_s, requested(node))

    def starts(self) -> None:
        """A trainer and two rollout nodes, all at work after 10 s."""
        self.take_over(0)
        for node in ("trainer-0-i1", "rollout-0-i1", "rollout-1-i1"):
            self.asks_for(1, node)
            self.moves(4, node, NodePhase.BOOTING)
            self.moves(10, node, NodePhase.SERVING)
        self.happens(10, RunMoved(RunPhase.TRAINING, "the trainer sent its first heartbeat"))

    def logs(self, at_s: float, step: int, timeline: int = 0, **values: float) -> None:
        named = {name.replace("__", "/"): value for name, value in values.items()}
        metrics.MetricsWriter(self.store).append(MetricsRow(timeline, step, T0 + at_s, 1, named))

    def beats(self, at_s: float, step: int, max_steps: int = 40, timeline: int = 0) -> None:
        beat = Trainer("trainer-0-i1", 1 + timeline, timeline, step, max_steps, "generating", T0 + at_s)
        documents.TRAINER.write(self.store, beat)

    def diverges(self, at_s: float, onset_step: int, step: int, timeline: int = 0) -> None:
        """The trainer's guard trips, and its work ends."""
        self.happens(
            at_s,
            JobExited("trainer-0-i1", 1 + timeline, exit_codes.DIVERGED, step),
            Diverged(timeline, step, onset_step, EVIDENCE, "trainer"),
        )

    def begins_rollback(self, at_s: float, fork: Fork, from_step: int, cause: Cause = Cause.DIVERGED) -> None:
        self.happens(at_s, RollbackStarted(fork, cause, from_step, fork.reason))

    def rolls_back(self, at_s: float, fork: Fork, from_step: int, cause: Cause = Cause.DIVERGED) -> None:
        """All of it but the probation; the trainer and the gateway beside it come back 4 s later."""
        timeline = fork.timeline
        self.begins_rollback(at_s, fork, from_step, cause)
        restarted = JobRestarted("trainer-0-i1", 1 + timeline, f"continues with timeline {timeline}")
        self.happens(at_s + 1, TimelineForked(timeline))
        if cause is Cause.USER:  # the trainer was at work
            self.happens(at_s + 2, JobExited("trainer-0-i1", timeline, exit_codes.FENCED, from_step))
        self.happens(at_s + 2, TrainerFenced(timeline), restarted)
        start_step = 0 if fork.start_at is None else fork.start_at.step
        self.happens(at_s + 4, GatewayRestarted(f"gateway-{timeline}"), TimelineResumed(timeline, start_step))
        self.happens(at_s + 5, FleetMoved(timeline, f"{timeline}-{start_step}"))

    def is_steered(self, at_s: float) -> None:
        lease = documents.Lease("build-7/42", "another-host.invalid", 42, "1", 1, T0 + at_s, 15.0, T0 + at_s)
        documents.LEASE.write(self.store, lease)

    def saves(self, at_s: float, step: int, folder: Path, timeline: int = 0) -> None:
        """A checkpoint of one file, as the uploader stores it."""
        (folder / "weights.safetensors").write_bytes(b"w")
        catalog = Catalog(self.store, "trainer-0-i1")
        transfer.upload(self.store, catalog, files_below(folder), PolicyVersion(timeline, step), T0 + at_s, {})

    def rehearses(self, at_s: float, number: int, target: str, at_step: int, fault: str = "kill") -> None:
        write_fault(self.store, RehearsedFault(number, fault, target, at_step, T0 + at_s, f"took {target}"))


def requested(node: str) -> NodeRequested:
    """`rollout-0-i2`: on spot; a trainer: on demand."""
    slot, incarnation = node.rsplit("-i", 1)
    role = Role(slot.split("-", maxsplit=1)[0])
    market = Market.ON_DEMAND if role is Role.TRAINER else Market.SPOT
    return NodeRequested(node, role, slot, int(incarnation), market, "first")


def run_view(store: Store, now_s: float, gateway: GatewayStatus | None) -> RunView:
    """What is seen by who looks once."""
    return next_view(Reader(store), now_s, gateway)


def next_view(reader: Reader, now_s: float, gateway: GatewayStatus | None = None) -> RunView:
    """What is seen by who looks again."""
    reader.refresh()
    return view_of(reader, now_s, gateway)


def report_of(store: Store, now_s: float) -> Report:
    """What `report` shows at that time."""
    reader = Reader(store, whole=True)
    reader.refresh()
    return build_report(reader, now_s)


def look(world: World, at_s: float, gateway: GatewayStatus | None = None) -> RunView:
    return run_view(world.store, T0 + at_s, gateway)


def diverging() -> World:
    """Ten steps, of which those from 7 on are off: watched at 9, diverged at 10."""
    world = World()
    world.starts()
    for step in range(1, 11):
        world.logs(20 + 2 * step, step, reward=step / 10, kl=step / 100 if step < 7 else 3.0)
    world.happens(39, DivergenceSuspected(0, 9, 7, EVIDENCE[:1]))
    return world


def training(folder: Path) -> World:
    """Ten steps of 2 s, of 100 tokens each; a daemon, and a checkpoint of step 5."""
    world = World()
    world.starts()
    for step in range(1, 11):
        world.logs(20 + 2 * step, step, reward=step / 10, kl=step / 100, orch__tokens=100.0)
    world.beats(41, 10)
    world.is_steered(40)
    world.saves(35, 5, folder)
    return world
