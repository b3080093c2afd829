"""Simulate a run under the production controller, with simulated machines, cloud and store.

Each party has its own clock and its own connection to the store. A simulation is deterministic: the same seed
gives the same events. This module has the invariants, the daemon and the simulation, in this order.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import cycle
from random import Random

from grpo_orch.checkpoint import journal
from grpo_orch.checkpoint.journal import Fenced, Journal
from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.store.errors import StoreUnavailable
from grpo_orch.orchestrator.clouds.protocol import Cloud, LaunchOrder
from grpo_orch.orchestrator.control import observe
from grpo_orch.orchestrator.control.actuate import ACT_WITHIN_S, Actuator
from grpo_orch.orchestrator.control.controller import Controller, Decide
from grpo_orch.orchestrator.control.daemon import renew
from grpo_orch.orchestrator.control.run_clock import RunClock
from grpo_orch.orchestrator.simulate.market_trace import MarketTrace, plentiful
from grpo_orch.orchestrator.simulate.simulated_cloud import (
    BRISK,
    EPOCH_S,
    Physics,
    Prices,
    SimulatedCloud,
    SimulatedMachine,
)
from grpo_orch.orchestrator.simulate.simulated_work import Work
from grpo_orch.orchestrator.simulate.store import Objects, SimulatedStore
from grpo_orch.policies.control.decide import decide
from grpo_orch.policies.control.lifecycle import DOWN
from grpo_orch.policies.control.node_phases import MACHINE_LOST_S
from grpo_orch.policies.control.rollback import newest_before, target_before_step
from grpo_orch.policies.costs import disks
from grpo_orch.policies.fleet.budget import STOP_WAIT_S, TEARDOWN_S
from grpo_orch.policies.model.events import RunCreated
from grpo_orch.policies.model.node_contract import TIMELINE_ENV
from grpo_orch.policies.model.phases import TERMINAL_RUN
from grpo_orch.policies.model.pools import PoolOffer
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.model.state import RunState
from grpo_orch.policies.model.vocabulary import PolicyVersion, Role, RunPhase
from grpo_orch.policies.tick.snapshot import Machine

# Invariants, checked at each launch and termination, and after each time step.

UNKNOWN_S = 600.0  # longest time for which a machine may be unknown to an observing controller


class InvariantViolated(AssertionError):
    """An invariant was violated; the message has the seed, the time and the events before."""


class Safety:
    """Raises InvariantViolated at the first violated invariant, and at every later check."""

    def __init__(self, simulation: Simulation) -> None:
        self._world = simulation
        self._allowed_usd = 0.0  # limit raised while no controller could act
        self._unknown_s: dict[str, float] = {}
        self._checked_rollbacks = 0
        self._noted: set[str] = set()
        self.broken = ""

    def check(self, holds: bool, otherwise: str) -> None:
        """Raise InvariantViolated with `otherwise` unless it `holds`; later checks repeat it."""
        if not holds and not self.broken:
            recent = "\n".join(self._world.log[-40:])
            self.broken = f"seed {self._world.seed}, at {self._world.time_s:.0f} s: {otherwise}\n{recent}"
        if self.broken:
            raise InvariantViolated(self.broken)

    def check_moment(self, dt_s: float) -> None:
        """Check the invariants of every time step."""
        self.check(True, "")
        self._check_budget()
        newest = self._world.newest
        if newest is None:
            return
        state = newest.controller.state
        self._check_known(newest, state, dt_s)
        if newest.controller.finished:
            remaining = [machine.node for machine in self._world.cloud.nodes.values() if not machine.gone]
            self.check(not remaining, f"the run has ended, but machines remain: {remaining}")
        for rollback in state.rollbacks[self._checked_rollbacks :]:
            self._check_target(state, rollback.fork.start_at)
        self._checked_rollbacks = max(self._checked_rollbacks, len(state.rollbacks))

    def check_pause(self, state: RunState) -> None:
        """Check that a diverged run pauses only if no checkpoint was ever suitable for a rollback."""
        is_for_budget = state.reason.startswith("the budget")
        if state.diverged is not None and not is_for_budget and self._world.spec.policies.kl.action == "rollback":
            before_step = target_before_step(state.diverged.onset_step, state.rollbacks)
            checkpoints = sorted(self._world.work.ever_listed)
            best = newest_before(checkpoints, state.forks, state.timeline, before_step)
            self.check(best is None, f"the run pauses without a rollback target, but {best} was suitable")

    def check_launch(self, daemon: SimulatedDaemon, order: LaunchOrder) -> None:
        self._check_may_act(daemon, f"launch {order.node}.{order.attempt}")
        if order.node in self._world.cloud.nodes:
            return
        run = daemon.controller.state
        entries = reversed(self._world.objects.folder("journal").values())
        is_journalled = any(f'"{order.node}"'.encode() in entry.data for entry in entries)
        self.check(is_journalled, f"{order.node} is bought without a journal entry")
        self.check(run.phase not in TERMINAL_RUN, f"{order.node} is bought for a run that is {run.phase}")

    def check_termination(self, daemon: SimulatedDaemon, node: str) -> None:
        """A working machine may be terminated only with its run, after a notice, or if others suffice."""
        self._check_may_act(daemon, f"terminate {node}")
        simulation, run = self._world, daemon.controller.state
        machine = simulation.cloud.nodes.get(node)
        if machine is None or machine.gone or machine.notice or run.phase in TERMINAL_RUN or simulation.stopping:
            return
        if run.phase is RunPhase.STOPPING:
            return
        unstored = [at for at in machine.spool if at not in simulation.work.listed]
        self.check(not unstored, f"{node} is terminated with unstored checkpoints: {unstored}")
        if not machine.is_working(simulation.time_s):
            return
        if machine.role is Role.TRAINER:
            self.check(self._may_lose_trainer(machine), f"a healthy trainer is terminated: {node}")
            return
        trainers = [trainer for trainer in simulation.cloud.of(Role.TRAINER) if trainer.is_up(simulation.time_s)]
        if simulation.cloud.is_stale:
            return  # the trainer may not be listed yet, and nodes without a trainer are released after 5 minutes
        others = [
            other
            for other in simulation.cloud.of(Role.ROLLOUT)
            if other is not machine and other.is_working(simulation.time_s)
        ]
        others_suffice = len(others) >= simulation.spec.rollout.replicas.min
        is_known = node in run.nodes  # unknown machines are terminated
        self.check(not trainers or others_suffice or not is_known, f"a serving node is terminated: {node}")

    def _check_may_act(self, daemon: SimulatedDaemon, action: str) -> None:
        note = f"{daemon.name}: {action}"
        if note not in self._noted:
            self._noted.add(note)
            self._world.note(note)
        epoch, since_s = self._world.take_overs[-1]
        late_s = self._world.time_s - since_s if daemon.journal.epoch != epoch else 0.0
        self.check(late_s <= ACT_WITHIN_S, f"{daemon.name} acts {late_s:.0f} s after it was replaced: {action}")

    def _may_lose_trainer(self, machine: SimulatedMachine) -> bool:
        simulation = self._world
        trainers = simulation.cloud.of(Role.TRAINER)
        is_replaced = any(
            trainer.precedence > machine.precedence and trainer.is_working(simulation.time_s)
            for trainer in trainers
        )
        started_late = machine.cut_off_s + machine.works_in_s > simulation.spec.policies.boot_timeout_s
        return is_replaced or (machine.step < 0 and started_late) or machine.cut_off_s > MACHINE_LOST_S

    def _check_budget(self) -> None:
        """Check the cap while a controller can observe and act.

        While none can, the limit rises to the USD spent by then plus the cost of stopping.
        """
        simulation, spent = self._world, self._world.cloud.spent_usd
        if (cap := simulation.spec.budget.usd) is None:
            return
        if simulation.is_impaired or not any(daemon.is_active for daemon in simulation.daemons):
            rates = [
                (
                    simulation.cloud.charged_usd_per_h(machine),
                    STOP_WAIT_S * (machine.role is Role.TRAINER) + TEARDOWN_S,
                )
                for machine in simulation.cloud.nodes.values()
            ]
            self._allowed_usd = spent + sum(usd_per_h * for_s / 3600 for usd_per_h, for_s in rates)
            return
        limit = max(cap, self._allowed_usd)
        self.check(spent <= limit, f"{spent:.2f} USD are spent, above {limit:.2f}; the budget is {cap:.2f}")

    def _check_known(self, daemon: SimulatedDaemon, state: RunState, dt_s: float) -> None:
        """Check that an observing controller learns of every machine within UNKNOWN_S."""
        is_observing = daemon.is_active and not self._world.is_impaired
        for node in [node for node in self._unknown_s if node not in self._world.cloud.nodes]:
            del self._unknown_s[node]
        for node, machine in self._world.cloud.nodes.items():
            is_unknown = node not in state.nodes and not machine.gone
            self._unknown_s[node] = self._unknown_s.get(node, 0.0) + dt_s * is_observing if is_unknown else 0.0
            self.check(self._unknown_s[node] <= UNKNOWN_S, f"{node} runs without being known to a controller")

    def _check_target(self, state: RunState, start: PolicyVersion | None) -> None:
        """Check that a rollback goes at most twice as far back as to the best checkpoint ever stored."""
        checkpoints, trip = self._world.work.ever_listed, state.diverged
        if trip is None:
            return
        before_step = target_before_step(trip.onset_step, state.rollbacks[:-1])
        best = newest_before(sorted(checkpoints), state.forks, state.timeline, before_step)
        is_early_enough = start is None or start.step < before_step
        self.check(is_early_enough, f"rollback to {start}, which is not before step {before_step}")
        if start is None or best is None:
            self.check(best is None, f"rollback to the start, although {best} was suitable")
            return
        furthest = max(trip.step, *(at.step for at in checkpoints))
        lost, lost_with_best = furthest - start.step, furthest - best.step
        message = f"rollback to {start} loses {lost} steps; {best} would have lost {lost_with_best}"
        self.check(lost <= 2 * lost_with_best, message)


# The production controller in the simulation: its tick, journal, observer and actuator. A daemon can be stopped or
# killed between any two operations on the store and before each action, so at every observable point of a tick.


class _Died(BaseException):
    """The process is killed here."""


class QueuedActuator(Actuator):
    """The production actuator. Each of its threads finishes within the tick, or starts after it."""

    def __init__(self, simulation: Simulation, daemon: SimulatedDaemon) -> None:
        super().__init__(
            _ControllerCloud(simulation, daemon),  # type: ignore[arg-type]  # the methods that it calls
            daemon.store,
            lambda launch: {TIMELINE_ENV: str(launch.timeline)},
            clock=lambda: simulation.time_s,
        )
        self.waiting: list[Callable[[], None]] = []
        self._random, self._daemon = simulation.random, daemon

    def _spawn(self, run: Callable[[], None], name: str) -> None:  # noqa: ARG002  # the Actuator's own signature
        if self._random.random() < 0.5 and not self._daemon.stops_at_action:
            run()
        else:
            self.waiting.append(run)


class SimulatedDaemon:
    """A daemon as in `orchestrator.control.daemon`, on a host whose clock is `ahead_s` ahead of the true time.

    Raises StoreUnavailable if it cannot take over the run, Fenced if another daemon does at the same moment.
    """

    def __init__(self, simulation: Simulation, name: str, ahead_s: float) -> None:
        self.simulation, self.name, self.ahead_s = simulation, name, ahead_s
        self.store = SimulatedStore(simulation.objects)
        self.clock = RunClock(lambda: EPOCH_S + simulation.time_s + self.ahead_s, lambda: simulation.time_s)
        self.stop_in: int | None = None  # operations until this process is stopped
        self.stops_at_action = False  # stop it between the journal check and the next action
        self.stop_for_s = 0.0
        self.die_in: int | None = None  # operations until it is killed
        self.busy = self.dead = False
        self.journal = Journal(self.store, f"{name}/1")
        state = self.journal.take_over(self.clock.now_s(), name, 1, "resume")
        self.store.before = self._operation
        simulation.take_overs.append((self.journal.epoch, simulation.time_s))
        self.actuator = QueuedActuator(simulation, self)
        cloud = _ControllerCloud(simulation, self)
        observer = observe.Observer(
            self.store,
            cloud,  # type: ignore[arg-type]  # the methods that it calls
            replace(simulation.spec, cloud="sky"),  # so that it reads pools
            clock=lambda: simulation.time_s,
            prices=lambda cloud: _InstantPrices(cloud, simulation.cloud),
        )
        self.controller = Controller(
            self.store, simulation.spec, self.journal, state, observer, self.actuator, simulation.decide
        )
        if not state.name:
            self.controller.record(self.clock.now_s(), (RunCreated("sim", "sim-0"),))

    @property
    def is_active(self) -> bool:
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
                self.simulation.note(f"{self.name} dies")
                raise _Died
        if self.stop_in is not None:
            self.stop_in -= 1
            if self.stop_in < 0:
                self.stop_in, busy, self.busy = None, self.busy, True
                self.simulation.run_for(self.stop_for_s)
                self.busy = busy


class _InstantPrices(observe.Prices):
    """Prices without a request and its delay."""

    def __init__(self, cloud: Cloud, simulated: SimulatedCloud) -> None:
        super().__init__(cloud)
        self._known = simulated.max_usd_per_h
        self._simulated = simulated

    def observe(self) -> Mapping[str, float]:
        assert self._known is not None
        return self._known

    def pools(self) -> tuple[PoolOffer, ...] | None:
        return self._simulated.pools()


class _ControllerCloud:
    """The cloud as called by one controller; checks invariants before launches and terminations."""

    def __init__(self, simulation: Simulation, daemon: SimulatedDaemon) -> None:
        self._world, self._daemon = simulation, daemon

    def machines(self) -> dict[str, Machine]:
        return self._world.cloud.machines()

    def launch(self, order: LaunchOrder) -> None:
        self._world.safety.check_launch(self._daemon, order)
        self._world.cloud.launch(order)

    def terminate(self, node: str) -> None:
        self._world.safety.check_termination(self._daemon, node)
        machine = self._world.cloud.terminate(node)
        if machine is not None and machine.notice and machine.spool:
            self._world.work.forget(machine)

    def confirm(self, node: str) -> None: ...


# The simulation.

DT_S = 5.0
STEADY = (DT_S,)
# For quiet days: two ticks in half a minute, close enough that the second finds a fresh gateway status.
COARSE = (4.0, 25.0)
STORE_SKEW_S = 10 * 86400.0  # maximum error of the store's clock
RESUME_S = 60.0  # until another daemon resumes a run without one


class Simulation:
    """A simulated run. `time_s` is the true time. Raises InvariantViolated if an invariant is violated.

    Args:
        seed: of all random numbers.
        spec: the run's spec.
        trace: the market trace; None: every request is granted.
        physics: durations.
        prices: prices of machines.
        max_steps: the last step.
        decide: the controllers' decision function.
        rhythm: lengths of the time steps in seconds, repeated.
        logs: trainers write the metrics from which steps are measured.
    """

    def __init__(
        self,
        seed: int,
        spec: RunSpec,
        *,
        trace: MarketTrace | None = None,
        physics: Physics = BRISK,
        prices: Prices | None = None,
        max_steps: int = 500,
        decide: Decide = decide,
        rhythm: tuple[float, ...] = STEADY,
        logs: bool = False,
    ) -> None:
        self.seed, self.spec, self.decide = seed, spec, decide
        self.random = Random(seed)
        self.time_s = 1000.0
        self.store_ahead_s = Random(f"store's clock {seed}").uniform(-STORE_SKEW_S, STORE_SKEW_S)
        self.objects = Objects(self.random, lambda: EPOCH_S + self.time_s + self.store_ahead_s)
        trace = plentiful(spec.rollout.replicas.max) if trace is None else trace
        self.cloud = SimulatedCloud(trace, physics, prices or Prices(), self.objects, self.random)
        self.cloud.time_s = self.time_s
        self.cloud.disk_usd_per_h = {role: disks.usd_per_h(spec, role, None) for role in Role}
        self.safety = Safety(self)
        self.work = Work(self.cloud, spec, max_steps, self.safety.check, logs=logs)
        self.daemons: list[SimulatedDaemon] = []
        self.take_overs: list[tuple[int, float]] = []  # epoch and time
        self.log: list[str] = []
        self.skew_s = 0.0  # clock error of the hosts of new daemons
        self.stopping = False  # a user has requested it
        self._rhythm = cycle(rhythm)
        self._inactive_since_s = self.time_s
        self.run_for(DT_S + RESUME_S)

    def run_for(self, for_s: float) -> None:
        """Let time pass: machines work, and daemons that are not stopped loop."""
        end_s = self.time_s + for_s
        while self.time_s < end_s:
            dt_s = next(self._rhythm)
            self.time_s += dt_s
            self.cloud.pass_time(self.time_s)
            self.work.pass_time(dt_s)
            for daemon in [daemon for daemon in self.daemons if daemon.is_active]:
                daemon.loop_once()
                self._inactive_since_s = self.time_s
            if self.time_s - self._inactive_since_s >= RESUME_S and not self.is_over:
                self.resume()
            self.safety.check_moment(dt_s)

    def resume(self) -> None:
        """Start another daemon, whether the run has one or not."""
        self._inactive_since_s = self.time_s
        with contextlib.suppress(StoreUnavailable, Fenced):
            self.daemons.append(SimulatedDaemon(self, f"host{len(self.daemons)}", self.skew_s))

    def rest(self) -> None:
        """Use longer time steps from now on, for a quiet phase."""
        self._rhythm = cycle(COARSE)

    def request_stop(self) -> None:
        """Send `grpo-orch down`."""
        with contextlib.suppress(StoreUnavailable):
            documents.send_command(SimulatedStore(self.objects), DOWN, EPOCH_S + self.time_s)
            self.stopping = self.newest is None or self.newest.controller.state.phase not in TERMINAL_RUN

    def run_to_end(self, limit_s: float) -> None:
        """Run to the end without faults; check that the run ends within `limit_s` and leaves no machine.

        Time without spot machines in the trace does not count.
        """
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
        if state.money.is_reached:  # even if a user stopped it afterwards
            ends = (RunPhase.PAUSED,)
        elif self.stopping:
            ends = (RunPhase.STOPPED,)
        check(state.phase in ends, f"the run does not end: {state}")
        check(bool(state.reason), "the run ends without a reason")
        check(not self.cloud.nodes, f"machines remain: {list(self.cloud.nodes)}")
        if state.phase is RunPhase.PAUSED:
            self.safety.check_pause(state)
        if state.phase is RunPhase.FINISHED:
            check(self.work.stored_step == self.work.max_steps, "the last checkpoint is not stored")
        check(journal.recover(SimulatedStore(self.objects)).state == state, "state and journal differ")
        bought = len(self.cloud.bought)
        self.run_for(600.0)
        check(len(self.cloud.bought) == bought, "machines are bought after the run has ended")

    @property
    def is_over(self) -> bool:
        return self.newest is not None and self.newest.controller.finished

    @property
    def newest(self) -> SimulatedDaemon | None:
        return max(self.daemons, key=lambda daemon: daemon.journal.epoch, default=None)

    @property
    def is_impaired(self) -> bool:
        """Whether a controller cannot observe or cannot act."""
        stores = [daemon.store for daemon in self.daemons if not daemon.dead]
        cloud_fails = self.cloud.away or self.cloud.is_stale or self.cloud.answers_lost
        return cloud_fails or any(not store.writes for store in stores)

    @property
    def digest(self) -> str:
        """Hash of all events and their times: equal for equal seeds."""
        outcome = f"{self.time_s} {self.cloud.spent_usd:.6f} {self.work.made_steps:.6f} {self.work.listed}"
        return hashlib.sha256("\n".join([*self.log, outcome]).encode()).hexdigest()[:16]

    def note(self, event: str) -> None:
        self.log.append(f"{self.time_s:.0f} s: {event}")


# Results of a fleet policy over a number of simulated hours.

HOURS = 48.0
THIS_RUN = "this run"
ON_DEMAND = "on-demand"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Steps kept, USD spent and machines bought."""

    steps: float
    usd: float
    bought: int = 0

    @property
    def steps_per_usd(self) -> float:
        return self.steps / self.usd if self.usd else 0.0


def simulate_hours(
    spec: RunSpec,
    trace: MarketTrace,
    physics: Physics,
    prices: Prices,
    hours: float,
    seed: int,
    decide: Decide = decide,
) -> Outcome:
    """Simulate a run for some hours, without faults.

    The cost includes the first machine and machines that never serve.

    Args:
        decide: the fleet policy; the default is the production controller's.
    """
    simulation = Simulation(
        seed,
        spec,
        trace=trace,
        physics=physics,
        prices=prices,
        max_steps=10**9,
        decide=decide,
        rhythm=COARSE,
        logs=True,
    )
    simulation.run_for(hours * 3600 - simulation.time_s)
    trained = [machine.step for machine in simulation.cloud.of(Role.TRAINER) if not machine.gone]
    steps = max([float(simulation.work.stored_step), *trained])
    return Outcome(steps, simulation.cloud.spent_usd, len(simulation.cloud.bought))


def on_demand(spec: RunSpec) -> RunSpec:
    """Return the same run with every machine on demand."""
    rollout = replace(spec.rollout, resources={**spec.rollout.resources, "use_spot": False})
    trainer = replace(spec.trainer, resources={**spec.trainer.resources, "use_spot": False})
    return replace(spec, rollout=rollout, trainer=trainer)
