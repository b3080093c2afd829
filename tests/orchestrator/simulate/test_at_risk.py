"""Machines that the simulated cloud says are at risk: which, what follows, and what steering makes of it."""

from __future__ import annotations

import logging
from dataclasses import replace
from random import Random

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.journal import journal
from orchestrator.clouds.protocol import Order
from orchestrator.simulate.climates import climate
from orchestrator.simulate.cloud import SimulatedCloud
from orchestrator.simulate.contest.compare import contenders
from orchestrator.simulate.contest.contenders import CONTENDERS
from orchestrator.simulate.machine import Box
from orchestrator.simulate.physics import BRISK, Physics, Prices
from orchestrator.simulate.recorded import RISK, recorded, replayed, to_plain
from orchestrator.simulate.store import Objects
from orchestrator.simulate.stories import tell
from orchestrator.simulate.weather import Zone
from orchestrator.simulate.world import COARSE, World
from policies.model.events import Event, NodeRequested, RiskTold
from policies.model.pool_record import AT_RISK_S
from policies.model.vocabulary import Market, Role
from tests.budget import examples
from tests.stand_ins.world import spec

GAP_S = 300.0
SAID = ("foretold", "false-alarms")


@pytest.fixture(autouse=True)
def _quiet(own_log: None) -> None:  # noqa: ARG001  # which ends it
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def there(zone: Zone, machines: int = 4) -> tuple[SimulatedCloud, list[Box]]:
    random = Random(0)
    cloud = SimulatedCloud((zone,), replace(BRISK, launch_s=0.0), Prices(), Objects(random), random)
    for place in range(machines):
        cloud.launch(Order(f"rollout-{place}-i1", Role.ROLLOUT, Market.SPOT, 1, {}, zone.pool))
    return cloud, list(cloud.boxes.values())


def at_risk(cloud: SimulatedCloud) -> int:
    return sum(one.at_risk for one in cloud.truth().values())


def test_so_many_as_the_weather_has_are_said_to_be_at_risk_and_stay_so() -> None:
    cloud, boxes = there(Zone("a", GAP_S, (4,), region="r", at_risk=(0, 1, 0, 2, 0, 0)))
    seen = []
    for gap in range(6):
        cloud.pass_time(gap * GAP_S + 1.0)
        seen.append(at_risk(cloud))
    assert seen == [0, 1, 1, 3, 3, 3]
    assert not any(box.gone or box.notice for box in boxes)


def test_those_that_are_foretold_are_taken_in_their_time_and_others_live_on() -> None:
    zone = Zone("a", GAP_S, (4,), region="r", at_risk=(0, 4, *[0] * 20), foretold=1.0, foretold_s=(400.0, 500.0))
    cloud, boxes = there(zone)
    cloud.pass_time(GAP_S + 1.0)
    cloud.pass_time(GAP_S + 390.0)
    assert not any(box.gone or box.notice for box in boxes)
    cloud.pass_time(GAP_S + 510.0)
    assert all(box.gone or box.notice for box in boxes)
    cloud, boxes = there(replace(zone, foretold=0.0))
    cloud.pass_time(GAP_S + 1.0)
    cloud.pass_time(20 * GAP_S)
    assert at_risk(cloud) == 4
    assert not any(box.gone or box.notice for box in boxes)


def test_one_that_is_returned_meanwhile_is_not_taken() -> None:
    cloud, boxes = there(Zone("a", GAP_S, (4,), region="r", at_risk=(0, 4), foretold=1.0, foretold_s=(60.0, 60.0)))
    lost: list[Box] = []
    cloud.on_loss = lost.append
    cloud.pass_time(GAP_S + 1.0)
    for box in boxes:
        cloud.terminate(box.node)
    cloud.pass_time(GAP_S + 500.0)
    assert lost == []


@settings(max_examples=examples(20), deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.sampled_from(SAID))
def test_no_promise_breaks_whatever_is_said_of_machines_in_any_trouble(seed: int, name: str) -> None:
    tell(seed, spec(2), weather=climate(name, seed, 2))


def lived(name: str, hours: float, nodes: int = 1, seed: int = 0, policy: str = "ours") -> World:
    world = World(
        seed,
        spec(nodes),
        weather=climate(name, seed, nodes),
        physics=Physics(),
        max_steps=10**9,
        decide=CONTENDERS[policy].decide,
        rhythm=COARSE,
        logs=True,
    )
    world.run_for(hours * 3600)
    return world


def events(world: World) -> list[Event]:
    assert world.newest is not None
    return [event for entry in journal.read(world.newest.store) for event in entry.decoded()]


def early(world: World) -> list[NodeRequested]:
    return [event for event in events(world) if isinstance(event, NodeRequested) and event.relieves]


@pytest.mark.slow  # both halves are found by policies/control/fleet/test_at_risk.py, without weather
def test_a_run_learns_in_its_weather_what_such_words_are_worth() -> None:
    """A day of each: where four of five come true others are bought before the loss, where they mean nothing next
    to none are; each in place of one that was said to be at risk, once."""
    true, false = (lived(name, 24.0) for name in SAID)
    for world in (true, false):
        told = [event.node for event in events(world) if isinstance(event, RiskTold)]
        assert len(told) == len(set(told)) >= 3
        relieved = [event.relieves for event in early(world)]
        assert len(relieved) == len(set(relieved))
        assert set(relieved) <= set(told)
    assert len(early(true)) >= 2
    assert len(early(false)) <= 1


def test_who_does_not_hear_of_it_buys_nothing_early() -> None:
    world = lived("foretold", 12.0, policy="deaf")
    assert not any(isinstance(event, RiskTold) for event in events(world))
    assert early(world) == []
    assert "deaf" in contenders(climate("foretold", 0, 2))
    assert "deaf" not in contenders(climate("zone-out", 0, 2))


def test_what_a_run_was_told_is_exported_and_said_again_in_its_replay() -> None:
    world = lived("foretold", 6.0)
    assert world.newest is not None
    history = [(one.number, one.time_s, one.decoded()) for one in journal.read(world.newest.store)]
    met = recorded(history)
    said = [one for one in met if one.what == RISK]
    assert [one.node for one in said] == [event.node for event in events(world) if isinstance(event, RiskTold)]
    assert said
    assert all(one.where.startswith("sim/east/") and "are expected to be" in one.why for one in said)
    zones = replayed([to_plain(one) for one in met], 2)
    assert sum(sum(zone.at_risk) for zone in zones) == len(said)
    without = replayed([to_plain(one) for one in met if one.what != RISK], 2)
    for zone, same in zip(zones, without, strict=True):
        assert zone.counts[: len(same.counts)] == same.counts


def test_a_loss_that_is_replayed_befalls_who_was_said_to_be_at_risk_before_it() -> None:
    cloud, boxes = there(Zone("a", GAP_S, (4, 4, 3), region="r", at_risk=(0, 1, 0)))
    cloud.pass_time(GAP_S + 1.0)
    (said,) = [box for box in boxes if box.at_risk_s is not None]
    cloud.pass_time(2 * GAP_S + 1.0)
    assert [box for box in boxes if box.gone or box.notice] == [said]
    assert GAP_S < AT_RISK_S
