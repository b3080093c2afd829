"""A whole run under its production controllers, on machines, a cloud and a store that exist only as numbers.

Each party has a clock of its own and its own way to the store; machines are slow to come, or come and never work.
The world itself checks who acts, and what is given up.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from random import Random

from checkpoint.journal import journal
from checkpoint.records import documents
from checkpoint.records.documents import GatewayAddress
from checkpoint.store.errors import StoreUnavailable
from orchestrator.clouds.protocol import CloudRefused, Order
from orchestrator.control.actuate import ACT_WITHIN_S
from policies.control.observed import MACHINE_LOST_S
from policies.control.snapshot import Machine, Trainer
from policies.model import exit_codes
from policies.model.phases import TERMINAL_RUN
from policies.model.spec import RunSpec
from policies.model.vocabulary import MachineState, Refusal, Role, RunPhase, role_of, slot_and_incarnation
from policies.serving.gateway_status import GatewayStatus, MemberStatus
from tests.stand_ins.steered_daemon import EPOCH_S, SteeredDaemon
from tests.stand_ins.weather_store import Sky, Weather, WeatherStore
from tests.stand_ins.world import spec

DT_S = 5.0
BOOT_S = 60.0
STEP_S = 5.0
SAVE_STEPS = 5
BEHIND_STEPS = 100  # so far ahead of the store a trainer may go
RESUME_S = 60.0  # until somebody elsewhere resumes a run that has no daemon


@dataclass
class Box:
    """A machine. `Machine` is what its cloud shows of it."""

    node: str
    store: WeatherStore
    up_at_s: float
    attempt: int
    works_at_s: float
    never_works: bool = False
    exit_code: int | None = None
    reported_code: int | None = None  # what it got through to the store
    gone: bool = False
    notice: bool = False
    step: float = -1.0  # -1: it has not begun
    writes: int = 0  # of its gateway's
    cut_off_s: float = 0.0
    sealed: int = 0  # of its newest checkpoint, which may still wait in its spool

    @property
    def role(self) -> Role:
        return role_of(self.node)

    @property
    def precedence(self) -> tuple[int, int, int]:
        return 0, slot_and_incarnation(self.node)[1], self.attempt


@dataclass
class SteeredWorld:
    """`time_s` is the true time. Raises AssertionError when somebody does what nobody may."""

    seed: int
    spec: RunSpec = field(default_factory=lambda: replace(spec(2, trainer_restarts=10**6)))
    max_steps: int = 500
    time_s: float = 1000.0
    boxes: dict[str, Box] = field(default_factory=dict)
    daemons: list[SteeredDaemon] = field(default_factory=list)
    took_over: list[tuple[int, float]] = field(default_factory=list)
    bought: list[str] = field(default_factory=list)
    stored_step: int = 0
    kept_step: int = 0  # of the newest step that no machine's loss has taken back
    refusing: bool = False
    cloud_away: bool = False
    launch_s: float = 30.0
    never_work: bool = False  # rollout machines that are launched now
    nobody_since_s: float = 1000.0
    skew_s: float = 0.0  # of the hosts on which the run will be resumed
    log: list[str] = field(default_factory=list)
    broken: str = ""  # the first promise that was

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.sky = Sky(self.random)
        self.run_for(DT_S + RESUME_S)

    def run_for(self, for_s: float) -> None:
        """Let time pass: machines work, and daemons that are not stopped loop."""
        end_s = self.time_s + for_s
        while self.time_s < end_s:
            self.time_s += DT_S
            assert not self.broken, self.broken
            for box in list(self.boxes.values()):
                self._advance(box)
            self._gateway()
            for daemon in [one for one in self.daemons if not one.busy and not one.dead]:
                daemon.loop_once()
                self.nobody_since_s = self.time_s
            if self.time_s - self.nobody_since_s >= RESUME_S and not self.is_over:
                self.nobody_since_s = self.time_s
                with contextlib.suppress(StoreUnavailable):
                    self.daemons.append(SteeredDaemon(self, f"host{len(self.daemons)}", self.skew_s))

    def run_to_end(self, limit_s: float) -> None:
        """Let the run end undisturbed. Fails when it does not, or a machine is left."""
        end_s = self.time_s + limit_s
        while self.time_s < end_s and not self.is_over:
            self.run_for(DT_S)
        state = self.newest.controller.state
        self.check(state.phase is RunPhase.FINISHED, f"does not end: {state}")
        self.check(not self.boxes, f"machines are left: {list(self.boxes)}")
        self.check(self.stored_step == self.max_steps, "its last checkpoint is not stored")
        known = journal.recover(self.newest.store).state
        self.check(known == state, "state and journal disagree")

    @property
    def is_over(self) -> bool:
        return bool(self.daemons) and self.newest.controller.finished

    @property
    def newest(self) -> SteeredDaemon:
        return max(self.daemons, key=lambda one: one.journal.epoch)

    def check(self, what: bool, otherwise: str) -> None:
        """Fail unless `what` holds, now and from then on: the actuator keeps its first failure to itself."""
        if not what:
            lately = "\n".join(self.log[-40:])
            self.broken = f"seed {self.seed}, at {self.time_s:.0f} s: {otherwise}\n{lately}"
        assert not self.broken, self.broken

    def note(self, what: str) -> None:
        self.log.append(f"{self.time_s:.0f} s: {what}")

    def launch(self, order: Order) -> None:
        box = self.boxes.get(order.node)
        if box is not None and (box.gone or box.attempt >= order.attempt):
            return
        if box is None and self.refusing:
            raise CloudRefused(Refusal.NO_CAPACITY, "nothing to be had")
        if box is None:
            up_at_s = self.time_s + self.launch_s
            box = Box(order.node, WeatherStore(self.sky), up_at_s, 1, 0.0)
            box.never_works = self.never_work and order.role is Role.ROLLOUT
            self.boxes[order.node] = box
            self.bought.append(order.node)
        box.attempt, box.exit_code, box.reported_code, box.step = order.attempt, None, None, -1.0
        box.works_at_s = max(self.time_s, box.up_at_s) + BOOT_S

    def as_machine(self, box: Box) -> Machine:
        if self.time_s < box.up_at_s:
            return Machine(box.node, MachineState.STARTING, attempt=0)
        state = MachineState.GONE if box.gone else MachineState.UP
        why = "preempted" if box.gone else ""
        return Machine(box.node, state, box.attempt, box.reported_code, why, box.notice)

    def check_may_act(self, daemon: SteeredDaemon, what: str) -> None:
        if not what.startswith("launch") or what.split()[1] not in self.boxes:
            self.note(f"{daemon.name}: {what}")
        epoch, since_s = self.took_over[-1]
        late_s = self.time_s - since_s if daemon.journal.epoch != epoch else 0.0
        self.check(late_s <= ACT_WITHIN_S, f"{daemon.name} acts {late_s:.0f} s after it was replaced: {what}")

    def terminate(self, node: str, daemon: SteeredDaemon) -> None:
        """A controller returns a machine: one that works may go only with the run, or after its notice."""
        box, run = self.boxes.pop(node, None), daemon.controller.state
        if box is None or box.gone or run.phase in TERMINAL_RUN:
            return
        if box.notice:
            self.kept_step = min(self.kept_step, self.stored_step)
            return
        self.check(box.sealed <= self.stored_step, f"{node} goes with checkpoints that are not stored")
        if not self.at_work(box):
            return
        if box.role is Role.TRAINER:
            newer = [
                one for one in self._of(Role.TRAINER) if one.precedence > box.precedence and self.at_work(one)
            ]
            never_began = box.step < 0 and box.cut_off_s + BOOT_S > self.spec.policies.boot_timeout_s
            excused = newer or never_began or box.cut_off_s > MACHINE_LOST_S
            self.check(bool(excused), f"a healthy trainer is given up: {node}")
        else:
            trainers = [one for one in self._of(Role.TRAINER) if self.as_machine(one).state is MachineState.UP]
            self.check(not trainers, f"a serving node is given up: {node}")

    def at_work(self, box: Box) -> bool:
        alive = not box.gone and box.exit_code is None and not box.never_works
        return alive and self.time_s >= box.works_at_s

    def _of(self, role: Role) -> list[Box]:
        return [box for box in self.boxes.values() if box.role is role]

    def _advance(self, box: Box) -> None:
        box.cut_off_s = 0.0 if box.store.weather is Weather.FAIR else box.cut_off_s + DT_S
        if box.store.writes and not box.gone:  # the uploader, which outlives the trainer
            self.stored_step = max(self.stored_step, box.sealed)
        with contextlib.suppress(StoreUnavailable):
            if box.role is Role.TRAINER and self.at_work(box):
                self._train(box)
        if box.exit_code is not None and box.store.writes:
            box.reported_code = box.exit_code

    def _train(self, box: Box) -> None:
        beat = None
        with contextlib.suppress(StoreUnavailable):
            beat = documents.TRAINER.read(box.store)
            if beat is not None and beat.precedence > box.precedence:
                box.exit_code = exit_codes.FENCED
                return
        if box.step < 0:
            if not box.store.writes or box.sealed > self.stored_step:
                return  # its first beat has to be written, and what was sealed here to be stored
            if any(one.notice for one in self._of(Role.TRAINER)):
                self.kept_step = self.stored_step  # the one before it may have sealed another at this moment
            self.check(
                self.stored_step >= self.kept_step, f"steps are lost: {self.kept_step} -> {self.stored_step}"
            )
            box.step = self.stored_step
        served = any(self.at_work(one) for one in self._of(Role.ROLLOUT))
        ahead = box.step - self.stored_step
        if served and ahead < BEHIND_STEPS:
            box.step = min(self.max_steps, box.step + DT_S / STEP_S)
        box.sealed = int(box.step) if box.step >= self.max_steps else int(box.step) // SAVE_STEPS * SAVE_STEPS
        self.kept_step = max(self.kept_step, box.sealed)
        activity = "done" if self.stored_step >= self.max_steps else "training"
        self._write_heartbeat(box, activity)
        if activity == "done":
            box.exit_code = exit_codes.OK

    def _write_heartbeat(self, box: Box, activity: str) -> None:
        step = int(box.step)
        beat = Trainer(box.node, box.attempt, 0, step, self.max_steps, activity, EPOCH_S + self.time_s)
        documents.TRAINER.write(box.store, beat)

    def _gateway(self) -> None:
        up = [box for box in self._of(Role.TRAINER) if self.as_machine(box).state is MachineState.UP]
        for box in (box for box in up if box.exit_code is None):
            boot_id = f"{box.node}.{box.attempt}"
            serving = [one for one in self._of(Role.ROLLOUT) if self.at_work(one)]
            members = [MemberStatus(one.node, "b", "10.0.0.2:1", "0-1", True, False, 4, 0.1) for one in serving]
            box.writes += 1
            up_s = self.time_s - max(box.up_at_s, box.works_at_s - BOOT_S)
            status = GatewayStatus(boot_id, "0-1", members, seq=box.writes, up_s=up_s)
            with contextlib.suppress(StoreUnavailable):
                documents.gateway(box.precedence).write(box.store, GatewayAddress("http://10.0.0.1:1", boot_id))
                documents.members(box.precedence).write(box.store, status)

    def lose(self, box: Box) -> None:
        """The cloud takes a machine, and what lies on it."""
        box.gone = True
        if box.role is Role.TRAINER:
            self.kept_step = self.stored_step
