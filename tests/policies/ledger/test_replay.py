"""Which stored completions may go: a truth table, and the store after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_orch.checkpoint.records import rollouts
from grpo_orch.checkpoint.records.rollouts import Rollout
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.ledger.retention import versions_to_delete
from grpo_orch.policies.model.timelines import Fork
from grpo_orch.policies.model.vocabulary import PolicyVersion


def versions(text: str) -> list[PolicyVersion]:
    """`0-5..8 1-6`: every step from 5 to 8 of timeline 0, and one of timeline 1."""
    found = []
    for word in text.split():
        first, _, last = word.partition("..")
        begin = PolicyVersion.parse(first)
        steps = range(begin.step, int(last or begin.step) + 1)
        found += [PolicyVersion(begin.timeline, step) for step in steps]
    return found


def forked(text: str) -> list[Fork]:
    """`0-10:14`: the next timeline began from 0-10 when the one before had come to 14."""
    told = [one.partition(":") for one in text.split()]
    return [Fork(number, start, from_step=int(reached or 0)) for number, (start, _, reached) in enumerate(told, 1)]


# what it shows, the forks, checkpoints, what is stored, keep_last, sample_steps, what stays
STAYS: list[tuple[str, str, str, str, int, int, str]] = [
    ("all, while there is no checkpoint", "", "", "0-0..9", 1, 100, "0-0..9"),
    ("all, with one", "", "0-5", "0-0..9", 1, 100, "0-0 0-5..9"),
    ("since the oldest of the newest three", "", "0-10 0-20 0-30 0-40", "0-1..45", 3, 100, "0-20..45"),
    ("since the last but one where one is kept", "", "0-10 0-20 0-30", "0-1..35", 1, 100, "0-20..35"),
    ("and a sample", "", "0-10 0-20 0-30", "0-1..35", 1, 8, "0-8 0-16 0-20..35"),
    ("and all where every step is one", "", "0-10 0-20 0-30", "0-1..35", 1, 1, "0-1..35"),
    ("all before a fork on probation", "0-10:14", "0-5 0-10 1-15", "0-1..14 1-10..18", 1, 100, "0-1..14 1-10..18"),
    ("then they go", "0-10:14", "0-5 0-10 1-15 1-20", "0-1..14 1-10..22", 1, 100, "1-15..22"),
    (
        "but for a sample of the line",
        "0-10:14",
        "0-10 1-15 1-20",
        "0-1..14 1-10..22",
        1,
        3,
        "0-3 0-6 0-9 1-12 1-15..22",
    ),
    ("where nobody noted how far it had come", "0-10", "0-5 0-10 1-15", "0-1..14 1-10..18", 1, 100, "1-10..18"),
    ("all, while the line of the new one has none", "0-10:14", "", "0-1..14 1-10..18", 1, 100, "0-1..14 1-10..18"),
    ("what an unseen fork has made", "", "0-10 0-20", "0-5..21 1-10..12", 1, 100, "0-10..21 1-10..12"),
]


@pytest.mark.parametrize(("says", "forks", "listed", "stored", "keep_last", "sample", "stays"), STAYS)
def test_what_stays(
    says: str, forks: str, listed: str, stored: str, keep_last: int, sample: int, stays: str
) -> None:
    there = versions(stored)
    gone = versions_to_delete(there, versions(listed), keep_last, sample, forked(forks))
    assert [one for one in there if one not in gone] == versions(stays), says


def test_every_record_of_a_version_goes_and_foreign_files_stay(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}/store")
    for step in (1, 2):
        for call in (0, 1000):
            for by in ((0, 1, 1), (0, 1, 2)):
                rollouts.write_rollout(store, Rollout(rollouts.SCHEMA, f"0-{step}", f"0-{step}", call, "", []), by)
    store.put(f"{layout.ROLLOUTS}/notes.txt", b"mine")
    told: list[PolicyVersion] = []

    def going(stored: list[PolicyVersion]) -> list[PolicyVersion]:
        told.extend(stored)
        return [PolicyVersion(0, 1)]

    assert rollouts.collect(store, going) == 4  # type: ignore[arg-type]  # a list is narrower
    assert told == versions("0-1..2")
    left = [entry.key for entry in store.entries(layout.ROLLOUTS)]
    assert len(left) == 5
    assert all("00000001-" not in key for key in left)
