"""The simulated cloud: who has which machine, what it takes back, and what it has charged."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from orchestrator.clouds.protocol import CloudRefused, CloudUnavailable, Order
from orchestrator.simulate.machine import Box
from orchestrator.simulate.physics import Physics, Prices
from orchestrator.simulate.store import Objects, SimulatedStore
from orchestrator.simulate.weather import DEAREST, Weather, Zone
from policies.control.snapshot import Machine
from policies.model.node_contract import TIMELINE_ENV
from policies.model.vocabulary import Market, Refusal, Role, kind_of


class SimulatedCloud:
    """The machines of one run. What goes wrong with it is set from outside.

    Args:
        weather: of the spot market, from time 0 on.
        objects: of the store that its machines reach.
        random: the world's.
    """

    def __init__(
        self, weather: Weather, physics: Physics, prices: Prices, objects: Objects, random: Random
    ) -> None:
        self.weather, self.physics, self.prices = weather, physics, prices
        self.boxes: dict[str, Box] = {}
        self.bought: list[str] = []
        self.spent_usd = 0.0
        self.disk_usd_per_h: dict[Role, float] = {}  # on top of each machine's price
        self.refusing = False
        self.refusing_spot = False
        self.away = False
        self.answers_lost = False  # launches are done, and nobody hears of it
        self.stale: dict[str, Machine] = {}  # what every listing shows, however old,
        self.stale_until_s = 0.0  # until then
        self.never_work = False  # rollout machines that are launched now
        self.slow_by_s = 0.0  # of launches
        self.closed_zones: set[str] = set()
        self.time_s = 0.0
        self.on_loss: Callable[[Box], None] = lambda _: None
        self._objects, self._random = objects, random

    def pass_time(self, time_s: float) -> None:
        """Charge what is there up to `time_s`, and take back what the weather does not leave."""
        hours = (time_s - self.time_s) / 3600
        self.spent_usd += hours * sum(self.charged_usd_per_h(box) for box in self.boxes.values() if not box.gone)
        self.time_s = time_s
        for zone in self.weather:
            self._take_back(zone)
        for box in self.boxes.values():
            if box.taken_at_s is not None and time_s >= box.taken_at_s and not box.gone:
                self.lose(box)

    def usd_per_h(self, box: Box) -> float:
        if box.market is Market.SPOT:
            return self.prices.spot_usd_per_h * self._zone(box.zone).price_at(self.time_s)
        return self.on_demand_usd_per_h(box.role)

    def charged_usd_per_h(self, box: Box) -> float:
        """With its disk."""
        return self.usd_per_h(box) + self.disk_usd_per_h.get(box.role, 0.0)

    def on_demand_usd_per_h(self, role: Role) -> float:
        return self.prices.trainer_usd_per_h if role is Role.TRAINER else self.prices.node_usd_per_h

    @property
    def most_usd_per_h(self) -> dict[str, float]:
        """By `kind_of`, what a machine of each kind may cost."""
        spot = DEAREST * self.prices.spot_usd_per_h
        return {
            kind_of(role, market): spot if market is Market.SPOT else self.on_demand_usd_per_h(role)
            for role in Role
            for market in Market
        }

    def machines(self) -> dict[str, Machine]:
        """What a listing shows. Raises CloudUnavailable."""
        if self.away:
            raise CloudUnavailable("try again")
        return dict(self.stale) if self.is_stale else self.truth()

    @property
    def is_stale(self) -> bool:
        return self.time_s < self.stale_until_s

    def truth(self) -> dict[str, Machine]:
        return {
            node: box.shown(self.time_s, self.usd_per_h(box), self.on_demand_usd_per_h(box.role))
            for node, box in self.boxes.items()
        }

    def launch(self, order: Order) -> None:
        """As `Cloud.launch`. Raises CloudRefused, CloudUnavailable."""
        box, timeline = self.boxes.get(order.node), int(order.environment.get(TIMELINE_ENV, "0"))
        if box is None:
            self._buy(order, timeline)
        elif not box.gone and box.attempt < order.attempt:
            box.begin(order.attempt, timeline, self.time_s)
        if self.answers_lost:
            raise CloudUnavailable("the answer is lost")

    def is_without_spot(self, time_s: float) -> bool:
        """Whether the weather has no spot machine then, whoever holds it."""
        return not any(zone.count_at(time_s) for zone in self.weather)

    def lose(self, box: Box) -> None:
        """The cloud takes a machine, and what lies on it."""
        box.lose()
        self.on_loss(box)

    def lose_zone(self, name: str) -> None:
        for box in self.boxes.values():
            if box.zone == name and not box.gone:
                self.lose(box)

    def of(self, role: Role) -> list[Box]:
        return [box for box in self.boxes.values() if box.role is role]

    def _buy(self, order: Order, timeline: int) -> None:
        if self.refusing or (self.refusing_spot and order.market is Market.SPOT):
            raise CloudRefused(Refusal.NO_CAPACITY, "nothing to be had")
        zone = self._open_zone() if order.market is Market.SPOT else ""
        draw = self._random
        up_at_s = self.time_s + self.physics.about(self.physics.launch_s, draw) + self.slow_by_s
        works_in_s = self.physics.about(self.physics.setup_s, draw)
        if order.role is Role.ROLLOUT:
            boxes = self.boxes.values()
            first = not any(one.role is Role.ROLLOUT and one.at_work(self.time_s) for one in boxes)
            weights_s = self.physics.first_weights_s if first else self.physics.weights_s
            works_in_s += self.physics.about(weights_s, draw)
        store = SimulatedStore(self._objects)
        box = Box(order.node, store, order.market, zone, up_at_s, works_in_s, order.attempt, timeline, 0.0)
        box.never_works = self.never_work and order.role is Role.ROLLOUT
        box.begin(order.attempt, timeline, self.time_s)
        self.boxes[order.node] = box
        self.bought.append(order.node)

    def _open_zone(self) -> str:
        """The cheapest zone that has a machine left. Raises CloudRefused."""
        there = [zone for zone in self.weather if self._room(zone) > 0]
        if not there:
            raise CloudRefused(Refusal.NO_CAPACITY, "no spot machine in any zone")
        return min(there, key=lambda zone: (zone.price_at(self.time_s), -self._room(zone), zone.name)).name

    def _room(self, zone: Zone) -> int:
        left = 0 if zone.name in self.closed_zones else zone.count_at(self.time_s)
        return left - len(self._held(zone))

    def _held(self, zone: Zone) -> list[Box]:
        return [
            box for box in self.boxes.values() if box.zone == zone.name and not box.gone and box.taken_at_s is None
        ]

    def _take_back(self, zone: Zone) -> None:
        held, room = self._held(zone), self._room(zone)
        for box in self._random.sample(held, min(len(held), max(0, -room))):
            if self._random.random() < self.physics.noticed:
                box.notice, box.taken_at_s = True, self.time_s + self.physics.take_back_s
            else:
                self.lose(box)

    def _zone(self, name: str) -> Zone:
        return next(zone for zone in self.weather if zone.name == name)
