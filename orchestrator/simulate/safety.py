"""The promises, checked at each launch, each termination and after each moment of the simulated world."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.clouds.protocol import Order
from orchestrator.control.actuate import ACT_WITHIN_S
from orchestrator.simulate.cloud import Box
from policies.control.observed import MACHINE_LOST_S
from policies.control.rollback.choice import choose_start, target_before_step
from policies.control.stopping import STOP_WAIT_S
from policies.fleet.budget import TEARDOWN_S
from policies.model.phases import TERMINAL_RUN
from policies.model.state import RunState
from policies.model.vocabulary import PolicyVersion, Role, RunPhase

if TYPE_CHECKING:
    from orchestrator.simulate.daemon import SimulatedDaemon
    from orchestrator.simulate.world import World

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
