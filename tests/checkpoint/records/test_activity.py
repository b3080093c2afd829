"""What machines' time went to, in the store: as much as is said of it, and damage that is told."""

from __future__ import annotations

import itertools
import random

import pytest
import zstandard

from checkpoint.records.activity import HOUR_S, MINUTE_S, read_part, write_part
from checkpoint.store import layout
from checkpoint.store.codec import to_json
from checkpoint.store.errors import Corrupt
from checkpoint.store.run_store import Store
from policies.serving.activity import pack

names = itertools.count()


def fresh() -> Store:
    return Store(f"memory://activity-{next(names)}")


@pytest.mark.parametrize(("slot_s", "slots", "most"), [(MINUTE_S, 60, 55_000), (HOUR_S, 24, 27_000)])
def test_of_a_thousand_machines_it_is_as_small_as_its_docstring_says(slot_s: int, slots: int, most: int) -> None:
    store, chance = fresh(), random.Random(1)
    machines = {}
    for number in range(1000):
        loading, idle = chance.uniform(0.05, 0.12), chance.uniform(0.15, 0.35)
        shares = [(max(0, chance.gauss(loading, 0.05)), max(0, chance.gauss(idle, 0.05))) for _ in range(slots)]
        machines[f"rollout-{number}-i{chance.randint(1, 40)}"] = bytes(pack(*one, 1.0) for one in shares)
    write_part(store, slot_s, 7, "b00t", machines)
    (entry,) = store.entries(layout.activities(slot_s))
    assert entry.size_bytes < most
    part = read_part(store, entry.key)
    assert part is not None
    assert (part.began_s, part.machines) == (7 * slot_s * slots, machines)


def test_names_in_order_are_times_in_order() -> None:
    keys = [layout.activity(MINUTE_S, group, boot) for group in (9, 10, 483_000) for boot in ("0a", "ff")]
    assert keys == sorted(keys)
    assert [layout.activity_group_of(key) for key in keys] == [9, 9, 10, 10, 483_000, 483_000]
    assert layout.activity(MINUTE_S, 10, "") > keys[1]
    assert layout.activity(MINUTE_S, 10, "") < keys[2]
    assert layout.activity_group_of("activity/0060/notes.txt") is None


def test_damage_is_told() -> None:
    store = fresh()
    key = layout.activity(MINUTE_S, 7, "b00t")
    assert read_part(store, key) is None
    write_part(store, MINUTE_S, 7, "b00t", {"rollout-0-i1": b"\x10\x20"})
    whole = store.get(key)
    newer = {"schema": 2, "slot_s": 60, "began_s": 0, "machines": {}}
    for data in (b"", b"nonsense", whole[:-4], zstandard.compress(b"{}"), zstandard.compress(to_json(newer))):
        store.put(key, data)
        with pytest.raises(Corrupt, match="activity/"):
            read_part(store, key)
