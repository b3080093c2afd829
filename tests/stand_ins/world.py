"""The simulated environment of the policy layer: a cloud, a gateway and a trainer as numbers, with a set clock.

It stands in for machines and processes in tests of `policies` alone; the real ones are tested elsewhere. Steer a
`World` by `tick` and `advance`, or by `run`, `until`, `wait` and `let_pass`; its fields are what tests disturb.
`priced`, `two_markets`, `drought`, `parked` and `world_of` make those that several tests begin with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from grpo_orch.orchestrator.simulate.simulated_work import retain
from grpo_orch.policies.control.decide import decide, is_done
from grpo_orch.policies.control.rollback import newest_before
from grpo_orch.policies.costs.steps import StepShape
from grpo_orch.policies.detect.divergence import Health, Verdict
from grpo_orch.policies.fleet.budget import spent_usd
from grpo_orch.policies.fleet.plan import IDLE_MIN_S
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.events import (
    ControllerTookOver,
    Event,
    NodeRequested,
    RollbackStarted,
    RunCreated,
    RunMoved,
    SpecProved,
)
from grpo_orch.policies.model.fold import fold
from grpo_orch.policies.model.phases import FILLING_NODE
from grpo_orch.policies.model.pools import Pool, PoolOffer
from grpo_orch.policies.model.spec import (
    Budget,
    Dataset,
    KlPolicy,
    PoliciesSpec,
    Replicas,
    RolloutSpec,
    RunSpec,
    TrainerSpec,
    generates_itself,
)
from grpo_orch.policies.model.state import Node, RunState
from grpo_orch.policies.model.timelines import Fork
from grpo_orch.policies.model.vocabulary import (
    MachineState,
    Market,
    NodePhase,
    PolicyVersion,
    Refusal,
    Role,
    RunPhase,
    role_of,
    slot_and_incarnation,
)
from grpo_orch.policies.serving.gateway_status import MemberStatus
from grpo_orch.policies.tick.snapshot import (
    Action,
    Command,
    Confirm,
    ControllerVerdict,
    Gateway,
    Launch,
    LaunchRefused,
    Machine,
    RequestStop,
    Snapshot,
    Stored,
    Terminate,
    Trainer,
    WriteFork,
)

E = TypeVar("E", bound=Event)
BOOT_S = 5.0
STEP_S = 1.0
HOUR_S = 3600.0
PARKS_IN_S = IDLE_MIN_S + 60.0  # a trainer of this world boots in seconds
ON_DEMAND = "rollout on demand"
MOST = {"trainer on demand": 5.0, "rollout on spot": 2.0, ON_DEMAND: 5.0}
# USD an hour, by kind of machine.
Paid = Mapping[tuple[Role, Market], float]
PAID: Paid = {(Role.TRAINER, Market.ON_DEMAND): 36.0, (Role.ROLLOUT, Market.SPOT): 3.6}
USD: Paid = {
    (Role.TRAINER, Market.ON_DEMAND): 4.0,
    (Role.ROLLOUT, Market.ON_DEMAND): 4.0,
    (Role.ROLLOUT, Market.SPOT): 1.0,
}
# SkyPilot's `best` on AWS: 1.82 USD an hour for the disk of each machine.
DISKS = {"infra": "aws/us-east-1", "disk_tier": "best"}
GRPO = {"beta": 0.04, "learning_rate": 1e-3, "save_steps": 2}


class Folded:
    """The state after the first `count` entries of a history, so that no entry is folded twice."""

    def __init__(self) -> None:
        self.count, self.state = 0, RunState()

    def __deepcopy__(self, memo: dict[int, object]) -> Folded:
        same = Folded()
        same.count, same.state = self.count, self.state
        return same


def spec(max_replicas: int = 2, **policies: object) -> RunSpec:
    return RunSpec(
        name="sim",
        storage="memory://sim",
        trainer=TrainerSpec(model="m", dataset=Dataset(path="d"), reward_funcs=("r.f",)),
        grpo={},
        rollout=RolloutSpec(replicas=Replicas(min=1, max=max_replicas)),
        policies=PoliciesSpec(**policies),  # type: ignore[arg-type]  # keys are PoliciesSpec's own
    )


def capped(usd: float | None = None, usd_per_h: float | None = None, max_replicas: int = 2) -> RunSpec:
    return replace(spec(max_replicas), budget=Budget(usd=usd, usd_per_h=usd_per_h))


def with_disks(run: RunSpec) -> RunSpec:
    sections = replace(run.trainer, resources=DISKS), replace(run.rollout, resources=DISKS)
    return replace(run, cloud="sky", trainer=sections[0], rollout=sections[1])


def with_kl(**kl: object) -> RunSpec:
    base, policy = spec(), KlPolicy(**kl)  # type: ignore[arg-type]  # keys are KlPolicy's own
    return replace(base, grpo=dict(GRPO), policies=replace(base.policies, kl=policy))


@dataclass
class Bought:
    """The machines that rollout nodes were on in a stretch of time, and their hours."""

    machines: set[str] = field(default_factory=set)
    hours: float = 0.0


@dataclass
class World:
    """The journal is `history`; everything else is the world outside the controller."""

    spec: RunSpec = field(default_factory=spec)
    now_s: float = 1000.0
    max_steps: int = 10
    history: list[tuple[int, float, tuple[Event, ...]]] = field(default_factory=list)
    machines: dict[str, Machine] = field(default_factory=dict)
    booted_at_s: dict[tuple[str, int], float] = field(default_factory=dict)
    up_at_s: dict[str, float] = field(default_factory=dict)
    launches: list[tuple[str, int]] = field(default_factory=list)
    confirmed: list[str] = field(default_factory=list)
    proved: bool = False  # a trainer has trained before
    refusing: bool = False
    refusing_rollouts: bool = False
    launch_s: float = 0.0  # from the order until the machine is up
    boot_s: dict[Role, float] = field(default_factory=dict)  # from there until its work is; BOOT_S by default
    fails: dict[Role, int] = field(default_factory=dict)  # the exit code with which the work ends instead
    refused: list[LaunchRefused] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    steps: float = 0.0
    beat: Trainer | None = None
    store_slow: bool = False
    timelines: dict[tuple[str, int], int] = field(default_factory=dict)  # of each trainer's attempt, as launched
    forks: list[Fork] = field(default_factory=list)  # in the store
    checkpoints: list[PolicyVersion] = field(default_factory=list)
    save_steps: int = 2
    # By timeline: the step at which its trainer's guard trips, and the onset that it tells.
    trips: dict[int, tuple[int, int]] = field(default_factory=dict)
    guarded: bool = True  # the trainer's guard tells; else only the controller's own detectors do
    storing_s: float = 3.0  # how long a trainer takes to store what it has, once it is asked to end
    stops_at_s: float | None = None
    moved_at_s: float = -math.inf  # when what its machine stores last got on
    looking: bool = True  # whether a look finds the checkpoints
    dt_s: float = 0.5  # of `advance`, `run` and `until`
    pace_s: float = 10.0  # of `wait` and `let_pass`
    paid: Paid | None = None  # what machines cost; None: nobody knows, nor where they are
    most: dict[str, float] | None = None  # what the cloud says that each kind may cost
    offers: tuple[PoolOffer, ...] = ()
    has: frozenset[str] | None = None  # the zones that have machines for rollout nodes
    no_spot: bool = False
    no_demand: bool = False  # for rollout nodes
    refusal: Refusal = Refusal.NO_CAPACITY
    refused_after_s: float = 0.0
    answers: dict[str, float] = field(default_factory=dict)  # by node: when its refusal is told
    markets: dict[str, Market] = field(default_factory=dict)
    pools: dict[str, Pool | None] = field(default_factory=dict)
    ends_in_s: float = 0.0  # how long the cloud takes to have a machine back
    away: bool = False  # the cloud does not answer
    cut_off: bool = False  # the trainer: nobody hears it, nor can it store
    one_trainer: bool = False  # whether a second one beside the first is an error
    shape: StepShape | None = None  # of a step, as measured
    sees: Callable[[Snapshot], Snapshot] = lambda seen: seen  # what the controller takes it for
    folded: Folded = field(default_factory=Folded)

    def __post_init__(self) -> None:
        self.journal((ControllerTookOver("here", 1, "up"), RunCreated("sim", "sim-0")))
        if self.proved:
            self.journal((SpecProved(),))

    @property
    def state(self) -> RunState:
        if new := self.history[self.folded.count :]:
            self.folded.state = fold(new, self.folded.state)
            self.folded.count = len(self.history)
        return self.folded.state

    def of(self, *kinds: type[E]) -> list[E]:
        """What the journal has of these kinds of events, in order."""
        return [event for _, _, events in self.history for event in events if isinstance(event, kinds)]

    def journal(self, events: tuple[Event, ...]) -> None:
        self.history.append((len(self.history) + 1, self.now_s, events))

    def take_over(self) -> None:
        self.journal((ControllerTookOver("elsewhere", 2, "resume"),))

    def resume(self) -> None:
        """As a user does with a run that has ended."""
        self.journal((ControllerTookOver("elsewhere", 2, "resume"), RunMoved(RunPhase.STARTING, "resumed")))

    def snapshot(self) -> Snapshot:
        policy = None if self.beat is None else f"{self.beat.timeline}-{self.beat.step}@1f2e"
        members = {
            name: MemberStatus(name, "boot", "10.0.0.2:1", policy, True, False, 0, 0.1)
            for name, machine in self.machines.items()
            if name.startswith(Role.ROLLOUT) and self._works(machine)
        }
        for node in [node for node, at_s in self.answers.items() if at_s <= self.now_s]:
            self.refused.append(LaunchRefused(node, self.refusal, "nothing to be had"))
            del self.answers[node]
        refused, self.refused = tuple(self.refused), []
        state = self.state
        seen = Snapshot(
            now_s=self.now_s,
            machines=None if self.away else {name: self.report(one) for name, one in self.machines.items()},
            prices=self.most,
            pools=self.offers,
            step_shape=self.shape,
            members=members if self._trainer() and not self.cut_off else None,
            gateway=Gateway("g1" if self._trainer() else None, self._gateway_age_s()),
            trainer=self.beat,
            trainer_moved_at_s=self.moved_at_s,
            refused=refused,
            commands=tuple(self.commands),
            verdict=self._watched(state.timeline),
            store=Stored(
                checkpoints=tuple(self.checkpoints) if self.looking else None,
                ever_stored=bool(self.checkpoints),
                timeline=max((fork.timeline for fork in self.forks), default=0),
            ),
        )
        return self.sees(seen)

    def report(self, machine: Machine) -> Machine:
        """The machine with what the cloud tells of its market, its pool and its price."""
        if self.paid is None:
            return machine
        role, market = role_of(machine.node), self.markets.get(machine.node, machine.market)
        usd = self.paid[role, market]
        whole = self.paid.get((role, Market.ON_DEMAND), 0.0)
        pool = self.pools.get(machine.node)
        return replace(machine, market=market, pool=pool, price_usd_per_h=usd, on_demand_usd_per_h=whole)

    def tick(self, *, journal_only: bool = False) -> bool:
        """Run the controller once. Returns whether nothing is left to steer."""
        snapshot = self.snapshot()
        state = self.state
        decision = decide(state, snapshot, self.spec)
        if decision.events:
            self.journal(decision.events)
        if (cap := self.spec.budget.usd_per_h) is not None:
            assert sum(node.usd_per_h for node in self.state.nodes.values()) <= cap, "over the cap an hour"
        if journal_only:
            return False  # the controller died between intent and action
        for action in decision.actions:
            self.act(action)
        return not decision.actions and is_done(self.state, snapshot)

    def act(self, action: Action) -> None:
        match action:
            case Launch():
                role = role_of(action.slot)
                if self.refuses(action):
                    self.answers.setdefault(action.node, self.now_s + self.refused_after_s)
                    return
                if role is Role.TRAINER and self.one_trainer:
                    others = [one.node for one in self._trainers() if one.node != action.node]
                    assert not others, f"two trainers: {action.node} beside {others}"
                self.markets[action.node] = action.market
                self.pools.setdefault(action.node, action.pool)
                known = self.machines.get(action.node)
                if known is None or 0 < known.attempt < action.attempt:
                    self.launches.append((action.node, action.attempt))
                    self.up_at_s.setdefault(action.node, self.now_s + self.launch_s)
                    booted_at_s = max(self.now_s, self.up_at_s[action.node]) + self.boot_s.get(role, BOOT_S)
                    self.booted_at_s[action.node, action.attempt] = booted_at_s
                    if self.launch_s and known is None:
                        self.machines[action.node] = Machine(action.node, MachineState.STARTING, attempt=0)
                    else:
                        self.machines[action.node] = Machine(action.node, MachineState.UP, action.attempt)
                    self.timelines[action.node, action.attempt] = action.timeline
            case Confirm():
                self.confirmed.append(action.node)
            case Terminate():
                node = self.state.nodes.get(action.node)
                if node is None or self.now_s - node.since_s >= self.ends_in_s:
                    self.machines.pop(action.node, None)
            case RequestStop():
                if self.stops_at_s is None:
                    self.stops_at_s = self.now_s + self.storing_s
            case WriteFork():
                if action.fork.timeline not in [fork.timeline for fork in self.forks]:
                    self.forks.append(action.fork)

    def refuses(self, launch: Launch) -> bool:
        is_rollout, on_spot = role_of(launch.slot) is Role.ROLLOUT, launch.market is Market.SPOT
        if self.refusing or (self.no_spot and on_spot):
            return True
        lacks_zone = self.has is not None and launch.pool is not None and launch.pool.zone not in self.has
        return is_rollout and (self.refusing_rollouts or (self.no_demand and not on_spot) or lacks_zone)

    def advance(self, dt_s: float | None = None) -> None:
        """Let time pass: machines boot, the trainer beats, and steps while a rollout node serves."""
        dt_s = self.dt_s if dt_s is None else dt_s
        self.now_s += dt_s
        self._boot_machines()
        trainer = self._trainer()
        for older in [m for m in self._trainers() if m is not trainer]:
            self.exit(older.node, exit_codes.FENCED)
        if trainer is not None and not self.cut_off:
            self.advance_trainer(trainer, dt_s)

    def _boot_machines(self) -> None:
        for node, machine in list(self.machines.items()):
            if machine.state is MachineState.STARTING and self.now_s >= self.up_at_s[node]:
                self.machines[node] = replace(machine, state=MachineState.UP, attempt=1)
            code = self.fails.get(role_of(node))
            if code is not None and self._works(self.machines[node]):
                self.exit(node, code)

    def advance_trainer(self, trainer: Machine, dt_s: float) -> None:
        timeline = self.timelines[trainer.node, trainer.attempt]
        if any(fork.timeline > timeline for fork in self.forks):
            self.exit(trainer.node, exit_codes.FENCED)
            return
        if self.stops_at_s is not None and self.now_s >= self.stops_at_s:
            self.checkpoints = sorted({*self.checkpoints, PolicyVersion(timeline, int(self.steps))})
            self.exit(trainer.node, exit_codes.STOPPED)
            self.stops_at_s = None
            return
        first = self.beat is None or (self.beat.node, self.beat.attempt) != (trainer.node, trainer.attempt)
        if first:  # it takes up the newest checkpoint of its line, and knows nothing of the store yet
            found = newest_before(self.checkpoints, self.forks, timeline, None)
            self.steps = 0 if found is None else found.step
        rollouts = any(n.startswith(Role.ROLLOUT) and self._works(m) for n, m in self.machines.items())
        if (rollouts or generates_itself(self.spec)) and self.stops_at_s is None:
            self.steps = min(self.max_steps, self.steps + dt_s / STEP_S)
        step = int(self.steps)
        tripped = timeline in self.trips and step >= self.trips[timeline][0]
        if step and step % self.save_steps == 0 and not tripped:
            new, verdict = PolicyVersion(timeline, step), self._verdict(timeline)
            self.checkpoints = retain(self.checkpoints, new, verdict, self.forks, self.spec.checkpoints)
        waits = not (rollouts or generates_itself(self.spec))
        activity = "done" if step == self.max_steps else "waiting" if waits else "training"
        if tripped and self.guarded:
            activity = "diverged"
        self.beat = Trainer(
            trainer.node,
            trainer.attempt,
            timeline,
            step,
            self.max_steps,
            activity,
            self.now_s,
            stored_step=None if first else step,
            store_slow=self.store_slow and not first,
            verdict=self._verdict(timeline) if self.guarded else None,
            leaving=self.stops_at_s is not None,
        )
        if activity in ("done", "diverged"):
            self.exit(trainer.node, exit_codes.OK if activity == "done" else exit_codes.DIVERGED)

    def lose(self, node: str) -> None:
        self.machines[node] = replace(self.machines[node], state=MachineState.GONE, reason="preempted")

    def exit(self, node: str, code: int, reason: str = "") -> None:
        self.machines[node] = replace(self.machines[node], exit_code=code, exit_reason=reason)

    def up(self, role: Role) -> list[str]:
        return [n for n, m in self.machines.items() if n.startswith(role) and m.state is MachineState.UP]

    def run(self, limit: int = 2000) -> int:
        """Tick and advance until nothing is left. Returns the ticks it took; fails when it does not converge."""
        for count in range(limit):
            if self.tick():
                return count
            self.advance()
        raise AssertionError(f"did not converge: {self.state}")

    def until(
        self, seen: RunPhase | Callable[[World], bool], within_s: float = HOUR_S, dt_s: float | None = None
    ) -> World:
        """Let time pass until the run is in the phase, or until this is seen."""
        end_s = self.now_s + within_s
        while not (self.state.phase is seen if isinstance(seen, RunPhase) else seen(self)):
            assert self.now_s < end_s, f"not {seen} within {within_s:.0f} s: {self.state}"
            self.tick()
            self.advance(dt_s)
        return self

    def wait(self, for_s: float, dt_s: float | None = None) -> Bought:
        """Let time pass. Returns what rollout nodes it took."""
        bought, end_s, dt_s = Bought(), self.now_s + for_s, dt_s or self.pace_s
        while self.now_s < end_s:
            self.tick()
            rollouts = [name for name in self.machines if name.startswith(Role.ROLLOUT)]
            bought.machines |= set(rollouts)
            bought.hours += dt_s / HOUR_S * len(rollouts)
            self.advance(dt_s)
        return bought

    def let_pass(self, hours: float, dt_s: float | None = None) -> Bought:
        return self.wait(hours * HOUR_S, dt_s)

    def notice(self, node: str) -> None:
        """The cloud says that it will take the machine back."""
        self.machines[node] = replace(self.machines[node], notice=True)

    def dry_up(self) -> None:
        """All rollout nodes are lost, and none is to be had."""
        self.refusing_rollouts = True
        for node in self.up(Role.ROLLOUT):
            self.lose(node)

    def is_at(self, phase: RunPhase) -> bool:
        return self.state.phase is phase

    @property
    def moves(self) -> list[RunPhase]:
        return [event.phase for event in self.of(RunMoved)]

    @property
    def spent(self) -> float:
        return spent_usd(self.state, self.now_s)

    @property
    def stood_in(self) -> list[str]:
        return [event.node for event in self.of(NodeRequested) if event.is_fallback]

    @property
    def begun(self) -> list[RollbackStarted]:
        return self.of(RollbackStarted)

    @property
    def serving_on_spot(self) -> list[str]:
        serving = [one for one in self.state.live(Role.ROLLOUT) if one.phase is NodePhase.SERVING]
        return [one.id for one in serving if one.market is Market.SPOT]

    def decides(self, stage: type[Event]) -> bool:
        """Whether the next tick journals such an event."""
        refused = list(self.refused)
        decision = decide(self.state, self.snapshot(), self.spec)
        self.refused = refused
        return any(isinstance(event, stage) for event in decision.events)

    def _verdict(self, timeline: int) -> Verdict:
        step = int(self.steps)
        if timeline not in self.trips or step < self.trips[timeline][1]:
            return Verdict(step=step)
        trip, onset = self.trips[timeline]
        if step < trip:
            return Verdict(Health.WATCH, step, onset, None, ("KL 9",))
        return Verdict(Health.TRIPPED, step, onset, trip, ("KL 9",))

    def _watched(self, timeline: int) -> ControllerVerdict | None:
        """What the controller's own detectors say, from the same rows."""
        if self.beat is None or self.beat.timeline != timeline:
            return None
        return ControllerVerdict(timeline, self._verdict(timeline))

    def _works(self, machine: Machine) -> bool:
        booted = self.booted_at_s.get((machine.node, machine.attempt), self.now_s)
        return machine.state is MachineState.UP and machine.exit_code is None and self.now_s >= booted

    def _trainer(self) -> Machine | None:
        """The newest at work: it fences the others."""
        return max(self._trainers(), key=lambda m: slot_and_incarnation(m.node), default=None)

    def _trainers(self) -> list[Machine]:
        return [m for n, m in self.machines.items() if n.startswith(Role.TRAINER) and self._works(m)]

    def _gateway_age_s(self) -> float:
        """The gateway comes up with the trainer's machine, before the model is loaded."""
        trainer = self._trainer()
        return 0.0 if trainer is None else self.now_s - self.up_at_s[trainer.node]


