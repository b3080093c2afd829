"""A whole run under its production controllers, on machines, a cloud and a store that exist only as numbers.

Each party has a clock of its own and its own way to the store; machines are slow to come, or come and never
work. Everything follows from the seed: two worlds of one seed live through the same. The promises come first,
then the daemon, then the world.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import cycle
from random import Random
from typing import TYPE_CHECKING

from checkpoint import journal
from checkpoint.journal import Fenced, Journal
from checkpoint.records import documents
from checkpoint.store.errors import StoreUnavailable
from orchestrator.clouds.protocol import Cloud, Order
from orchestrator.control import prices as pricing
from orchestrator.control.actuate import ACT_WITHIN_S, Actuator
from orchestrator.control.controller import Controller, Decide
from orchestrator.control.daemon import renew
from orchestrator.control.observe import Observer
from orchestrator.control.run_clock import RunClock
from orchestrator.simulate.cloud import BRISK, EPOCH_S, Box, Physics, Prices, SimulatedCloud
from orchestrator.simulate.store import Objects, SimulatedStore
from orchestrator.simulate.weather import Weather, plentiful
from orchestrator.simulate.work import Trips, Work
from policies.control.decide import decide
from policies.control.decide import decide as production
from policies.control.observed import MACHINE_LOST_S
from policies.control.rollback.choice import choose_start, target_before_step
from policies.control.stopping import DOWN
from policies.costs import disks
from policies.fleet.budget import STOP_WAIT_S, TEARDOWN_S
from policies.model.events import RunCreated
from policies.model.node_contract import TIMELINE_ENV
from policies.model.phases import TERMINAL_RUN
from policies.model.pools import PoolOffer
from policies.model.spec import RunSpec
from policies.model.state import RunState
from policies.model.vocabulary import PolicyVersion, Role, RunPhase
from policies.tick.snapshot import Machine

if TYPE_CHECKING:
    pass


# The promises, checked at each launch, each termination and after each moment.

UNKNOWN_S = 600.0  # a machine may be on no controller's books for so long, while one looks


class Broken(AssertionError):
    """A promise was broken; the message names the seed, the moment, and what happened before."""


class Safety:
    """Raises Broken at the first promise that is broken, and from then on at every look."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._allowed_usd = 0.0  # what may be spent because no controller could end it in time
        self._unknown_s: dict[str, float] = {}
        self._begun = 0  # rollbacks that were looked at
        self._told: set[str] = set()
        self.broken = ""

    def check(self, holds: bool, otherwise: str) -> None:
        """Fail unless it `holds`, now and from then on: the actuator keeps its first failure to itself."""
        if not holds and not self.broken:
            lately = "\n".join(self._world.log[-40:])
            self.broken = f"seed {self._world.seed}, at {self._world.time_s:.0f} s: {otherwise}\n{lately}"
        if self.broken:
            raise Broken(self.broken)

    def check_moment(self, dt_s: float) -> None:
        """Check what holds at any time."""
        self.check(True, "")
        self._check_money()
        newest = self._world.newest
        if newest is None:
            return
        state = newest.controller.state
        self._check_known(newest, state, dt_s)
        if newest.controller.finished:
            left = [box.node for box in self._world.cloud.boxes.values() if not box.gone]
            self.check(not left, f"the run is over, and machines are left: {left}")
        for begun in state.rollbacks[self._begun :]:
            self._check_target(state, begun.fork.start_at)
        self._begun = max(self._begun, len(state.rollbacks))

    def check_pause(self, state: RunState) -> None:
        """A run pauses for want of a checkpoint only where there never was one."""
        for_money = state.reason.startswith("the budget")
        if state.diverged is not None and not for_money and self._world.spec.policies.kl.action == "rollback":
            before_step = target_before_step(state.diverged.onset_step, state.rollbacks)
            ever = sorted(self._world.work.ever)
            ideal = choose_start(ever, state.forks, state.timeline, before_step)
            self.check(ideal is None, f"the run pauses for want of a checkpoint, and there was {ideal}")

    def check_launch(self, daemon: SimulatedDaemon, order: Order) -> None:
        self._check_may_act(daemon, f"launch {order.node}.{order.attempt}")
        if order.node in self._world.cloud.boxes:
            return
        run = daemon.controller.state
        entries = reversed(self._world.objects.folder("journal").values())
        intended = any(f'"{order.node}"'.encode() in entry.data for entry in entries)
        self.check(intended, f"{order.node} is bought without an entry in the journal")
        self.check(run.phase not in TERMINAL_RUN, f"{order.node} is bought for a run that is {run.phase}")

    def check_termination(self, daemon: SimulatedDaemon, node: str) -> None:
        """One that works may go only with the run, after its notice, or where others are enough."""
        self._check_may_act(daemon, f"terminate {node}")
        world, run = self._world, daemon.controller.state
        box = world.cloud.boxes.get(node)
        if box is None or box.gone or box.notice or run.phase in TERMINAL_RUN or world.stopping:
            return
        if run.phase is RunPhase.STOPPING:
            return
        lost = [at for at in box.spool if at not in world.work.listed]
        self.check(not lost, f"{node} goes with checkpoints that are not stored: {lost}")
        if not box.at_work(world.time_s):
            return
        if box.role is Role.TRAINER:
            self.check(self._excused(box), f"a healthy trainer is given up: {node}")
            return
        trainers = [one for one in world.cloud.of(Role.TRAINER) if one.is_up(world.time_s)]
        if world.cloud.is_stale:
            return  # the trainer's machine may not be listed yet, and what waits for it goes after five minutes
        others = [one for one in world.cloud.of(Role.ROLLOUT) if one is not box and one.at_work(world.time_s)]
        enough = len(others) >= world.spec.rollout.replicas.min
        known = node in run.nodes  # else it is nobody's, and goes
        self.check(not trainers or enough or not known, f"a serving node is given up: {node}")

    def _check_may_act(self, daemon: SimulatedDaemon, what: str) -> None:
        told = f"{daemon.name}: {what}"
        if told not in self._told:
            self._told.add(told)
            self._world.note(told)
        epoch, since_s = self._world.took_over[-1]
        late_s = self._world.time_s - since_s if daemon.journal.epoch != epoch else 0.0
        self.check(late_s <= ACT_WITHIN_S, f"{daemon.name} acts {late_s:.0f} s after it was replaced: {what}")

    def _excused(self, box: Box) -> bool:
        world = self._world
        trainers = world.cloud.of(Role.TRAINER)
        newer = any(one.precedence > box.precedence and one.at_work(world.time_s) for one in trainers)
        began_late = box.cut_off_s + box.works_in_s > world.spec.policies.boot_timeout_s
        return newer or (box.step < 0 and began_late) or box.cut_off_s > MACHINE_LOST_S

    def _check_money(self) -> None:
        """The cap holds while a controller can see and act. Where none could, what was spent by then may be passed
        by what it takes to stop, and by no more."""
        world, spent = self._world, self._world.cloud.spent_usd
        if (cap := world.spec.budget.usd) is None:
            return
        if world.in_trouble or not any(one.steers for one in world.daemons):
            rates = [
                (world.cloud.charged_usd_per_h(box), STOP_WAIT_S * (box.role is Role.TRAINER) + TEARDOWN_S)
                for box in world.cloud.boxes.values()
            ]
            self._allowed_usd = spent + sum(usd_per_h * for_s / 3600 for usd_per_h, for_s in rates)
            return
        most = max(cap, self._allowed_usd)
        self.check(spent <= most, f"{spent:.2f} USD are spent, and {most:.2f} may be; the budget is {cap:.2f}")

    def _check_known(self, daemon: SimulatedDaemon, state: RunState, dt_s: float) -> None:
        """No machine is on no books for long while its controller looks."""
        looks = daemon.steers and not self._world.in_trouble
        for node in [node for node in self._unknown_s if node not in self._world.cloud.boxes]:
            del self._unknown_s[node]
        for node, box in self._world.cloud.boxes.items():
            unknown = node not in state.nodes and not box.gone
            self._unknown_s[node] = self._unknown_s.get(node, 0.0) + dt_s * looks if unknown else 0.0
            self.check(self._unknown_s[node] <= UNKNOWN_S, f"{node} runs, and nobody knows it")

    def _check_target(self, state: RunState, start: PolicyVersion | None) -> None:
        """A rollback goes at most twice as far back as to the best checkpoint that ever was."""
        ever, trip = self._world.work.ever, state.diverged
        if trip is None:
            return
        before_step = target_before_step(trip.onset_step, state.rollbacks[:-1])
        ideal = choose_start(sorted(ever), state.forks, state.timeline, before_step)
        self.check(
            start is None or start.step < before_step, f"back to {start}, which is not before {before_step}"
        )
        if start is None or ideal is None:
            self.check(ideal is None, f"back to the start, though there was {ideal}")
            return
        furthest = max(trip.step, *(at.step for at in ever))
        back, best = furthest - start.step, furthest - ideal.step
        self.check(back <= 2 * best, f"back to {start}, {back} steps; {ideal} would have been {best}")


