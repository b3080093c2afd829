"""The production controller in the steered world: its tick, journal, observer and actuator, on numbers alone.

A daemon can be stopped between any two operations on the store, and wakes up much later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from checkpoint.journal.journal import Fenced, Journal
from checkpoint.store.errors import StoreUnavailable
from orchestrator.clouds.protocol import CloudUnavailable, Order
from orchestrator.control.actuate import Actuator
from orchestrator.control.controller import Controller
from orchestrator.control.daemon import renew
from orchestrator.control.observe import Observer
from orchestrator.control.run_clock import RunClock
from policies.control.snapshot import Machine
from policies.model.events import RunCreated
from tests.stand_ins.weather_store import WeatherStore

if TYPE_CHECKING:
    from tests.stand_ins.steered_world import SteeredWorld

EPOCH_S = 1.7e9


class QueuedActuator(Actuator):
    """The production actuator. What its threads would do waits in a queue."""

    def _spawn(self, run: Callable[[], None], name: str) -> None:  # noqa: ARG002  # the Actuator's own signature
        self.waiting.append(run)

    def __init__(self, world: SteeredWorld, daemon: SteeredDaemon) -> None:
        super().__init__(SteeredCloud(world, daemon), daemon.store, lambda _: {}, clock=lambda: world.time_s)  # type: ignore[arg-type]  # what it calls of a cloud
        self.waiting: list[Callable[[], None]] = []


class SteeredDaemon:
    """One daemon, on a host whose clock is `ahead_s` of the true time, as `orchestrator.control.daemon` loops."""

    def __init__(self, world: SteeredWorld, name: str, ahead_s: float) -> None:
        self.world, self.name, self.ahead_s = world, name, ahead_s
        self.store = WeatherStore(world.sky)
        self.store.before = self._stop_here
        self.clock = RunClock(lambda: EPOCH_S + world.time_s + self.ahead_s, lambda: world.time_s)
        self.stop_in: int | None = None  # operations on the store until this process is stopped
        self.stop_for_s = 0.0
        self.busy = self.dead = False
        self.journal = Journal(self.store, f"{name}/1")
        state = self.journal.take_over(self.clock.now_s(), name, 1, "resume")
        world.took_over.append((self.journal.epoch, world.time_s))
        self.actuator = QueuedActuator(world, self)
        observer = Observer(self.store, SteeredCloud(world, self), world.spec, clock=lambda: world.time_s)  # type: ignore[arg-type]
        self.controller = Controller(self.store, world.spec, self.journal, state, observer, self.actuator)
        if not state.name:
            self.controller.record(self.clock.now_s(), (RunCreated("sim", "sim-0"),))

    def loop_once(self) -> None:
        if self.controller.finished:
            return
        self.busy = True
        try:
            renew(self.store, self.controller, self.journal.epoch)
            self.controller.tick(self.clock.now_s())
            waiting, self.actuator.waiting = self.actuator.waiting, []
            for run in waiting:
                self._stop_here()
                run()
        except Fenced:
            self.dead = True
        except StoreUnavailable:
            self.controller.broke()
        self.busy = False

    def _stop_here(self) -> None:
        if self.stop_in is None:
            return
        self.stop_in -= 1
        if self.stop_in < 0:
            self.stop_in, busy, self.busy = None, self.busy, True
            self.world.run_for(self.stop_for_s)
            self.busy = busy


class SteeredCloud:
    """The cloud, as one controller calls it."""

    def __init__(self, world: SteeredWorld, daemon: SteeredDaemon) -> None:
        self._world, self._daemon = world, daemon

    def machines(self) -> dict[str, Machine]:
        if self._world.cloud_away:
            raise CloudUnavailable("try again")
        return {box.node: self._world.as_machine(box) for box in self._world.boxes.values()}

    def launch(self, order: Order) -> None:
        self._world.check_may_act(self._daemon, f"launch {order.node}")
        self._world.launch(order)

    def terminate(self, node: str) -> None:
        self._world.check_may_act(self._daemon, f"terminate {node}")
        self._world.terminate(node, self._daemon)

    def confirm(self, node: str) -> None: ...
