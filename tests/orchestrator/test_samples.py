"""Which steps have samples, and which of their completions are wanted."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.samples import (
    FoundSample,
    Link,
    NoSamples,
    SampleFilter,
    SortOrder,
    Step,
    find_step,
    groups_of,
    no_samples_reason,
    select,
    stored_steps,
)
from tests.generators.samples import group, handed_over, sample, store_step

_names = itertools.count()
STEPS = [Step(*at, ()) for at in ((0, 1), (0, 11), (0, 21), (1, 11), (1, 12))]


@pytest.fixture
def store() -> Store:
    return Store(f"memory://chosen-{next(_names)}")


def links(found: list[FoundSample]) -> list[str]:
    return [f"{one.link.group}/{one.link.index}" for one in found]


@pytest.mark.parametrize(
    ("text", "step"), [("", "1-12"), ("11", "1-11"), ("0-11", "0-11"), ("21", "0-21"), ("012", "1-12")]
)
def test_a_step_is_the_newest_timelines_that_has_it(text: str, step: str) -> None:
    assert str(find_step(STEPS, text)) == step


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("13", "no samples of step 13; the nearest are 0-11, 1-11, 1-12"),
        ("0-12", "no samples of step 0-12; the nearest are 0-1, 0-11, 0-21"),
        ("9-1", "nearest"),
        ("x" * 1000, "is not a step: expected a step, or TIMELINE-STEP as in 0-121"),
        ("-1", "is not a step"),
        ("9" * 5000, "is not a step"),
    ],
)
def test_missing_step_is_reported_with_the_nearest(text: str, says: str) -> None:
    with pytest.raises(NoSamples) as error:
        find_step(STEPS, text)
    assert says in str(error.value)
    assert len(str(error.value)) < 300


def test_step_follows_its_policy_and_its_scorings_are_one(store: Store) -> None:
    assert no_samples_reason(store) == "no step has been scored yet"
    store.put("rollouts/0000/00000004-00.json", b"{}")
    assert "could not be stored" in no_samples_reason(store)
    store_step(store, "0-4", group("second", sample("c")), call=1)
    store_step(store, "0-4", group("first", sample("a"), sample("b")))
    (step,) = stored_steps(store)
    assert str(step) == "0-5"
    chosen, told = select(step, groups_of(store, step), SampleFilter(), SortOrder.STORED, 9)
    assert [str(one.link) for one in chosen] == ["0-5/0/0", "0-5/0/1", "0-5/1/0"]
    assert (told.prompts, told.completions, told.matching) == (2, 3, 3)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (SampleFilter(), ["0/0", "0/1", "1/0", "1/1"]),
        (SampleFilter(search="STRASSE"), ["0/0"]),
        (SampleFilter(search="prompt of one"), ["1/0", "1/1"]),
        (SampleFilter(reward_min=0.5), ["0/0", "0/1"]),
        (SampleFilter(reward_max=0.5), ["0/1", "1/0"]),
        (SampleFilter(reward_min=0.2, reward_max=0.9), ["0/1"]),
        (SampleFilter(node="rollout-1-i1"), ["0/1", "1/0"]),
        (SampleFilter(policy="0-3"), ["1/0"]),
        (SampleFilter(cut=True), ["1/0"]),
        (SampleFilter(cut=False), ["0/0", "0/1"]),
        (SampleFilter(handed_over=True), ["0/1"]),
        (SampleFilter(handed_over=True, search="nowhere"), []),
    ],
)
def test_selected_samples_match_the_request(wanted: SampleFilter, found: list[str], store: Store) -> None:
    zero = group("the prompt of zero", sample("eine Straße"), handed_over("b"))
    bad = sample("c", 0.0, node="rollout-1-i1", policy="0-3", cut=True)
    one = group("the prompt of one", bad, sample("", None, cut=None, refused="too long"))
    store_step(store, "0-4", zero, one)
    (step,) = stored_steps(store)
    chosen, told = select(step, groups_of(store, step), wanted, SortOrder.STORED, 9)
    assert links(chosen) == found
    assert (told.completions, told.matching, told.cut, told.handed_over) == (4, len(found), 1, 1)
    assert (told.reward_min, told.reward_mean, told.reward_max) == (0.0, 0.5, 1.0)
    assert (told.nodes, told.policies) == (("rollout-0-i1", "rollout-1-i1"), ("0-3", "0-4"))


@given(
    st.lists(st.lists(st.none() | st.floats(-5, 5), max_size=4), max_size=5),
    st.integers(0, 5),
    st.integers(1, 5),
    st.sampled_from(SortOrder),
)
def test_the_worst_and_best_page_by_page(
    rewards: list[list[float | None]], first: int, count: int, order: SortOrder
) -> None:
    groups = [group("p", *(sample("c", one) for one in made)) for made in rewards]
    store = Store(f"memory://chosen-{next(_names)}")
    store_step(store, "0-4", *groups)
    (step,) = stored_steps(store)
    chosen, told = select(step, groups_of(store, step), SampleFilter(), order, count, first)
    listed = [(one, f"{g}/{i}") for g, made in enumerate(rewards) for i, one in enumerate(made)]
    if order is not SortOrder.STORED:
        sign = 1 if order is SortOrder.WORST else -1
        listed.sort(key=lambda pair: float("inf") if pair[0] is None else sign * pair[0])
    assert links(chosen) == [name for _, name in listed[first : first + count]]
    assert told.completions == len(listed)


@given(st.integers(0, 99), st.integers(0, 10**6), st.integers(0, 999), st.integers(0, 999))
def test_a_link_is_read_as_it_was_printed(timeline: int, step: int, number: int, index: int) -> None:
    link = Link(f"{timeline}-{step}", number, index)
    assert Link.parse(str(link)) == link


def test_invalid_link_is_reported() -> None:
    for text in ("", "0-1/2", "0-1/2/3/4", "0-1/-2/3", "a" * 9999, "0-1/2/٣"):
        with pytest.raises(NoSamples, match="TIMELINE-STEP/GROUP/INDEX"):
            Link.parse(text)
