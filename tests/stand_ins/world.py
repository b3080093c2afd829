"""A world to decide in: a cloud, a gateway and a trainer that exist only as numbers, with a clock that tests set.

It stands in for machines and processes in tests of `policies` alone; the real ones are tested elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TypeVar

from orchestrator.simulate.work import stored
from policies.control.decide import decide, done
from policies.control.rollback.choice import choose_start
from policies.control.snapshot import (
    Action,
    AskToStop,
    Command,
    Confirm,
    Export,
    Launch,
    LaunchRefused,
    Machine,
    Snapshot,
    Terminate,
    Trainer,
    Watched,
    WriteFork,
)
from policies.detect.divergence import Health, Verdict
from policies.model import exit_codes
from policies.model.events import Event, RunCreated, RunMoved, SpecProved, TookOver
from policies.model.fold import apply
from policies.model.spec import (
    Dataset,
    PoliciesSpec,
    Replicas,
    RolloutSpec,
    RunSpec,
    TrainerSpec,
    generates_itself,
)
from policies.model.state import RunState
from policies.model.timelines import Fork
from policies.model.vocabulary import (
    MachineState,
    PolicyVersion,
    Refusal,
    Role,
    RunPhase,
    role_of,
    slot_and_incarnation,
)
from policies.serving.gateway_status import MemberStatus

E = TypeVar("E", bound=Event)
BOOT_S = 5.0
STEP_S = 1.0


class Folded:
    """The state after the first `count` entries of a history, so that no entry is folded twice."""

    def __init__(self) -> None:
        self.count, self.state = 0, RunState()

    def __deepcopy__(self, memo: dict[int, object]) -> Folded:
        same = Folded()
        same.count, same.state = self.count, self.state
        return same


def spec(max_replicas: int = 2, **policies: float) -> RunSpec:
    return RunSpec(
        name="sim",
        storage="memory://sim",
        trainer=TrainerSpec(model="m", dataset=Dataset(path="d"), reward_funcs=("r.f",)),
        grpo={},
        rollout=RolloutSpec(replicas=Replicas(min=1, max=max_replicas)),
        policies=PoliciesSpec(**policies),  # type: ignore[arg-type]  # keys are PoliciesSpec's own
    )


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
    exports: set[str] = field(default_factory=set)
    storing_s: float = 3.0  # how long a trainer takes to store what it has, once it is asked to end
    stops_at_s: float | None = None
    moved_at_s: float = -math.inf  # when what its machine stores last got on
    looking: bool = True  # whether a look finds the checkpoints
    folded: Folded = field(default_factory=Folded)

    def __post_init__(self) -> None:
        self.journal((TookOver("here", 1, "up"), RunCreated("sim", "sim-0")))
        if self.proved:
            self.journal((SpecProved(),))

    @property
    def state(self) -> RunState:
        for number, time_s, events in self.history[self.folded.count :]:
            for event in events:
                self.folded.state = apply(self.folded.state, event, time_s, number)
        self.folded.count = len(self.history)
        return self.folded.state

    def of(self, *kinds: type[E]) -> list[E]:
        """What the journal has of these kinds of events, in order."""
        return [event for _, _, events in self.history for event in events if isinstance(event, kinds)]

    def journal(self, events: tuple[Event, ...]) -> None:
        self.history.append((len(self.history) + 1, self.now_s, events))

    def take_over(self) -> None:
        self.journal((TookOver("elsewhere", 2, "resume"),))

    def resume(self) -> None:
        """As a user does with a run that has ended."""
        self.journal((TookOver("elsewhere", 2, "resume"), RunMoved(RunPhase.STARTING, "resumed")))

    def snapshot(self) -> Snapshot:
        policy = None if self.beat is None else f"{self.beat.timeline}-{self.beat.step}@1f2e"
        members = {
            name: MemberStatus(name, "boot", "10.0.0.2:1", policy, True, False, 0, 0.1)
            for name, machine in self.machines.items()
            if name.startswith(Role.ROLLOUT) and self._works(machine)
        }
        refused, self.refused = tuple(self.refused), []
        state = self.state
        return Snapshot(
            now_s=self.now_s,
            machines=dict(self.machines),
            members=members if self._trainer() else None,
            gateway_boot_id="g1" if self._trainer() else None,
            gateway_age_s=self._gateway_age_s(),
            trainer=self.beat,
            trainer_moved_at_s=self.moved_at_s,
            refused=refused,
            commands=tuple(self.commands),
            watched=self._watched(state.timeline),
            checkpoints=tuple(self.checkpoints) if self.looking else None,
            ever_stored=bool(self.checkpoints),
            timeline=max((fork.timeline for fork in self.forks), default=0),
            exported_to=f"exports/{state.healthy}" if state.healthy in self.exports else None,
        )

    def tick(self, *, journal_only: bool = False) -> bool:
        """Run the controller once. Returns whether nothing is left to steer."""
        snapshot = self.snapshot()
        state = self.state
        decision = decide(state, snapshot, self.spec)
        if decision.events:
            self.journal(decision.events)
        if journal_only:
            return False  # the controller died between intent and action
        for action in decision.actions:
            self.act(action)
        return not decision.actions and done(self.state, snapshot)

    def act(self, action: Action) -> None:
        match action:
            case Launch():
                role = role_of(action.slot)
                if self.refusing or (self.refusing_rollouts and role is Role.ROLLOUT):
                    self.refused.append(LaunchRefused(action.node, Refusal.NO_CAPACITY, "nothing to be had"))
                    return
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
                self.machines.pop(action.node, None)
            case AskToStop():
                if self.stops_at_s is None:
                    self.stops_at_s = self.now_s + self.storing_s
            case WriteFork():
                if action.fork.timeline not in [fork.timeline for fork in self.forks]:
                    self.forks.append(action.fork)
            case Export():
                self.exports.add(action.version)

    def advance(self, dt_s: float = 0.5) -> None:
        """Let time pass: machines boot, the trainer beats, and steps while a rollout node serves."""
        self.now_s += dt_s
        self._boot_machines()
        trainer = self._trainer()
        for older in [m for m in self._trainers() if m is not trainer]:
            self.exit(older.node, exit_codes.FENCED)
        if trainer is not None:
            self._advance_trainer(trainer, dt_s)

    def _boot_machines(self) -> None:
        for node, machine in list(self.machines.items()):
            if machine.state is MachineState.STARTING and self.now_s >= self.up_at_s[node]:
                self.machines[node] = replace(machine, state=MachineState.UP, attempt=1)
            code = self.fails.get(role_of(node))
            if code is not None and self._works(self.machines[node]):
                self.exit(node, code)

    def _advance_trainer(self, trainer: Machine, dt_s: float) -> None:
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
            found = choose_start(self.checkpoints, self.forks, timeline, None)
            self.steps = 0 if found is None else found.step
        rollouts = any(n.startswith(Role.ROLLOUT) and self._works(m) for n, m in self.machines.items())
        if (rollouts or generates_itself(self.spec)) and self.stops_at_s is None:
            self.steps = min(self.max_steps, self.steps + dt_s / STEP_S)
        step = int(self.steps)
        tripped = timeline in self.trips and step >= self.trips[timeline][0]
        if step and step % self.save_steps == 0 and not tripped:
            new, verdict = PolicyVersion(timeline, step), self._verdict(timeline)
            self.checkpoints = stored(self.checkpoints, new, verdict, self.forks, self.spec.checkpoints)
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
        self.machines[node] = replace(self.machines[node], state=MachineState.GONE, why="preempted")

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

    def _verdict(self, timeline: int) -> Verdict:
        step = int(self.steps)
        if timeline not in self.trips or step < self.trips[timeline][1]:
            return Verdict(step=step)
        trip, onset = self.trips[timeline]
        if step < trip:
            return Verdict(Health.WATCH, step, onset, None, ("KL 9",))
        return Verdict(Health.TRIPPED, step, onset, trip, ("KL 9",))

    def _watched(self, timeline: int) -> Watched | None:
        """What the controller's own detectors say, from the same rows."""
        if self.beat is None or self.beat.timeline != timeline:
            return None
        return Watched(timeline, self._verdict(timeline))

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
    for _ in range(100):
        world.tick()
        world.advance()
        if world.steps >= 2:
            return world
    raise AssertionError(world.state)