# The production controller in the simulated world: its tick, journal, observer and actuator, on numbers alone. A
# daemon can be stopped, or die, between any two operations on the store and before each action, and so after any
# line of its tick that anybody could notice.


class _Died(BaseException):
    """The process is killed here."""


class QueuedActuator(Actuator):
    """The production actuator. Each of its threads is as fast as the rest of the tick, or begins after it."""

    def __init__(self, world: World, daemon: SimulatedDaemon) -> None:
        super().__init__(
            _Reached(world, daemon),  # type: ignore[arg-type]  # what it calls of a cloud
            daemon.store,
            lambda launch: {TIMELINE_ENV: str(launch.timeline)},
            clock=lambda: world.time_s,
        )
        self.waiting: list[Callable[[], None]] = []
        self._random, self._daemon = world.random, daemon

    def _spawn(self, run: Callable[[], None], name: str) -> None:  # noqa: ARG002  # the Actuator's own signature
        if self._random.random() < 0.5 and not self._daemon.stops_at_action:
            run()
        else:
            self.waiting.append(run)


class SimulatedDaemon:
    """One daemon, on a host whose clock is `ahead_s` of the true time, as `orchestrator.control.daemon` loops.

    Raises StoreUnavailable where it cannot take the run, Fenced where another does at the same moment.
    """

    def __init__(self, world: World, name: str, ahead_s: float) -> None:
        self.world, self.name, self.ahead_s = world, name, ahead_s
        self.store = SimulatedStore(world.objects)
        self.clock = RunClock(lambda: EPOCH_S + world.time_s + self.ahead_s, lambda: world.time_s)
        self.stop_in: int | None = None  # operations until this process is stopped
        self.stops_at_action = False  # between its look at the journal and its next action
        self.stop_for_s = 0.0
        self.die_in: int | None = None  # operations until it is killed
        self.busy = self.dead = False
        self.journal = Journal(self.store, f"{name}/1")
        state = self.journal.take_over(self.clock.now_s(), name, 1, "resume")
        self.store.before = self._operation
        world.took_over.append((self.journal.epoch, world.time_s))
        self.actuator = QueuedActuator(world, self)
        cloud = _Reached(world, self)
        observer = Observer(
            self.store,
            cloud,  # type: ignore[arg-type]  # what it calls of a cloud
            replace(world.spec, cloud="sky"),  # the pools of this world are there on any cloud
            clock=lambda: world.time_s,
            prices=lambda asked: _KnownPrices(asked, world.cloud),
        )
        self.controller = Controller(
            self.store, world.spec, self.journal, state, observer, self.actuator, world.decide
        )
        if not state.name:
            self.controller.record(self.clock.now_s(), (RunCreated("sim", "sim-0"),))

    @property
    def steers(self) -> bool:
        return not self.busy and not self.dead and not self.controller.finished

    def loop_once(self) -> None:
        self.busy = True
        try:
            renew(self.store, self.controller, self.journal.epoch, self.clock.now_s())
            self.controller.tick(self.clock.now_s())
            waiting, self.actuator.waiting = self.actuator.waiting, []
            for run in waiting:
                if self.stops_at_action:
                    self.stops_at_action, self.stop_in = False, 0
                self._operation()
                run()
        except (_Died, Fenced):
            self.dead = True
        except StoreUnavailable:
            self.controller.interrupt()
        self.busy = False

    def _operation(self) -> None:
        if self.die_in is not None:
            self.die_in -= 1
            if self.die_in < 0:
                self.world.note(f"{self.name} dies")
                raise _Died
        if self.stop_in is not None:
            self.stop_in -= 1
            if self.stop_in < 0:
                self.stop_in, busy, self.busy = None, self.busy, True
                self.world.run_for(self.stop_for_s)
                self.busy = busy


