"""Which checkpoints and stored completions may go: truth tables, and what holds for any run."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_orch.checkpoint.records import rollouts
from grpo_orch.checkpoint.records.rollouts import Rollout
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.detect.divergence import Health, Verdict
from grpo_orch.policies.ledger.retention import (
    NOTICED_POINTS,
    RetentionRules,
    StoredCheckpoint,
    keep_before,
    keep_since,
    versions_to_delete,
    versions_to_retire,
)
from grpo_orch.policies.model.timelines import Fork, lineage, on_lineage
from grpo_orch.policies.model.vocabulary import PolicyVersion


def held(text: str) -> list[StoredCheckpoint]:
    """`0-10 0-20! 1-30`: three checkpoints, of which the second is pinned."""
    return [StoredCheckpoint(PolicyVersion.parse(one.rstrip("!")), one.endswith("!")) for one in text.split()]


def forked(text: str) -> tuple[Fork, ...]:
    """`0-20:40 start`: timeline 1 began from 0-20 when 0 had come to 40, timeline 2 where the run began."""
    forks = []
    for number, one in enumerate(text.split(), 1):
        start, _, reached = one.partition(":")
        forks.append(Fork(number, None if start == "start" else start, from_step=int(reached or 0)))
    return tuple(forks)


TO_80 = "0-10 0-20 0-30 0-40 0-50 0-60 0-70 0-80"

# what it shows, the forks, what the store holds, keep_last, keep_every_steps, keep_before_step, what may go
RETIRED: list[tuple[str, str, str, int, int | None, int | None, str]] = [
    ("nothing is there", "", "", 3, None, None, ""),
    ("the only one", "", "0-10", 1, None, None, ""),
    ("the only one, in an excursion from its very step", "", "0-10", 1, None, 10, ""),
    ("as many as stay", "", "0-10 0-20 0-30", 3, None, None, ""),
    ("at doubling ages", "", TO_80, 1, None, None, "0-20 0-30 0-60"),
    ("the newest three", "", TO_80, 3, None, None, "0-20 0-30"),
    ("in any order", "", "0-80 0-30 0-10 0-40 0-20 0-60 0-70 0-50", 1, None, None, "0-20 0-30 0-60"),
    ("pinned", "", TO_80.replace("0-30", "0-30!"), 1, None, None, "0-20 0-60"),
    ("multiples stay", "", TO_80, 1, 30, None, "0-20"),
    ("every step is a multiple of 1", "", TO_80, 1, 1, None, ""),
    ("the newest before the excursion", "", TO_80, 1, None, 65, "0-20 0-30"),
    ("one at the step where it began is touched by it", "", TO_80, 1, None, 60, "0-20 0-30 0-60"),
    ("the newest before it, long after", "", TO_80, 1, None, 21, "0-30 0-60"),
    ("none from before the excursion", "", TO_80, 1, None, 10, "0-20 0-30 0-60"),
    ("what a fork left, at an unknown step", "0-20", "0-10 0-20 0-30 1-25", 3, None, None, "0-30"),
    ("unless it is pinned", "0-20", "0-10 0-20 0-30! 0-40 1-25", 2, None, None, "0-40"),
    ("on probation all stay", "0-20:40", "0-10 0-20 0-30 0-40 1-50 1-60", 1, None, None, ""),
    ("then it does", "0-20:40", "0-10 0-20 0-30 0-40 1-50 1-60 1-61", 1, None, None, "0-30 0-40"),
    (
        "on probation its start and the one before",
        "0-50:70",
        "0-10 0-20 0-30 0-40 0-50 1-60 1-70",
        1,
        None,
        None,
        "0-20 0-30",
    ),
    (
        "and after it as any others",
        "0-50:60",
        "0-10 0-20 0-30 0-40 0-50 1-60 1-70 1-80",
        1,
        None,
        None,
        "0-20 0-30 1-60",
    ),
    ("multiples stay on the line alone", "0-20", "0-10 0-20 0-40 1-30 1-40 1-50", 1, 20, None, "0-40 1-30"),
    (
        "the last from before is before the fork",
        "0-30",
        "0-10 0-20 0-30 0-40 1-40 1-50 1-60 1-70 1-80",
        1,
        None,
        31,
        "0-20 0-40 1-60",
    ),
    ("and not on what it left", "0-20", "0-10 0-20 0-22 1-25 1-30", 1, None, 24, "0-22"),
    ("of two forks the later one goes back further", "0-20 0-10", "0-10 0-20 1-30", 1, None, None, "0-20 1-30"),
    ("of two forks on one line", "0-20 1-30", "0-10 0-20 1-30 1-40 2-35", 3, None, None, "1-40"),
    ("its start is gone: what is before that stays", "0-20", "0-10 0-30", 1, None, None, "0-30"),
    ("from the run's start, with nothing yet", "start", "0-10 0-20", 1, None, None, ""),
    ("from the run's start, with its first one", "start", "0-10 0-20! 1-5", 1, None, None, "0-10"),
    ("from the run's start, on probation", "start:20", "0-10 0-20 1-40", 1, None, None, ""),
    ("of a timeline whose fork is not known yet", "0-20", "0-10 0-20 0-30 2-25", 1, None, None, "0-30"),
]


@pytest.mark.parametrize("case", RETIRED, ids=[case[0] for case in RETIRED])
def test_retirable_checkpoints(case: tuple[str, str, str, int, int | None, int | None, str]) -> None:
    _, forks, text, keep_last, keep_every_steps, before, going = case
    rules = RetentionRules(keep_last, keep_every_steps, before)
    assert " ".join(map(str, versions_to_retire(held(text), forked(forks), rules))) == going


@pytest.mark.parametrize(
    ("forks", "text", "since", "going"),
    [("", TO_80, 60, "0-20 0-30"), ("", TO_80, 0, ""), ("0-70", TO_80 + " 1-75 1-78 1-79", 74, "0-20 0-30 0-80")],
    ids=["all since then", "all there are", "on the line alone"],
)
def test_checkpoints_kept_for_an_unnoticed_divergence(forks: str, text: str, since: int, going: str) -> None:
    rules = RetentionRules(1, keep_since_step=since)
    assert " ".join(map(str, versions_to_retire(held(text), forked(forks), rules))) == going


@pytest.mark.parametrize(
    ("verdict", "step", "logging_steps", "before"),
    [
        (Verdict(), 100, 1, 80),
        (Verdict(), 100, 4, 20),
        (Verdict(), 15, 1, 0),
        (Verdict(Health.WATCH, 100, onset_step=97), 100, 1, 97),
        (Verdict(Health.WATCH, 300, onset_step=97), 300, 1, 97),
        (Verdict(Health.TRIPPED, 120, onset_step=97, tripped_step=110), 120, 5, 97),
    ],
)
def test_step_before_which_one_checkpoint_stays(
    verdict: Verdict, step: int, logging_steps: int, before: int
) -> None:
    assert keep_before(step, verdict, logging_steps) == before


@st.composite
def forks_of_runs(draw: st.DrawFn) -> tuple[Fork, ...]:
    starts = [
        draw(st.none() | st.tuples(st.integers(0, n), st.integers(1, 60))) for n in range(draw(st.integers(0, 3)))
    ]
    return tuple(
        Fork(number, None if start is None else str(PolicyVersion(*start)))
        for number, start in enumerate(starts, 1)
    )


VERSIONS = st.builds(PolicyVersion, st.integers(0, 3), st.integers(0, 60))
HELD = st.dictionaries(VERSIONS, st.booleans(), min_size=1, max_size=20).map(
    lambda found: [StoredCheckpoint(version, pinned) for version, pinned in found.items()]
)
RULES = st.builds(
    RetentionRules, st.integers(1, 5), st.none() | st.integers(1, 20), st.none() | st.integers(0, 70)
)
Forks = tuple[Fork, ...]


def line_of(checkpoints: list[StoredCheckpoint], forks: tuple[Fork, ...]) -> list[PolicyVersion]:
    """What a trainer of the newest timeline could go on from, oldest first."""
    stretches = lineage(forks, len(forks))
    return sorted(one.version for one in checkpoints if on_lineage(one.version, stretches))


@given(checkpoints=HELD, forks=forks_of_runs(), rules=RULES)
def test_checkpoints_always_kept_and_removed(
    checkpoints: list[StoredCheckpoint], forks: Forks, rules: RetentionRules
) -> None:
    going = versions_to_retire(checkpoints, forks, rules)
    assert len(set(going)) == len(going) < len(checkpoints), "one is always left"
    assert list(going) == sorted(going)
    assert set(going) <= {one.version for one in checkpoints if not one.pinned}
    left = [one for one in checkpoints if one.version not in going]
    assert versions_to_retire(left, forks, rules) == (), "asking again retires nothing more"
    line, newest = line_of(checkpoints, forks), len(forks)
    assert not set(line[-rules.keep_last :]) & set(going), "the newest on the line"
    before = [version for version in line if version.step < (rules.keep_before_step or 0)]
    assert not set(before[-1:]) & set(going), "a run can go back before its excursion"
    abandoned = [one.version for one in left if not one.pinned and one.version not in line]
    assert not line or all(version.timeline > newest for version in abandoned), "what was abandoned goes"


@given(save_steps=st.integers(1, 60), logging_steps=st.integers(1, 20), steps=st.integers(1, 200))
def test_a_checkpoint_from_before_a_late_notice_is_there(save_steps: int, logging_steps: int, steps: int) -> None:
    """The newest one from before a divergence that began up to NOTICED_POINTS before it is noticed."""
    stored: list[PolicyVersion] = []
    for step in range(save_steps, steps + 1, save_steps):
        stored.append(PolicyVersion(0, step))
        before, since = keep_before(step, Verdict(), logging_steps), keep_since(step, logging_steps)
        rules = RetentionRules(1, keep_before_step=before, keep_since_step=since)
        gone = versions_to_retire([StoredCheckpoint(one) for one in stored], (), rules)
        stored = [one for one in stored if one not in gone]
    for onset in range(max(1, steps - NOTICED_POINTS * logging_steps), steps + 1):
        newest = (onset - 1) // save_steps * save_steps
        assert newest == 0 or PolicyVersion(0, newest) in stored


# Stored completions.


def versions(text: str) -> list[PolicyVersion]:
    """`0-5..8 1-6`: every step from 5 to 8 of timeline 0, and one of timeline 1."""
    found = []
    for word in text.split():
        first, _, last = word.partition("..")
        begin = PolicyVersion.parse(first)
        steps = range(begin.step, int(last or begin.step) + 1)
        found += [PolicyVersion(begin.timeline, step) for step in steps]
    return found


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
def test_stored_completions_that_stay(
    says: str, forks: str, listed: str, stored: str, keep_last: int, sample: int, stays: str
) -> None:
    there = versions(stored)
    gone = versions_to_delete(there, versions(listed), keep_last, sample, forked(forks))
    assert [one for one in there if one not in gone] == versions(stays), says


def test_all_records_of_a_version_are_removed_others_stay(tmp_path: Path) -> None:
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
