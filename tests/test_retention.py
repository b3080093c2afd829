"""Which checkpoints may go: a truth table, and what holds for any run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.retention import Kept, excursion_began, retired
from policies.vocabulary import PolicyVersion


def held(text: str) -> list[Kept]:
    """`0-10 0-20! 1-30`: three checkpoints, of which the second is pinned."""
    return [Kept(PolicyVersion.parse(one.rstrip("!")), one.endswith("!")) for one in text.split()]


# what it shows, what the store holds, keep_last, keep_every_steps, excursion_began_step, what may go
RETIRED: list[tuple[str, str, int, int | None, int | None, str]] = [
    ("nothing is there", "", 3, None, None, ""),
    ("the only one", "0-10", 1, None, None, ""),
    ("the only one, in an excursion from its very step", "0-10", 1, None, 10, ""),
    ("as many as stay", "0-10 0-20 0-30", 3, None, None, ""),
    ("one more", "0-10 0-20 0-30 0-40", 3, None, None, "0-10"),
    ("the newest alone", "0-10 0-20 0-30", 1, None, None, "0-10 0-20"),
    ("in any order", "0-30 0-10 0-40 0-20", 2, None, None, "0-10 0-20"),
    ("pinned", "0-10! 0-20 0-30", 1, None, None, "0-20"),
    ("multiples stay", "0-10 0-20 0-30 0-40 0-50", 1, 20, None, "0-10 0-30"),
    ("every step is a multiple of 1", "0-10 0-20 0-30", 1, 1, None, ""),
    ("none from before the excursion", "0-10 0-20 0-30", 1, None, 10, "0-10 0-20"),
    ("one at the step where it began is touched by it", "0-10 0-20 0-30 0-40", 1, None, 20, "0-20 0-30"),
    ("the newest before it, long after", "0-10 0-20 0-30 0-40 0-50", 2, None, 25, "0-10 0-30"),
    ("the newest of all is before it", "0-10 0-20 0-30", 1, None, 31, "0-10 0-20"),
    ("an older timeline goes once the newest has enough", "0-10 0-20 1-10 1-20", 2, None, None, "0-10 0-20"),
    ("until then its newest one stays", "0-10 0-20 0-30 1-20", 2, None, None, "0-10 0-20"),
    ("also when its step is the higher one", "0-10 0-90 1-20", 3, None, None, "0-10"),
    ("of the timelines before, the last alone", "0-90 1-40 1-50 2-60", 2, None, None, "0-90 1-40"),
    ("one that has no checkpoint is skipped", "0-80 0-90 3-60", 2, None, None, "0-80"),
    ("older timelines keep multiples and what is pinned", "0-10! 0-20 0-30 1-40 1-50", 2, 20, None, "0-30"),
    ("an excursion that began before the fork's first one", "0-10 0-20 1-30 1-40", 1, None, 25, "0-10 1-30"),
    (
        "of two timelines, the newer one's from before it",
        "0-10 0-20 1-15 1-30 1-40",
        1,
        None,
        25,
        "0-10 0-20 1-30",
    ),
]


@pytest.mark.parametrize("case", RETIRED, ids=[case[0] for case in RETIRED])
def test_what_may_go(case: tuple[str, str, int, int | None, int | None, str]) -> None:
    _, text, keep_last, keep_every_steps, began, going = case
    assert " ".join(map(str, retired(held(text), keep_last, keep_every_steps, began))) == going


@pytest.mark.parametrize(
    ("kl", "limit", "began"),
    [
        ([], 0.5, None),
        ([(1, 9.0), (2, 9.0)], None, None),
        ([(1, None)], None, None),
        ([(1, 0.1), (2, 0.5)], 0.5, None),
        ([(1, 0.1), (2, 0.6)], 0.5, 2),
        ([(1, 0.1), (2, 0.6), (3, 0.7), (4, 0.8)], 0.5, 2),
        ([(1, 0.6), (2, 0.7)], 0.5, 1),
        ([(1, 0.1), (2, 0.6), (3, 0.4)], 0.5, None),
        ([(1, 0.9), (2, 0.4), (3, 0.6), (7, 0.9)], 0.5, 3),
        ([(1, 0.1), (2, None), (3, 0.6)], 0.5, 2),
        ([(1, 0.1), (2, 0.6), (3, None)], 0.5, 2),
        ([(1, None), (2, 0.5)], 0.5, None),
    ],
)
def test_where_an_excursion_began(kl: Sequence[tuple[int, float | None]], limit: float | None, began: int | None):
    assert excursion_began(kl, limit) == began


VERSIONS = st.builds(PolicyVersion, st.integers(0, 3), st.integers(0, 60))
HELD = st.dictionaries(VERSIONS, st.booleans(), min_size=1, max_size=20).map(
    lambda found: [Kept(version, pinned) for version, pinned in found.items()]
)
RULES = st.tuples(st.integers(1, 5), st.none() | st.integers(1, 20), st.none() | st.integers(0, 70))


@given(checkpoints=HELD, rules=RULES)
def test_what_always_stays(checkpoints: list[Kept], rules: tuple[int, int | None, int | None]) -> None:
    going = retired(checkpoints, *rules)
    assert len(set(going)) == len(going) < len(checkpoints), "one is always left"
    assert list(going) == sorted(going)
    assert set(going) <= {one.version for one in checkpoints if not one.pinned}
    assert max(one.version for one in checkpoints) not in going


@given(checkpoints=HELD, rules=RULES)
def test_asking_again_retires_nothing_more(
    checkpoints: list[Kept], rules: tuple[int, int | None, int | None]
) -> None:
    going = retired(checkpoints, *rules)
    assert retired([one for one in checkpoints if one.version not in going], *rules) == ()


@given(checkpoints=HELD, rules=RULES)
def test_a_run_can_go_back_before_its_excursion(
    checkpoints: list[Kept], rules: tuple[int, int | None, int | None]
) -> None:
    left = {one.version for one in checkpoints} - set(retired(checkpoints, *rules))
    began = rules[2]
    if began is not None and (before := [one.version for one in checkpoints if one.version.step < began]):
        assert max(before) in left