class _KnownPrices(pricing.Prices):
    """Prices that nobody waits for."""

    def __init__(self, asked: Cloud, cloud: SimulatedCloud) -> None:
        super().__init__(asked)
        self._known = cloud.most_usd_per_h
        self._simulated = cloud

    def look(self) -> Mapping[str, float]:
        assert self._known is not None
        return self._known

    def pools(self) -> tuple[PoolOffer, ...] | None:
        return self._simulated.pools()


class _Reached:
    """The cloud, as one controller calls it."""

    def __init__(self, world: World, daemon: SimulatedDaemon) -> None:
        self._world, self._daemon = world, daemon

    def machines(self) -> dict[str, Machine]:
        return self._world.cloud.machines()

    def launch(self, order: Order) -> None:
        self._world.safety.check_launch(self._daemon, order)
        self._world.cloud.launch(order)

    def terminate(self, node: str) -> None:
        self._world.safety.check_termination(self._daemon, node)
        box = self._world.cloud.terminate(node)
        if box is not None and box.notice and box.spool:
            self._world.work.forget(box)

    def confirm(self, node: str) -> None: ...


# The world.

DT_S = 5.0
STEADY = (DT_S,)
# For days in which little happens: two looks in half a minute, so near to each other that the second finds fresh
# what the gateway wrote in between.
COARSE = (4.0, 25.0)
STORE_SKEW_S = 10 * 86400.0  # its clock may be so far off; no story sets it
RESUME_S = 60.0  # until somebody elsewhere resumes a run that has no daemon


