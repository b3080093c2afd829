"""Lanes, tokens a second and the split of a step, from what was journalled, counted and logged."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.records.metrics import Row
from orchestrator.views.measured.lanes import (
    LANE_S,
    LOOKED_EVERY_S,
    SPAN_LEAST_S,
    Cell,
    Lanes,
    LaneState,
    Stretch,
    cells,
    phase_state,
    shares_at_work,
    span_of,
)
from orchestrator.views.measured.rates import Rates
from orchestrator.views.measured.step_split import step_split
from orchestrator.views.reader import Reader
from orchestrator.views.run_view import view_of
from policies.model.vocabulary import NodePhase, Role
from policies.serving.activity import UNKNOWN, pack
from policies.serving.gateway_status import GatewayStatus, MemberStatus
from policies.serving.wire import EngineWord
from tests.generators.views_world import T0, World

S = LaneState


def member(serving: bool = True, running: int = 0, tokens: int = 0, node: str = "rollout-0-i1") -> MemberStatus:
    return MemberStatus(node, "b", "h:1", "0-1", serving, False, running, 0.1, engine=EngineWord(tokens=tokens))


def lane_of(world: World, slot: str, at_s: float) -> list[tuple[float, LaneState]]:
    nodes = {node.slot: node for node in view_of(Reader(world.store), T0 + at_s, None).nodes}
    return [(one.since_s - T0, one.state) for one in nodes[slot].lane]


def test_a_lane_tells_the_lives_of_a_slots_machines() -> None:
    world = World()
    world.starts()
    world.moves(100, "rollout-1-i1", NodePhase.GONE, "preempted")
    world.asks_for(101, "rollout-1-i2")
    world.moves(140, "rollout-1-i2", NodePhase.REFUSED)
    begun = [(1, S.REQUESTED), (4, S.BOOTING), (10, S.SERVING)]
    assert lane_of(world, "rollout-0", 200) == begun
    assert lane_of(world, "rollout-1", 200) == [*begun, (100, S.LOST), (101, S.REQUESTED), (140, S.REFUSED)]
    assert lane_of(world, "rollout-0", 10 + LANE_S) == begun[2:]
    assert lane_of(world, "rollout-1", 102 + LANE_S) == [(101, S.REQUESTED), (140, S.REFUSED)]


def test_what_was_taken_down_was_not_lost() -> None:
    assert phase_state(NodePhase.GONE, NodePhase.TERMINATING) is S.GONE
    for before in (NodePhase.REQUESTED, NodePhase.BOOTING, NodePhase.SERVING, NodePhase.DRAINING):
        assert phase_state(NodePhase.GONE, before) is S.LOST
    for phase in set(NodePhase) - {NodePhase.GONE}:
        assert str(phase_state(phase, None)) == str(phase)


def test_the_gateway_tells_who_loads_and_who_is_idle_from_the_first_look_on() -> None:
    lanes = Lanes()
    lanes.told("r", S.SERVING, 100.0)
    looks = [([member(serving=False)], S.LOADING), ([member()], S.IDLE), ([member(running=1)], S.SERVING)]
    at_s = 1000.0
    for members, state in looks:
        at_s += LOOKED_EVERY_S
        assert lanes.look("r", Role.ROLLOUT, members, at_s)[0] is state
    assert lanes.look("r", Role.ROLLOUT, [member()], at_s + 1)[0] is S.IDLE  # too soon to be kept
    assert lanes.look("r", Role.ROLLOUT, [], at_s + 2) == (
        S.SERVING,
        (
            Stretch(100.0, S.SERVING),
            Stretch(1015.0, S.LOADING),
            Stretch(1030.0, S.IDLE),
            Stretch(1045.0, S.SERVING),
        ),
    )


def test_a_lane_keeps_an_hour_however_long_somebody_watches() -> None:
    lanes = Lanes()
    lanes.told("r", S.SERVING, 0.0)
    for look in range(10_000):
        _, lane = lanes.look("r", Role.ROLLOUT, [member(running=look % 2)], 5.0 * look)
    assert len(lane) <= LANE_S / LOOKED_EVERY_S + 1
    assert lane[1].since_s > 5.0 * look - LANE_S


NOW_S = 10_800.0
LANE = (Stretch(NOW_S - 3000, S.BOOTING), Stretch(NOW_S - 1801, S.LOST), Stretch(NOW_S - 1800, S.SERVING))


def strip(lane: Sequence[Stretch], now: LaneState, count: int) -> list[LaneState | None]:
    return [None if one is None else one.state for one in cells(lane, now, NOW_S, count)]


def test_a_strip_shows_each_loss_however_short_and_ends_with_what_is_now() -> None:
    assert strip(LANE, S.IDLE, 6) == [None, S.BOOTING, S.LOST, S.SERVING, S.SERVING, S.IDLE]
    assert strip((), S.REQUESTED, 3) == [None, None, S.REQUESTED]
    gone = (*LANE, Stretch(NOW_S - 600, S.GONE))
    assert strip(gone, S.GONE, 6)[-2:] == [S.SERVING, None]


def test_what_a_gateway_kept_of_a_member_tells_most_of_a_part_and_its_share() -> None:
    """Of a minute that nothing is known of, and of time in which it was no member, the lane tells."""
    lane = (Stretch(NOW_S - 3600, S.BOOTING), Stretch(NOW_S - 2400, S.SERVING))
    minutes = bytes([0x00] * 20 + [pack(15, 30, 60)] * 10 + [pack(40, 15, 60)] * 10 + [UNKNOWN] * 10)
    found = [one for one in cells(lane, S.SERVING, NOW_S, 6, minutes) if one is not None]
    assert [one.state for one in found] == [S.BOOTING, S.BOOTING, S.IDLE, S.LOADING, S.SERVING, S.SERVING]
    assert [one.share for one in found] == pytest.approx([1, 1, 0.5, 0.67, 1, 1], abs=0.04)
    (last, _) = cells(lane, S.SERVING, NOW_S, 2, bytes([pack(0, 15, 60)] * 30))
    assert last == Cell(S.BOOTING)  # for most of it
    (*_, third, _) = cells(lane, S.IDLE, NOW_S, 4, bytes([pack(6, 9, 60)] * 61))
    assert third is not None
    assert third.state is S.SERVING
    assert third.share == pytest.approx(0.75, abs=0.04)


@given(
    st.lists(st.tuples(st.floats(0, 9000), st.sampled_from(LaneState)), max_size=9),
    st.integers(1, 70),
    st.binary(max_size=61),
)
def test_a_strip_of_any_lane_has_its_length(
    times: list[tuple[float, LaneState]], count: int, minutes: bytes
) -> None:
    lane = [Stretch(NOW_S - ago_s, state) for ago_s, state in sorted(times, key=lambda one: -one[0])]
    now = lane[-1].state if lane else S.REQUESTED
    found = cells(lane, now, NOW_S, count, minutes)
    assert len(found) == count
    assert all(0 < one.share <= 1 for one in found if one is not None)
    shares = shares_at_work([lane, lane], NOW_S, count)
    assert len(shares) == count
    assert set(shares) <= {0.0, 1.0}


def test_of_a_young_run_a_strip_is_as_long_as_the_run() -> None:
    lane = (Stretch(NOW_S - 410, S.BOOTING), Stretch(NOW_S - 230, S.SERVING))
    assert span_of([(), lane], NOW_S) == 420
    assert span_of([lane[1:]], NOW_S) == span_of([()], NOW_S) == SPAN_LEAST_S
    assert span_of([lane, LANE], NOW_S) == 3000
    assert span_of([(Stretch(0.0, S.SERVING),)], NOW_S) == LANE_S
    minutes = bytes([UNKNOWN] * 56 + [pack(0, 45, 60)] * 2)  # the last ones before those that are not written yet
    found = cells(lane, S.SERVING, NOW_S, 7, minutes, 420)
    assert [one and one.state for one in found] == [*[S.BOOTING] * 3, *[S.IDLE] * 2, *[S.SERVING] * 2]
    assert shares_at_work([lane], NOW_S, 7, 420) == [0, 0, 0, 1, 1, 1, 1]


def test_of_several_lanes_the_share_that_was_at_work_is_told() -> None:
    half = (Stretch(NOW_S - 1800, S.SERVING),)
    idle = (Stretch(NOW_S - 9000, S.IDLE),)
    assert shares_at_work([half, idle], NOW_S, 4) == [0.5, 0.5, 1.0, 1.0]
    assert shares_at_work([], NOW_S, 2) == [0.0, 0.0]


def test_a_machines_rate_is_what_its_engines_counted_between_two_statuses() -> None:
    rates = Rates()
    rates.see(GatewayStatus("b", None, [member(tokens=1000)], up_s=10.0))
    assert rates.by_machine == {}
    rates.see(GatewayStatus("b", None, [member(tokens=1500)], up_s=15.0))
    assert rates.by_machine == {"rollout-0-i1": 100.0}
    rates.see(GatewayStatus("b", None, [member(tokens=1500)], up_s=15.0))  # the same status once more
    assert rates.by_machine == {"rollout-0-i1": 100.0}
    rates.see(GatewayStatus("b", None, [member(tokens=7)], up_s=20.0))  # its engine began anew
    assert rates.by_machine == {}
    rates.see(None)
    assert rates.by_machine == {}


def row(step: int, time_s: float, attempt: int = 1, **values: float) -> Row:
    return Row(0, step, time_s, attempt, {f"orch/{name}": value for name, value in values.items()})


def test_a_steps_time_is_split_into_all_of_it() -> None:
    rows = [
        row(1, 0.0),
        row(2, 10.0, generate_s=6.0, publish_s=1.0, wait_s=0.0),
        row(3, 90.0, attempt=2, generate_s=70.0),  # the trainer was started again in between
        row(4, 95.0, attempt=2, replayed=1.0),
        row(6, 125.0, attempt=2, generate_s=12.0, publish_s=1.0, wait_s=8.0),
    ]
    split = step_split(rows)
    assert split is not None
    found = [split.generate_s, split.publish_s, split.wait_s, split.train_s]
    assert found == pytest.approx([6.0, 2 / 3, 8 / 3, 4.0])
    assert split.step_s == pytest.approx(40 / 3)


def test_what_was_not_measured_is_not_split() -> None:
    assert step_split([row(1, 0.0), row(2, 10.0)]) is None
    assert step_split([]) is None


def test_parts_are_never_more_than_the_step() -> None:
    split = step_split([row(1, 0.0), row(2, 10.0, generate_s=9.0, publish_s=3.0)])
    assert split is not None
    assert [split.step_s, split.train_s] == pytest.approx([10.0, 0.0])
