"""A whole run under its production controllers, on machines, a cloud and a store that exist only as numbers.

Each party has a clock of its own and its own way to the store; machines are slow to come, or come and never work.
Everything follows from the seed: two worlds of one seed live through the same.
"""

from __future__ import annotations

import contextlib
import hashlib
from itertools import cycle
from random import Random

from checkpoint.journal import journal
from checkpoint.journal.journal import Fenced
from checkpoint.records import documents
from checkpoint.store.errors import StoreUnavailable
from orchestrator.control.controller import Decide
from orchestrator.simulate.cloud import BRISK, EPOCH_S, Physics, Prices, SimulatedCloud
from orchestrator.simulate.daemon import SimulatedDaemon
from orchestrator.simulate.safety import Safety
from orchestrator.simulate.store import Objects, SimulatedStore
from orchestrator.simulate.weather import Weather, plentiful
from orchestrator.simulate.work import Trips, Work
from policies.control.decide import decide
from policies.control.stopping import DOWN
from policies.fleet import disks
from policies.model.phases import TERMINAL_RUN
from policies.model.spec import RunSpec
from policies.model.vocabulary import Role, RunPhase

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
        if state.budget_reached:  # whether or not it was asked to stop after that
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