class World:
    """`time_s` is the true time. Raises Broken when somebody does what nobody may.

    Args:
        seed: of everything that is drawn.
        spec: the run's.
        weather: of the spot market; None: enough for everybody.
        physics: how long things take.
        prices: what they cost.
        max_steps: at which the run is done.
        trips: where its timelines diverge.
        decide: what its controllers decide with.
        rhythm: seconds from one moment to the next, over and over.
        logs: its trainers write the rows by which steps are measured.
    """

    def __init__(
        self,
        seed: int,
        spec: RunSpec,
        *,
        weather: Weather | None = None,
        physics: Physics = BRISK,
        prices: Prices | None = None,
        max_steps: int = 500,
        trips: Trips | None = None,
        decide: Decide = decide,
        rhythm: tuple[float, ...] = STEADY,
        logs: bool = False,
    ) -> None:
        self.seed, self.spec, self.decide = seed, spec, decide
        self.random = Random(seed)
        self.time_s = 1000.0
        self.store_ahead_s = Random(f"store's clock {seed}").uniform(-STORE_SKEW_S, STORE_SKEW_S)
        self.objects = Objects(self.random, lambda: EPOCH_S + self.time_s + self.store_ahead_s)
        weather = plentiful(spec.rollout.replicas.max) if weather is None else weather
        self.cloud = SimulatedCloud(weather, physics, prices or Prices(), self.objects, self.random)
        self.cloud.time_s = self.time_s
        self.cloud.disk_usd_per_h = {role: disks.usd_per_h(spec, role, None) for role in Role}
        self.safety = Safety(self)
        self.work = Work(self.cloud, spec, max_steps, trips or {}, self.safety.check, logs=logs)
        self.daemons: list[SimulatedDaemon] = []
        self.took_over: list[tuple[int, float]] = []
        self.log: list[str] = []
        self.skew_s = 0.0  # of the hosts on which the run will be resumed
        self.stopping = False  # somebody has asked for it
        self._rhythm = cycle(rhythm)
        self._nobody_since_s = self.time_s
        self.run_for(DT_S + RESUME_S)

    def run_for(self, for_s: float) -> None:
        """Let time pass: machines work, and daemons that are not stopped loop."""
        end_s = self.time_s + for_s
        while self.time_s < end_s:
            dt_s = next(self._rhythm)
            self.time_s += dt_s
            self.cloud.pass_time(self.time_s)
            self.work.pass_time(dt_s)
            for daemon in [one for one in self.daemons if one.steers]:
                daemon.loop_once()
                self._nobody_since_s = self.time_s
            if self.time_s - self._nobody_since_s >= RESUME_S and not self.is_over:
                self.resume()
            self.safety.check_moment(dt_s)

    def resume(self) -> None:
        """Somebody takes the run over, whether it has a daemon or not."""
        self._nobody_since_s = self.time_s
        with contextlib.suppress(StoreUnavailable, Fenced):
            self.daemons.append(SimulatedDaemon(self, f"host{len(self.daemons)}", self.skew_s))

    def rest(self) -> None:
        """From now on little happens, and moments lie further apart."""
        self._rhythm = cycle(COARSE)

    def ask_to_stop(self) -> None:
        """A user's `grpo-orch down`."""
        with contextlib.suppress(StoreUnavailable):
            documents.send_command(SimulatedStore(self.objects), DOWN, EPOCH_S + self.time_s)
            self.stopping = self.newest is None or self.newest.controller.state.phase not in TERMINAL_RUN

    def run_to_end(self, limit_s: float) -> None:
        """Let the run end undisturbed. Fails when it does not, or a machine is left. Time in which the weather has
        no spot machine does not count."""
        self.rest()
        end_s = self.time_s + limit_s
        while self.time_s < end_s and not self.is_over:
            before_s = self.time_s
            self.run_for(DT_S)
            end_s += (self.time_s - before_s) * self.cloud.is_without_spot(self.time_s)
        check, newest = self.safety.check, self.newest
        assert newest is not None
        state = newest.controller.state
        ends: tuple[RunPhase, ...] = (RunPhase.FINISHED, RunPhase.PAUSED, RunPhase.GAVE_UP)
        if state.money.is_reached:  # whether or not it was asked to stop after that
            ends = (RunPhase.PAUSED,) if self.spec.budget.at == "pause" else (RunPhase.STOPPED,)
        elif self.stopping:
            ends = (RunPhase.STOPPED,)
        check(state.phase in ends, f"does not end: {state}")
        check(bool(state.reason), "it ends without a reason")
        check(not self.cloud.boxes, f"machines are left: {list(self.cloud.boxes)}")
        if state.phase is RunPhase.PAUSED:
            self.safety.check_pause(state)
        if state.phase is RunPhase.FINISHED:
            check(self.work.stored_step == self.work.max_steps, "its last checkpoint is not stored")
        check(journal.recover(SimulatedStore(self.objects)).state == state, "state and journal disagree")
        bought = len(self.cloud.bought)
        self.run_for(600.0)
        check(len(self.cloud.bought) == bought, "machines are bought for a run that has ended")

    @property
    def is_over(self) -> bool:
        return self.newest is not None and self.newest.controller.finished

    @property
    def newest(self) -> SimulatedDaemon | None:
        return max(self.daemons, key=lambda one: one.journal.epoch, default=None)

    @property
    def in_trouble(self) -> bool:
        """Whether a controller cannot see, or cannot do, what it has to."""
        parties = [one.store for one in self.daemons if not one.dead]
        blind = self.cloud.away or self.cloud.is_stale or self.cloud.answers_lost
        return blind or any(not store.writes for store in parties)

    @property
    def digest(self) -> str:
        """Of all that happened, and when: the same for the same seed."""
        ended = f"{self.time_s} {self.cloud.spent_usd:.6f} {self.work.made_steps:.6f} {self.work.listed}"
        return hashlib.sha256("\n".join([*self.log, ended]).encode()).hexdigest()[:16]

    def note(self, what: str) -> None:
        self.log.append(f"{self.time_s:.0f} s: {what}")


