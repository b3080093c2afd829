"""Scenarios: random faults of every party from a seed; then all but one fault end, and the run must converge.

A fault is a function that injects it and returns how to undo it, or None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from grpo_orch.orchestrator.simulate.market_trace import ZONES, MarketTrace, Zone
from grpo_orch.orchestrator.simulate.simulated_cloud import BRISK, Prices, SimulatedMachine
from grpo_orch.orchestrator.simulate.simulation import DT_S, Simulation
from grpo_orch.orchestrator.simulate.store import Trouble
from grpo_orch.policies.fleet.market import market_of, may_fall_back
from grpo_orch.policies.model.phases import LIVE_RUN
from grpo_orch.policies.model.spec import Budget, RunSpec, generates_itself
from grpo_orch.policies.model.vocabulary import Market, NodePhase, Role, RunPhase, role_of

HOUR_S = 3600.0
STALE_S = 180.0  # maximum delay of clouds' listings
OPERATIONS = 16  # maximum operations on the store and the cloud per tick

Undo = Callable[[], None]
Fault = Callable[[Simulation, Random], Undo | None]


def store_away(simulation: Simulation, random: Random) -> Undo:
    simulation.objects.trouble = random.choice((Trouble.NO_WRITES, Trouble.AWAY))
    simulation.note(f"the store: {simulation.objects.trouble.value}")
    return simulation.objects.clear


def cut_off(simulation: Simulation, random: Random) -> Undo | None:
    stores = [machine.store for machine in simulation.cloud.nodes.values()]
    stores += [daemon.store for daemon in simulation.daemons if not daemon.dead]
    if not stores:
        return None
    store = random.choice(stores)
    store.trouble = random.choice((Trouble.NO_WRITES, Trouble.AWAY))
    simulation.note("a machine or daemon is cut off from the store")
    return lambda: setattr(store, "trouble", Trouble.NONE)


def clocks_set(simulation: Simulation, random: Random) -> None:
    simulation.skew_s = random.choice((-HOUR_S, 0.0, HOUR_S))
    for daemon in simulation.daemons:
        daemon.ahead_s += random.choice((-HOUR_S, HOUR_S))
    simulation.note("clocks are set")


def suspended(simulation: Simulation, random: Random) -> None:
    for daemon in [daemon for daemon in simulation.daemons if not daemon.dead]:
        daemon.stop_for_s = random.choice((20.0, 121.0, HOUR_S))
        if random.random() < 0.5:
            daemon.stops_at_action = True
            simulation.note(f"{daemon.name} is stopped at its next action for {daemon.stop_for_s:.0f} s")
        else:
            daemon.stop_in = random.randrange(OPERATIONS)
            simulation.note(
                f"{daemon.name} is stopped in {daemon.stop_in} operations for {daemon.stop_for_s:.0f} s"
            )


def daemon_dies(simulation: Simulation, random: Random) -> None:
    """Kill the daemon at a random operation of its next tick."""
    simulation.skew_s = random.choice((-HOUR_S, 0.0, HOUR_S))
    for daemon in [daemon for daemon in simulation.daemons if not daemon.dead]:
        daemon.die_in = random.randrange(OPERATIONS)


def second_daemon(simulation: Simulation, random: Random) -> None:  # noqa: ARG001  # a fault's signature
    simulation.note("a second daemon resumes the run")
    simulation.resume()


def machine_lost(simulation: Simulation, random: Random) -> None:
    if machine := _random_machine(simulation, random):
        simulation.cloud.lose(machine)
        simulation.note(f"{machine.node} is lost")


def zone_lost(simulation: Simulation, random: Random) -> Undo:
    zone = random.choice(simulation.cloud.trace).name
    simulation.cloud.lose_zone(zone)
    simulation.cloud.closed_zones.add(zone)
    simulation.note(f"{zone} and all its machines are lost")
    return lambda: simulation.cloud.closed_zones.discard(zone)


def notice(simulation: Simulation, random: Random) -> None:
    if machine := _random_machine(simulation, random):
        is_false_alarm = random.random() < 0.5
        simulation.cloud.warn(
            machine, None if is_false_alarm else simulation.time_s + simulation.cloud.physics.take_back_s
        )
        simulation.note(f"{machine.node} gets a{' false' if is_false_alarm else ''} preemption notice")


def rebalance(simulation: Simulation, random: Random) -> None:
    """Send a rebalance recommendation, perhaps with a preemption notice."""
    if not (machine := _random_machine(simulation, random)):
        return
    machine.rebalance_recommended = True
    has_notice = random.random() < 0.5
    if has_notice:
        simulation.cloud.warn(machine, simulation.time_s + simulation.cloud.physics.take_back_s)
    notice_text = " and a preemption notice" if has_notice else ""
    simulation.note(f"{machine.node} gets a rebalance recommendation{notice_text}")


def work_ends(simulation: Simulation, random: Random) -> None:
    machine = _random_machine(simulation, random)
    if machine is not None and machine.is_working(simulation.time_s):
        machine.exit_code = 1
        simulation.note(f"the process on {machine.node} exits with code 1")


def diverges(simulation: Simulation, random: Random) -> None:
    """Let the newest timeline diverge soon."""
    trainers = [machine for machine in simulation.cloud.of(Role.TRAINER) if machine.step > 0]
    if trainers and simulation.spec.policies.kl.action != "alert":
        at = max(trainers, key=lambda machine: machine.precedence)
        trip = int(at.step) + random.randint(1, 60)
        onset = max(1, trip - random.randrange(40))
        simulation.work.trips = {**simulation.work.trips, at.timeline: (trip, onset)}
        simulation.note(f"timeline {at.timeline} diverges from step {onset} and trips at step {trip}")


def stale_listing(simulation: Simulation, random: Random) -> None:
    simulation.cloud.stale = simulation.cloud.truth()
    simulation.cloud.stale_until_s = simulation.time_s + STALE_S
    simulation.note("listings are stale")
    machine_lost(simulation, random)


def _last_trainer_lost(simulation: Simulation, random: Random) -> None:  # noqa: ARG001  # a fault's signature
    if trainers := simulation.cloud.of(Role.TRAINER):
        simulation.cloud.lose(trainers[-1])


def _rollout_nodes_lost(simulation: Simulation, random: Random) -> None:  # noqa: ARG001  # a fault's signature
    for machine in simulation.cloud.of(Role.ROLLOUT):
        if not machine.gone:
            simulation.cloud.lose(machine)


def _cloud_fault(
    attribute: str, event: str, also: Fault | None = machine_lost, on: bool | float = True
) -> Callable[[Simulation, Random], Undo]:
    """Return a fault that sets an attribute of the cloud, False or 0 otherwise, and injects `also`."""

    def fault(simulation: Simulation, random: Random) -> Undo:
        setattr(simulation.cloud, attribute, on)
        simulation.note(event)
        if also is not None:
            also(simulation, random)
        return lambda: setattr(simulation.cloud, attribute, type(on)())

    return fault


no_capacity = _cloud_fault("refusing", "no capacity", _last_trainer_lost)
no_spot = _cloud_fault("refusing_spot", "no spot capacity")
no_rollout_capacity = _cloud_fault("refusing_rollouts", "no rollout capacity on any market", _rollout_nodes_lost)
cloud_away = _cloud_fault("away", "the cloud does not answer", None)
answers_lost = _cloud_fault("answers_lost", "launches succeed, but their answers are lost")
never_work = _cloud_fault("never_work", "new rollout machines never work")
taken_early = _cloud_fault("takes_early", "new spot rollout machines are preempted before they work")
slow_launches = _cloud_fault("slow_by_s", "launches take longer than the deadline", on=1000.0)


def _random_machine(simulation: Simulation, random: Random) -> SimulatedMachine | None:
    machines = [machine for machine in simulation.cloud.nodes.values() if not machine.gone]
    return random.choice(machines) if machines else None


FAULTS: tuple[Fault, ...] = (
    store_away,
    store_away,
    cut_off,
    clocks_set,
    suspended,
    suspended,
    daemon_dies,
    daemon_dies,
    daemon_dies,
    second_daemon,
    machine_lost,
    zone_lost,
    notice,
    work_ends,
    diverges,
    diverges,
    no_capacity,
    no_spot,
    no_rollout_capacity,
    cloud_away,
    answers_lost,
    stale_listing,
    never_work,
    taken_early,
    slow_launches,
    rebalance,
)
# Faults that may last forever. With a tolerable one the run still ends; with a starving one it waits, states the
# reason and retries now and then.
TOLERABLE: tuple[Fault, ...] = (zone_lost, clocks_set, second_daemon)
STARVING: tuple[Fault, ...] = (no_spot, never_work, taken_early)


# Scenarios.

FAULTS_MAX = 8
OUTAGES_S = (10.0, 121.0, 1800.0)
QUIET_S = (0.0, 30.0, 120.0, 400.0)  # between two faults
RECOVERY_S = 8 * 3600.0  # twice the longest back-off
SPOT_SAMPLE_S = 60.0
STARVATION_S = 2 * 3600.0
# Limit on bought machines: a fault costs each node a machine or two, and failing launches back off.
BOUGHT_BASE, BOUGHT_PER_NODE = 15, 6


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """The outcome of a scenario."""

    seed: int
    phase: RunPhase
    reason: str
    hours: float
    usd: float
    bought: int
    digest: str


def run_scenario(
    seed: int, spec: RunSpec, *, trace: MarketTrace | None = None, prices: Prices | None = None
) -> ScenarioResult:
    """Run the scenario of a seed. Raises InvariantViolated, which names the seed, if an invariant is violated."""
    spec = _with_budget(seed, spec, prices or Prices())
    spec = replace(spec, policies=replace(spec.policies, trainer_restarts=10**6))  # faults cause them
    simulation = Simulation(seed, spec, trace=trace or _two_zones(spec), physics=BRISK, prices=prices)
    random = simulation.random
    _inject_faults(simulation, random)
    if not simulation.is_over and not simulation.stopping:
        _inject_lasting_fault(simulation, random)
    if not _check_starvation(simulation):
        simulation.run_to_end(RECOVERY_S)
    limit = BOUGHT_BASE + BOUGHT_PER_NODE * (1 + spec.rollout.replicas.max)
    if trace is None:  # other traces preempt any number of machines
        simulation.safety.check(
            len(simulation.cloud.bought) <= limit, f"too many machines were bought: {simulation.cloud.bought}"
        )
    assert simulation.newest is not None
    state = simulation.newest.controller.state
    hours = (simulation.time_s - 1000.0) / 3600
    return ScenarioResult(
        seed,
        state.phase,
        state.reason,
        hours,
        simulation.cloud.spent_usd,
        len(simulation.cloud.bought),
        simulation.digest,
    )


def _with_budget(seed: int, spec: RunSpec, prices: Prices) -> RunSpec:
    """In every fourth scenario, set a budget that the run reaches soon, or after a fault or two."""
    if spec.budget != Budget() or seed % 4:
        return spec
    hour_usd = prices.trainer_usd_per_h + spec.rollout.replicas.max * prices.spot_usd_per_h
    return replace(spec, budget=Budget(usd=hour_usd * Random(f"budget {seed}").uniform(0.6, 1.2)))


def _inject_faults(simulation: Simulation, random: Random) -> None:
    undos: list[tuple[float, Undo]] = []
    for _ in range(FAULTS_MAX):
        simulation.run_for(random.choice(QUIET_S))
        if simulation.is_over:
            break
        fault = random.choice(FAULTS)
        undo = fault(simulation, random)
        if undo is not None:
            undos.append((simulation.time_s + random.choice(OUTAGES_S), undo))
        for at_s, undo in list(undos):
            if at_s <= simulation.time_s or random.random() < 0.5:
                simulation.run_for(max(DT_S, at_s - simulation.time_s))
                undo()
                undos.remove((at_s, undo))
    for _, undo in undos:
        undo()


def _inject_lasting_fault(simulation: Simulation, random: Random) -> None:
    """Perhaps inject a fault that never ends, or stop the run."""
    match random.randrange(6):
        case 0:
            random.choice(TOLERABLE)(simulation, random)
        case 1:
            simulation.note("permanently:")
            random.choice(STARVING)(simulation, random)
            for machine in simulation.cloud.of(Role.ROLLOUT):
                if machine.market is Market.SPOT and not machine.gone:
                    simulation.cloud.lose(machine)
        case 2:
            simulation.note("a user stops the run")
            simulation.request_stop()
        case _:
            pass


def _check_starvation(simulation: Simulation) -> bool:
    """If no rollout node can ever work again, check that the run waits, states why and buys little.

    Returns False if the run can end.
    """
    cloud = simulation.cloud
    lacks_spot = _needs_spot(simulation.spec) and (
        cloud.refusing_spot or cloud.takes_early or _has_no_spot(simulation)
    )
    is_starving = cloud.never_work or lacks_spot
    if not is_starving or simulation.is_over or generates_itself(simulation.spec):
        return False
    simulation.rest()
    simulation.run_for(STARVATION_S)
    newest = simulation.newest
    assert newest is not None
    state, safety = newest.controller.state, simulation.safety
    if newest.controller.finished or state.phase not in LIVE_RUN:
        return False
    working = [node.id for node in state.live(Role.ROLLOUT) if node.phase is NodePhase.SERVING]
    reasons = [name for name, kind in state.kinds.items() if kind.stopped]
    safety.check(bool(working or reasons), "no rollout node works, and no reason is stated")
    before = len(simulation.cloud.bought)
    simulation.run_for(STARVATION_S)
    nodes = [node for node in simulation.cloud.bought[before:] if role_of(node) is Role.ROLLOUT]
    limit = 4 if may_fall_back(simulation.spec) else 2  # two on each market: the back-off has reached an hour
    safety.check(len(nodes) <= limit, "rollout machines that never work are bought too often")
    trainers = len(simulation.cloud.bought) - before - len(nodes)
    safety.check(trainers <= limit, "too many trainers are bought")  # a parked run buys one with each attempt
    return True


def _needs_spot(spec: RunSpec) -> bool:
    """Return whether the run needs spot machines to end: without on-demand fallback, or with a budget."""
    if market_of(Role.TRAINER, spec) is Market.SPOT or spec.budget != Budget():
        return True
    return market_of(Role.ROLLOUT, spec) is Market.SPOT and not may_fall_back(spec)


def _has_no_spot(simulation: Simulation) -> bool:
    """Return whether the trace has no spot machine for the next RECOVERY_S."""
    times_s = range(int(simulation.time_s), int(simulation.time_s + RECOVERY_S), int(SPOT_SAMPLE_S))
    return all(simulation.cloud.is_without_spot(time_s) for time_s in times_s)


def _two_zones(spec: RunSpec) -> MarketTrace:
    """Return two zones, each with enough machines for all nodes."""
    return tuple(Zone(name, 300.0, (spec.rollout.replicas.max,)) for name in ZONES[:2])
