"""What machines' time went to, read from the store: the right objects, each once, and of damage nothing."""

from __future__ import annotations

import itertools

from checkpoint.records.activity import HOUR_S, MINUTE_S, write_part
from checkpoint.store import layout
from checkpoint.store.run_store import Store
from orchestrator.views.measured.activity_log import AGAIN_S, ActivityLog, LastHour

HOUR = 472_222  # counted from the epoch
DAY = HOUR // 24
FROM_S = HOUR * 3600.0
NODE = "rollout-0-i1"
names = itertools.count()


class CountingStore(Store):
    """Counts the reads."""

    def __init__(self) -> None:
        super().__init__(f"memory://activity-log-{next(names)}")
        self.reads: list[str] = []

    def get_buffer(self, key: str) -> memoryview:
        self.reads.append(key)
        return super().get_buffer(key)


class World:
    def __init__(self) -> None:
        self.store, self.now_s = CountingStore(), 0.0
        self.log = ActivityLog(self.store, lambda: self.now_s)

    def writes(self, group: int, line: bytes, boot: str = "0a", slot_s: int = MINUTE_S) -> None:
        write_part(self.store, slot_s, group, boot, {NODE: line})

    def line(self, from_s: float, until_s: float) -> bytes:
        found = self.log.between(from_s, until_s)
        first = int(from_s // found.slot_s)
        return bytes(found.line(NODE, first, int(until_s // found.slot_s) - first))


def test_up_to_a_day_is_read_in_minutes_and_what_is_longer_in_hours() -> None:
    world = World()
    for group in range(HOUR - 30, HOUR + 30):
        world.writes(group, bytes([0x11] * 60))
    for group in range(DAY - 2, DAY + 3):
        world.writes(group, bytes([0x22] * 24), slot_s=HOUR_S)
    assert world.line(FROM_S + 600, FROM_S + 7200) == bytes([0x11] * 110)
    assert len(world.store.reads) == 3  # the hours that it touches
    assert world.line(FROM_S - 86_400, FROM_S + 86_400) == bytes([0x22] * 48)
    assert len(world.store.reads) == 6
    assert world.line(FROM_S - 90_000, FROM_S - 60_000)[:2] == bytes([0x11] * 2)


def test_each_object_is_read_once_until_it_changes() -> None:
    world = World()
    world.writes(HOUR, b"\x11")
    world.writes(HOUR + 1, b"\x22")
    for _ in range(3):
        assert world.line(FROM_S, FROM_S + 3660) == b"\x11" + b"\xff" * 59 + b"\x22"
    world.writes(HOUR + 1, b"\x22\x33")
    assert world.line(FROM_S, FROM_S + 3720)[-2:] == b"\x22\xff"  # as it was a moment ago
    world.now_s += AGAIN_S
    assert world.line(FROM_S, FROM_S + 3720)[-2:] == b"\x22\x33"
    assert len(world.store.reads) == 3


def test_of_two_gateways_the_later_is_believed_and_what_either_knows_is_kept() -> None:
    world = World()
    world.writes(HOUR, b"\x11\x11\xff\x11", boot="ff")
    world.writes(HOUR, b"\xff\x22\xff\x22\x22", boot="00")
    assert world.line(FROM_S, FROM_S + 300) == b"\x11\x22\xff\x22\x22"


def test_what_is_damaged_is_left_out() -> None:
    world = World()
    world.writes(HOUR, b"\x11")
    world.store.put(layout.activity(MINUTE_S, HOUR, "bad"), b"nonsense")
    world.store.put(f"{layout.activities(MINUTE_S)}/notes.txt", b"nonsense")
    assert world.line(FROM_S, FROM_S + 60) == b"\x11"


def test_of_the_last_hour_each_slot_has_its_machines_minutes() -> None:
    world = World()
    hour = LastHour(world.log)
    lines = {"rollout-0-i1": b"\x11\x11", "rollout-0-i2": b"\xff\xff\x22", "rollout-1-i9": b"\x33"}
    write_part(world.store, MINUTE_S, HOUR, "0a", lines)
    found = hour.until(FROM_S + 3590)
    assert {slot: line.rstrip(b"\xff") for slot, line in found.items()} == {
        "rollout-0": b"\xff\x11\x11\x22",
        "rollout-1": b"\xff\x33",
    }
    assert hour.until(FROM_S + 3595) is found
    assert hour.until(FROM_S + 3660)["rollout-0"][:3] == b"\x11\x22\xff"
    world.now_s += AGAIN_S
    world.writes(HOUR, b"\xff\x44", boot="0b")
    assert hour.until(FROM_S + 3660)["rollout-0"][:3] == b"\x44\x22\xff"