# What a fleet policy achieves in a number of simulated hours.

HOURS = 48.0
THIS_RUN = "this run"
ON_DEMAND = "on-demand"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Steps that were not lost, USD spent, and the number of machines bought."""

    steps: float
    usd: float
    bought: int = 0

    @property
    def steps_per_usd(self) -> float:
        return self.steps / self.usd if self.usd else 0.0


def simulate_hours(
    spec: RunSpec,
    weather: Weather,
    physics: Physics,
    prices: Prices,
    hours: float,
    seed: int,
    decide: Decide = production,
) -> Outcome:
    """Simulate a run for some hours, without faults.

    The first machine already costs money, and so do machines that never serve.

    Args:
        decide: the fleet policy; the default is the production controller's.
    """
    world = World(
        seed,
        spec,
        weather=weather,
        physics=physics,
        prices=prices,
        max_steps=10**9,
        decide=decide,
        rhythm=COARSE,
        logs=True,
    )
    world.run_for(hours * 3600 - world.time_s)
    trained = [machine.step for machine in world.cloud.of(Role.TRAINER) if not machine.gone]
    steps = max([float(world.work.stored_step), *trained])
    return Outcome(steps, world.cloud.spent_usd, len(world.cloud.bought))


def on_demand(spec: RunSpec) -> RunSpec:
    """Return the same run with every machine on demand."""
    rollout = replace(spec.rollout, resources={**spec.rollout.resources, "use_spot": False})
    trainer = replace(spec.trainer, resources={**spec.trainer.resources, "use_spot": False})
    return replace(spec, rollout=rollout, trainer=trainer)
