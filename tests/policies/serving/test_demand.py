"""Which policy each machine is to hold: examples of one window after another, and what holds for any fleet."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grpo_orch.policies.model.vocabulary import machine_of
from grpo_orch.policies.serving.demand import GATHERED_REQUESTS, Demand
from grpo_orch.policies.serving.membership import Member
from grpo_orch.policies.serving.wire import PolicyRef

OLD, NEW = "0-3", "0-4"


def ref(version: str) -> PolicyRef:
    return PolicyRef(version, f"policies/{version}")


def row(node: str, policy: str | None, running: int = 0, max_requests: int = 64, target: str = "") -> Member:
    return Member(1, node, "boot", "address", policy, max_requests, 0.0, running=running, target=target)


def demand(**requests: int) -> Demand:
    """By version, its dash an underscore after a letter."""
    found = Demand()
    for name, count in requests.items():
        found.add(ref(name.removeprefix("v").replace("_", "-")), count)
    return found


def test_single_policy_is_for_every_machine() -> None:
    asked = demand(v0_3=100)
    assert asked.targets([row("a", None), row("b", "0-2", running=3)]) == {"a": OLD, "b": OLD}


@pytest.mark.parametrize(
    ("open_requests", "kept"),
    [(3 * GATHERED_REQUESTS, 3), (2 * GATHERED_REQUESTS + 1, 3), (2 * GATHERED_REQUESTS, 2), (1, 1)],
)
def test_older_policy_keeps_the_busiest_machines_it_needs(open_requests: int, kept: int) -> None:
    asked = demand(v0_3=open_requests, v0_4=200)
    rows = [row(name, OLD, running=number) for number, name in enumerate("abcd")]
    targets = asked.targets(rows)
    assert [name for name in "dcba" if targets[name] == OLD] == list("dcba")[:kept]
    assert Counter(targets.values())[NEW] == 4 - kept


def test_older_policy_that_no_machine_holds_takes_the_idlest() -> None:
    asked = demand(v0_3=5, v0_4=200)
    rows = [row("a", NEW, running=9), row("b", NEW, running=2), row("c", NEW, running=7)]
    assert asked.targets(rows) == {"a": NEW, "b": OLD, "c": NEW}


def test_newest_policy_follows_open_requests() -> None:
    """A trainer that was started again goes back; what it asks for then is what members hold."""
    asked = demand(v0_9=4)
    asked.finish("0-9", 4)
    asked.add(ref(OLD), 8)
    assert asked.newest == ref(OLD)
    asked.add(ref("1-1"), 8)
    assert asked.newest == ref("1-1"), "a newer timeline, at an earlier step"
    asked.finish("1-1", 8)
    assert asked.newest == ref(OLD)
    asked.finish(OLD, 8)
    assert asked.newest == ref(OLD)
    assert not asked.has_older


def test_kv_cache_bounds_what_a_machine_keeps() -> None:
    asked = demand(v0_3=8, v0_4=1)
    long = [row(name, OLD, running=4) for name in "ab"]
    for one in long:
        one.kv_tokens, one.outstanding = 10_000, 8_000  # 2,000 tokens a request: four fit, and not eight
    assert asked.targets(long) == {"a": OLD, "b": OLD}


rows = st.lists(
    st.builds(
        row,
        st.sampled_from(["a", "b.0", "b.1", "c", "d.0", "d.1", "d.2", "e", "f"]),
        st.sampled_from([None, "0-2", OLD, NEW, "1-0"]),
        st.integers(0, 40),
        st.integers(1, 64),
        st.sampled_from(["", "0-2", OLD, NEW]),
    ),
    unique_by=lambda one: one.node,
)
requests = st.dictionaries(st.sampled_from(["0-2", OLD, NEW, "1-0"]), st.integers(1, 200), min_size=1)


@given(rows, requests)
@example(
    [row("a", NEW, 0, 1, NEW), row("b.0", None, 0, 1), row("b.1", NEW, 1, 1), row("c", None, 0, 1)],
    {NEW: 2, "1-0": 1},
)
@example(
    [
        row("a", None, 0, 1),
        row("b.0", None, 0, 11),
        row("b.1", None, 0, 14),
        row("c", "0-2", 0, 1),
        row("d.0", None, 0, 1, "0-2"),
    ],
    {"0-2": 27, OLD: 1},
)
def test_every_machine_holds_a_requested_policy_and_keeps_it(
    members: list[Member], opened: dict[str, int]
) -> None:
    asked = Demand()
    for version, count in opened.items():
        asked.add(ref(version), count)
    targets = asked.targets(members)
    assert targets.keys() == {machine_of(one.node) for one in members}
    assert set(targets.values()) <= opened.keys()
    oldest = min(opened, key=lambda version: tuple(map(int, version.split("-"))))
    if members:
        assert oldest in targets.values(), "what a trainer waits for first has a machine"
    for one in members:
        one.target = targets[machine_of(one.node)]
    assert asked.targets(members) == targets
