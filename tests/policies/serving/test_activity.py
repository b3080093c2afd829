"""Seconds that machines loaded, were idle or served, counted into a byte a slot."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.serving.activity import (
    PARTS,
    UNKNOWN,
    Activity,
    Counted,
    activities,
    activity_of,
    pack,
    unpack,
)
from policies.serving.gateway_status import MemberStatus

T0 = 1_700_000_040.0  # where an hour's minute 14 begins
seconds = st.floats(0, 3600)


def member(node: str, serving: bool = True, running: int = 0, draining: bool = False) -> MemberStatus:
    return MemberStatus(node, "b", "h:1", "0-1", serving, draining, running, 0.1)


def test_what_a_machine_is_at_follows_from_all_its_engines() -> None:
    assert activity_of([]) is None
    assert activity_of([member("a", draining=True)]) is None  # it leaves
    assert activity_of([member("a", serving=False)]) is Activity.LOADING
    assert activity_of([member("a")]) is Activity.IDLE
    assert activity_of([member("a", running=1)]) is Activity.SERVING
    machines = [
        member("a.0", serving=False),
        member("a.1", running=2),
        member("b.0"),
        member("b.1", serving=False),
        member("c", draining=True, running=4),
    ]
    assert activities(machines) == {"a": Activity.SERVING, "b": Activity.IDLE}


@given(seconds, seconds, seconds)
def test_a_byte_tells_shares_to_a_thirtieth(loading_s: float, idle_s: float, serving_s: float) -> None:
    known_s = loading_s + idle_s + serving_s
    byte = pack(loading_s, idle_s, known_s)
    told = unpack(byte)
    if known_s == 0:
        assert (byte, told) == (UNKNOWN, None)
        return
    assert told is not None
    assert abs(told.loading - loading_s / known_s) <= 0.5 / PARTS + 1e-9
    assert abs(told.idle - idle_s / known_s) <= 1 / PARTS + 1e-9  # both halves may be rounded up
    assert 0 <= told.loading + told.idle <= 1


def test_a_minute_is_what_it_was_spent_on_as_far_as_it_was_seen() -> None:
    counted = Counted(60, 60)
    hour, minute = int(T0 // 3600), int(T0 // 60) % 60
    for second in range(1, 60):
        activity = Activity.LOADING if second <= 12 else Activity.IDLE if second <= 36 else Activity.SERVING
        now = {"a": activity}
        if second > 50:
            now["b"] = Activity.LOADING  # it has just come
        assert counted.see(now, T0 + second, 1.0) is None
    assert counted.see({"a": Activity.SERVING}, T0 + 60, 1.0) == hour
    lines = counted.packed(hour)
    assert lines["a"][:minute] == bytes([UNKNOWN]) * minute
    loading, idle = lines["a"][minute] >> 4, lines["a"][minute] & 0xF
    assert (loading, idle) == (round(15 * 12 / 59), round(15 * 24 / 59))
    assert lines["b"][minute:] == bytes([0xF0])
    assert counted.packed(hour, open_too=True)["a"][minute:] == bytes([lines["a"][minute], 0])


def test_no_more_than_two_groups_are_remembered() -> None:
    counted = Counted(60, 60)
    hour = int(T0 // 3600)
    for minutes in range(0, 60 * 5):
        counted.see({"a": Activity.IDLE}, T0 + 60 * minutes, 1.0)
    assert [group for group in range(hour, hour + 6) if counted.packed(group)] == [hour + 4, hour + 5]


def test_a_clock_that_is_set_back_loses_a_minute_and_no_more() -> None:
    counted = Counted(60, 60)
    hour, minute = int(T0 // 3600), int(T0 // 60) % 60
    for at_s in (T0, T0 + 61, T0 + 2, T0 + 62):
        counted.see({"a": Activity.IDLE}, at_s, 1.0)
    assert counted.packed(hour)["a"][minute:] == bytes([0x0F, 0x0F])
