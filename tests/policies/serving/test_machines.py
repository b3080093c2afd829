"""Several engines on one machine: each a member for itself, and all of them one machine to whoever names it."""

from __future__ import annotations

import pytest

from grpo_orch.policies.model.gpus import engine_devices
from grpo_orch.policies.model.vocabulary import machine_of, member_of
from grpo_orch.policies.serving.membership import Change, Load, Membership
from grpo_orch.policies.serving.wire import Announce

NODE, OTHER = "rollout-0-i1", "rollout-1-i1"
ENGINES = [member_of(NODE, engine, 2) for engine in range(2)]
WANTED = "0-1"


@pytest.fixture
def table() -> Membership:
    """Two engines on one machine, and another machine."""
    table = Membership()
    for name in (*ENGINES, OTHER):
        table.announce(name, Announce(f"boot-{name}", "127.0.0.1:1", "0-1", 4, engines=1 + (name != OTHER)), 0.0)
    return table


@pytest.mark.parametrize(
    ("gpus", "takes", "shares"),
    [
        ("", 1, [""]),
        ("0", 1, [""]),
        ("0,1,2,3,4,5,6,7", 1, ["0", "1", "2", "3", "4", "5", "6", "7"]),
        ("0,1,2,3,4,5,6,7", 4, ["0,1,2,3", "4,5,6,7"]),
        ("0,1,2,3,4,5,6,7", 3, ["0,1,2", "3,4,5"]),
        ("0,1,2,3,4,5,6,7", 8, [""]),
        ("0,1", 4, [""]),  # too few: vLLM says so
        ("GPU-3f,GPU-91", 1, ["GPU-3f", "GPU-91"]),
    ],
)
def test_each_engine_of_a_machine_has_gpus_of_its_own(gpus: str, takes: int, shares: list[str]) -> None:
    assert engine_devices(gpus.split(",") if gpus else [], takes) == shares


def test_engine_is_named_after_its_machine_or_equals_it() -> None:
    assert ENGINES == ["rollout-0-i1.0", "rollout-0-i1.1"]
    assert member_of(NODE, 0, 1) == NODE
    assert {machine_of(name) for name in (*ENGINES, NODE)} == {NODE}


def test_drained_machine_drains_all_engines_and_later_ones(table: Membership) -> None:
    table.request_started(ENGINES[0], Load("p"))
    table.request_started(ENGINES[1], Load("q"))
    change = table.drain(NODE)
    assert change == Change(tuple(ENGINES), "drains, 2 requests running")
    assert [row.node for row in table.serving(WANTED)] == [OTHER]
    table.announce(ENGINES[1], Announce("another", "127.0.0.1:1", "0-1", 4, engines=2), 1.0)
    assert [row.node for row in table.serving(WANTED)] == [OTHER]
    assert table.loading(WANTED) == ()
    assert table.drain(ENGINES[0]) is None


def test_draining_an_engine_leaves_its_siblings(table: Membership) -> None:
    table.drain(ENGINES[0])
    assert [row.node for row in table.serving(WANTED)] == [ENGINES[1], OTHER]


@pytest.mark.parametrize(("name", "out"), [(NODE, ENGINES), (ENGINES[1], ENGINES[1:]), (OTHER, [OTHER])])
def test_removing_a_machine_removes_all_its_engines(table: Membership, name: str, out: list[str]) -> None:
    terms = tuple(row.term for row in table.members if row.node in out)
    change = table.remove(name)
    assert change == Change(tuple(out), "removed", terms)
    assert [row.node for row in table.members] == [one for one in (*ENGINES, OTHER) if one not in out]
    assert all(table.is_void(f"boot-{one}") == (one in out) for one in (*ENGINES, OTHER))


def test_lost_machine_removes_all_its_engines_and_no_other(table: Membership) -> None:
    table.announce(OTHER, Announce(f"boot-{OTHER}", "127.0.0.1:1", "0-1", 4), 9.0)
    change = table.expire(9.0)
    assert change is not None
    assert change.nodes == tuple(ENGINES)
    assert [row.node for row in table.members] == [OTHER]
