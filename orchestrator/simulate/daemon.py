"""The production controller in the simulated world: its tick, journal, observer and actuator, on numbers alone.

A daemon can be stopped, or die, between any two operations on the store and before each action, and so after any
line of its tick that anybody could notice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from checkpoint.journal.journal import Fenced, Journal
from checkpoint.store.errors import StoreUnavailable
from orchestrator.clouds.protocol import Cloud, Order
from orchestrator.control.actuate import Actuator
from orchestrator.control.controller import Controller
from orchestrator.control.daemon import renew
from orchestrator.control.observe import Observer
from orchestrator.control.prices import Prices
from orchestrator.control.run_clock import RunClock
from orchestrator.simulate.cloud import EPOCH_S, SimulatedCloud
from orchestrator.simulate.store import SimulatedStore
from policies.control.snapshot import Machine
from policies.model.events import RunCreated
from policies.model.node_contract import TIMELINE_ENV
from policies.model.pools import PoolOffer

if TYPE_CHECKING:
    from orchestrator.simulate.world import World


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
            self.controller.broke()
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


class _KnownPrices(Prices):
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
