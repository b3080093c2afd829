"""A world to decide in: a cloud, a gateway and a trainer that exist only as numbers, with a clock that is told.

It stands in for machines and processes in tests of `policies` alone; the real ones are tested elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from policies import exit_codes
from policies.decide import decide, done
from policies.divergence import Health, Verdict
from policies.events import Event, RunCreated, TookOver
from policies.rollback import choose_start
from policies.snapshot import (
    Action,
    Command,
    Confirm,
    Export,
    Launch,
    LaunchRefused,
    Machine,
    Member,
    Snapshot,
    Terminate,
    Trainer,
    Watched,
    WriteFork,
)
from policies.spec import Dataset, PoliciesSpec, Replicas, RolloutSpec, RunSpec, TrainerSpec
from policies.state import RunState, fold
from policies.timelines import Fork
from policies.vocabulary import MachineState, PolicyVersion, Refusal, Role

BOOT_S = 5.0
STEP_S = 1.0


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
    launches: list[tuple[str, int]] = field(default_factory=list)
    confirmed: list[str] = field(default_factory=list)
    refusing: bool = False
    refused: list[LaunchRefused] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    steps: float = 0.0
    beat: Trainer | None = None
    store_slow: bool = False
    timelines: dict[tuple[str, int], int] = field(default_factory=dict)  # of each trainer's attempt, as launched
    forks: list[Fork] = field(default_factory=list)  # in the store
    checkpoints: list[PolicyVersion] = field(default_factory=list)
    save_steps: int = 2
    # What befalls a timeline: the step at which its trainer's guard trips, and since when it says so.
    trips: dict[int, tuple[int, int]] = field(default_factory=dict)
    guarded: bool = True  # the trainer can tell; else only the controller's own detectors do
    exports: set[str] = field(default_factory=set)
    looking: bool = True  # whether a look finds the checkpoints

    def __post_init__(self) -> None:
        self.journal((TookOver("here", 1, "up"), RunCreated("sim", "sim-0")))

    @property
    def state(self) -> RunState:
        return fold(self.history)

    def journal(self, events: tuple[Event, ...]) -> None:
        self.history.append((len(self.history) + 1, self.now_s, events))

    def take_over(self) -> None:
        self.journal((TookOver("elsewhere", 2, "resume"),))

    def snapshot(self) -> Snapshot:
        policy = None if self.beat is None else f"{self.beat.timeline}-{self.beat.step}@1f2e"
        members = {
            name: Member(name, "boot", policy, True)
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
            gateway_age_s=100.0,
            trainer=self.beat,
            refused=refused,
            commands=tuple(self.commands),
            watched=self._watched(state.timeline),
            checkpoints=tuple(self.checkpoints) if self.looking else None,
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
                if self.refusing:
                    self.refused.append(LaunchRefused(action.node, Refusal.NO_CAPACITY, "nothing to be had"))
                    return
                known = self.machines.get(action.node)
                if known is None or known.attempt < action.attempt:
                    self.launches.append((action.node, action.attempt))
                    self.booted_at_s[action.node, action.attempt] = self.now_s + BOOT_S
                    self.machines[action.node] = Machine(action.node, MachineState.UP, action.attempt)
                    self.timelines[action.node, action.attempt] = action.timeline
            case Confirm():
                self.confirmed.append(action.node)
            case Terminate():
                self.machines.pop(action.node, None)
            case WriteFork():
                if action.fork.timeline not in [fork.timeline for fork in self.forks]:
                    self.forks.append(action.fork)
            case Export():
                self.exports.add(action.version)

    def advance(self, dt_s: float = 0.5) -> None:
        """Let time pass: machines boot, the trainer beats, and steps while a rollout node serves."""
        self.now_s += dt_s
        trainer = self._trainer()
        if trainer is None:
            return
        timeline = self.timelines[trainer.node, trainer.attempt]
        if any(fork.timeline > timeline for fork in self.forks):
            self.exit(trainer.node, exit_codes.FENCED)
            return
        first = self.beat is None or (self.beat.node, self.beat.attempt) != (trainer.node, trainer.attempt)
        if first:  # it takes up the newest checkpoint of its line, and knows nothing of the store yet
            found = choose_start(self.checkpoints, self.forks, timeline, None)
            self.steps = 0 if found is None else found.step
        rollouts = any(n.startswith(Role.ROLLOUT) and self._works(m) for n, m in self.machines.items())
        if rollouts:
            self.steps = min(self.max_steps, self.steps + dt_s / STEP_S)
        step = int(self.steps)
        tripped = timeline in self.trips and step >= self.trips[timeline][0]
        if step and step % self.save_steps == 0 and not tripped:
            self.checkpoints = sorted({*self.checkpoints, PolicyVersion(timeline, step)})
        activity = "done" if step == self.max_steps else "training"
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
        )
        if activity != "training":
            self.exit(trainer.node, exit_codes.OK if activity == "done" else exit_codes.DIVERGED)

    def lose(self, node: str) -> None:
        self.machines[node] = replace(self.machines[node], state=MachineState.GONE, why="preempted")

    def exit(self, node: str, code: int) -> None:
        self.machines[node] = replace(self.machines[node], exit_code=code)

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
        """The controller's own eyes, which see the same rows."""
        if self.beat is None or self.beat.timeline != timeline:
            return None
        return Watched(timeline, self._verdict(timeline))

    def _works(self, machine: Machine) -> bool:
        booted = self.booted_at_s.get((machine.node, machine.attempt), self.now_s)
        return machine.state is MachineState.UP and machine.exit_code is None and self.now_s >= booted

    def _trainer(self) -> Machine | None:
        return next((m for n, m in self.machines.items() if n.startswith(Role.TRAINER) and self._works(m)), None)