def until_training(world: World) -> World:
    return world.until(lambda it: it.steps >= 2, 50.0)


def priced(run: RunSpec, **world: object) -> World:
    """One whose machines cost something; `most` has the dearest of each kind."""
    most = {"trainer on demand": 40.0, "rollout on spot": 4.0}
    return World(run, **{"paid": PAID, "most": most, **world})  # type: ignore[arg-type]  # World's own fields


def on_two_markets(**world: object) -> dict[str, Any]:
    """Fields of a `World` without spot, whose machines cost something, and whose cloud says at most how much."""
    usual = {"max_steps": 10**9, "proved": True, "no_spot": True, "paid": USD, "most": dict(MOST), "pace_s": 20.0}
    return {**usual, **world}


def two_markets(run: RunSpec, **world: object) -> World:
    return World(run, **on_two_markets(**world))


def drought(run: RunSpec | None = None, **world: object) -> World:
    """A run that has trained, and has now lost its nodes. It stores nothing but when a trainer is asked to end."""
    usual = {"max_steps": 10**9, "save_steps": 10**9, "dt_s": 5.0, "pace_s": 5.0, "one_trainer": True}
    dry = World(run or spec(2), **{**usual, **world})  # type: ignore[arg-type]  # World's own fields
    dry.wait(120.0)
    assert dry.steps > 60
    dry.dry_up()
    return dry


def parked(run: RunSpec | None = None, **world: object) -> World:
    dry = drought(run, **world).until(RunPhase.PARKED)
    dry.wait(30.0)
    assert (dry.state.phase, dry.machines) == (RunPhase.PARKED, {})
    return dry


def world_of(trips: dict[int, tuple[int, int]], **kl: object) -> World:
    """One whose run diverges on these timelines."""
    return World(spec=with_kl(**kl), max_steps=40, trips=trips)


def fallback_nodes(state: RunState) -> list[Node]:
    """On-demand nodes that replace unavailable spot, and are there or come."""
    return [node for node in state.nodes.values() if node.is_fallback and node.phase in FILLING_NODE]
