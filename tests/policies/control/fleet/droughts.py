"""Runs that have trained and then find no rollout node."""

from __future__ import annotations

from dataclasses import dataclass, replace

from policies.control.snapshot import Action, Launch, Snapshot
from policies.fleet.parking import IDLE_MIN_S
from policies.model.events import RunMoved
from policies.model.spec import RunSpec
from policies.model.vocabulary import Role, RunPhase
from tests.policies.control.fleet.worlds import HOUR_S
from tests.stand_ins.world import World, spec

DT_S = 5.0
PARKS_IN_S = IDLE_MIN_S + 60.0  # the trainer of this world boots in seconds


@dataclass
class Drought(World):
    """Rollout nodes are refused, once the run has trained for a while."""

    max_steps: int = 10**9
    save_steps: int = 10**9  # nothing is stored but when a trainer is asked to end
    cut_off: bool = False  # the trainer: nobody hears it, nor can it store

    def act(self, action: Action) -> None:
        if isinstance(action, Launch) and action.node.startswith(Role.TRAINER):
            others = [one for one in self._trainers() if one.node != action.node]
            assert not others, f"two trainers: {action.node} beside {others}"
        super().act(action)

    def snapshot(self) -> Snapshot:
        looked = super().snapshot()
        return replace(looked, members=None) if self.cut_off else looked

    def _advance_trainer(self, trainer: object, dt_s: float) -> None:
        if not self.cut_off:
            super()._advance_trainer(trainer, dt_s)  # type: ignore[arg-type]

    def let_pass(self, for_s: float, dt_s: float = DT_S) -> None:
        end_s = self.now_s + for_s
        while self.now_s < end_s:
            self.tick()
            self.advance(dt_s)

    def until(self, phase: RunPhase, within_s: float = HOUR_S) -> None:
        end_s = self.now_s + within_s
        while self.state.phase is not phase:
            assert self.now_s < end_s, f"not {phase} within {within_s:.0f} s: {self.state}"
            self.tick()
            self.advance(DT_S)

    def dry_up(self) -> None:
        self.refusing_rollouts = True
        for node in self.up(Role.ROLLOUT):
            self.lose(node)

    @property
    def moves(self) -> list[RunPhase]:
        return [event.phase for event in self.of(RunMoved)]


def is_at(world: World, phase: RunPhase) -> bool:
    return world.state.phase is phase


def drought(run: RunSpec | None = None, **world: object) -> Drought:
    """A run that has trained, and has now lost its nodes."""
    dry = Drought(run or spec(2), **world)  # type: ignore[arg-type]
    dry.let_pass(120.0)
    assert dry.steps > 60
    dry.dry_up()
    return dry


def parked(run: RunSpec | None = None, **world: object) -> Drought:
    dry = drought(run, **world)
    dry.until(RunPhase.PARKED)
    dry.let_pass(30.0)
    assert (dry.state.phase, dry.machines) == (RunPhase.PARKED, {})
    return dry
