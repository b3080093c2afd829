"""How timelines begin in the store: written once, read in order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo_orch.checkpoint.records.documents import newest_timeline, read_forks, write_fork
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.codec import to_json
from grpo_orch.checkpoint.store.errors import Corrupt
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.timelines import Fork, Skipped

FIRST = Fork(1, "0-120", {"beta": 0.08, "num_generations": 4}, (Skipped(0, 121, 130),), "KL grew 40 times")


def test_a_run_without_rollbacks_has_none(store: Store) -> None:
    assert (read_forks(store), newest_timeline(store)) == ((), 0)


def test_what_is_written_is_read_in_order(store: Store) -> None:
    # Numbers may be left out, and the eleventh comes after the second.
    later = [Fork(2, None, {"beta": 0.16}, FIRST.skipped), Fork(11, "2-40"), Fork(12, "1-130")]
    for fork in (later[2], FIRST, later[1], later[0]):
        write_fork(store, fork)
    assert read_forks(store) == (FIRST, *later)
    assert newest_timeline(store) == 12


def test_writing_it_again_changes_nothing(store: Store) -> None:
    write_fork(store, FIRST)
    write_fork(store, replace(FIRST, changes=dict(FIRST.changes)))
    assert read_forks(store) == (FIRST,)


@pytest.mark.parametrize(
    "other",
    [
        replace(FIRST, start="0-100"),
        replace(FIRST, changes={"beta": 0.16, "num_generations": 4}),
        replace(FIRST, skipped=()),
        replace(FIRST, start=None),
    ],
)
def test_another_fork_of_that_number_is_refused(store: Store, other: Fork) -> None:
    write_fork(store, FIRST)
    with pytest.raises(Corrupt, match=r"timelines/0001.json already exists: from 0-120, 'KL grew 40 times'"):
        write_fork(store, other)
    assert read_forks(store) == (FIRST,)


def test_what_others_put_there_is_left_alone(store: Store) -> None:
    write_fork(store, FIRST)
    for name in ("note.txt", "0002.json.bak", "2.json"):
        store.put(f"{layout.TIMELINES}/{name}", b"{}")
    assert (read_forks(store), newest_timeline(store)) == ((FIRST,), 1)


@pytest.mark.parametrize(
    ("number", "document"),
    [
        (1, b"{"),
        (1, b'{"timeline": 1, "start": "0-1", "skipped": [{"timeline": 0}]}'),
        (2, to_json(FIRST)),
        (1, to_json(replace(FIRST, start="1-10"))),
        (3, to_json(Fork(3, "2-10"))),
    ],
    ids=["cut off", "of another form", "of another number", "from itself", "from none before it"],
)
def test_a_document_that_cannot_be_is_corrupt(store: Store, number: int, document: bytes) -> None:
    store.put(layout.timeline(number), document)
    with pytest.raises(Corrupt, match=f"timelines/000{number}.json"):
        read_forks(store)
