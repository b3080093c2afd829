"""A world to decide in: a cloud, a gateway and a trainer that exist only as numbers, with a clock that is told.

It stands in for machines and processes in tests of `policies` alone; the real ones are tested elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from policies.decide import decide, done
from policies.events import Event, RunCreated, TookOver
from policies.snapshot import (
    Action,
    Command,
    Confirm,
    Launch,
    LaunchRefused,
    Machine,
    Member,
    Snapshot,
    Terminate,
    Trainer,
)
from policies.spec import Dataset, PoliciesSpec, Replicas, RolloutSpec, RunSpec, TrainerSpec
from policies.state import RunState, fold
from policies.vocabulary import MachineState, Refusal, Role

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
        members = {
            name: Member(name, "boot", None, True)
            for name, machine in self.machines.items()
            if name.startswith(Role.ROLLOUT) and self._works(machine)
        }
        refused, self.refused = tuple(self.refused), []
        return Snapshot(
            now_s=self.now_s,
            machines=dict(self.machines),
            members=members if self._trainer() else None,
            gateway_boot_id="g1" if self._trainer() else None,
            gateway_age_s=100.0,
            trainer=self.beat,
            refused=refused,
            commands=tuple(self.commands),
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
            case Confirm():
                self.confirmed.append(action.node)
            case Terminate():
                self.machines.pop(action.node, None)

    def advance(self, dt_s: float = 0.5) -> None:
        """Let time pass: machines boot, the trainer beats, and steps while a rollout node serves."""
        self.now_s += dt_s
        trainer = self._trainer()
        if trainer is None:
            return
        rollouts = any(n.startswith(Role.ROLLOUT) and self._works(m) for n, m in self.machines.items())
        if rollouts:
            self.steps = min(self.max_steps, self.steps + dt_s / STEP_S)
        step = int(self.steps)
        activity = "done" if step == self.max_steps else "training"
        first = self.beat is None or self.beat.attempt != trainer.attempt  # it knows nothing of the store yet
        self.beat = Trainer(
            trainer.node,
            trainer.attempt,
            0,
            step,
            self.max_steps,
            activity,
            self.now_s,
            stored_step=None if first else step,
            store_slow=self.store_slow and not first,
        )
        if activity == "done":
            self.machines[trainer.node] = replace(trainer, exit_code=0)

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

    def _works(self, machine: Machine) -> bool:
        booted = self.booted_at_s.get((machine.node, machine.attempt), self.now_s)
        return machine.state is MachineState.UP and machine.exit_code is None and self.now_s >= booted

    def _trainer(self) -> Machine | None:
        return next((m for n, m in self.machines.items() if n.startswith(Role.TRAINER) and self._works(m)), None)
