"""The machines over time: which lanes, and what they show."""

from __future__ import annotations

from typing import Any

from grpo_orch.policies.model.vocabulary import NodePhase
from tests.generators.views_world import FIRST_FORK, T0
from tests.orchestrator.web.test_site import HOSTILE, ask, run_of, visit


def slots(told: dict[str, Any]) -> list[str]:
    return [one["slot"] for one in told["lanes"]]


def test_a_lane_for_each_place_and_the_machines_in_it() -> None:
    world = run_of()
    world.moves(40, "rollout-0-i1", NodePhase.GONE, HOSTILE)
    world.asks_for(41, "rollout-0-i2")
    (told,) = ask(world, "/lanes")
    assert slots(told) == ["trainer-0", "rollout-0", "rollout-1"]
    lost, new = told["lanes"][1]["machines"]
    assert (lost["node"], lost["market"], lost["price_usd_per_h"], lost["end"]) == (
        "rollout-0-i1",
        "spot",
        0.9,
        "lost",
    )
    assert [[phase, a - T0, b - T0] for phase, a, b in lost["spans"]] == [
        ["requested", 1, 4],
        ["booting", 4, 10],
        ["serving", 10, 40],
    ]
    assert (new["end"], new["spans"][0][0]) == (None, "requested")
    assert [one["policy"] for one in told["policies"]] == [f"0-{step}" for step in range(1, 13)]


def test_latest_change_in_view_comes_first() -> None:
    world = run_of()
    world.moves(30, "rollout-1-i1", NodePhase.DRAINING)
    world.moves(40, "rollout-0-i1", NodePhase.DRAINING)
    everything, before = ask(world, "/lanes", f"/lanes?x=time&from={T0 + 20}&to={T0 + 35}")
    assert slots(everything) == ["trainer-0", "rollout-0", "rollout-1"]  # after the trainer
    assert slots(before) == ["trainer-0", "rollout-1", "rollout-0"]


def test_ended_machines_are_hidden_until_requested() -> None:
    world = run_of()
    world.moves(40, "rollout-1-i1", NodePhase.GONE)
    without, with_them, second = ask(world, "/lanes", "/lanes?ended=yes", "/lanes?ended=yes&first=1&count=1")
    assert (slots(without), without["ended"]) == (["trainer-0", "rollout-0"], 1)
    assert slots(with_them) == ["trainer-0", "rollout-0", "rollout-1"]
    assert (slots(second), second["total"]) == (["rollout-0"], 3)


def test_window_in_steps_is_a_window_of_time() -> None:
    world = run_of()
    world.rolls_back(35, FIRST_FORK, from_step=12)
    by_step, begun, forked = ask(
        world,
        "/lanes?from=4&to=5",
        f"/lanes?x=time&from={T0 + 2}&to={T0 + 3}",
        f"/lanes?x=time&from={T0 + 18}&to={T0 + 60}",
    )
    assert (by_step["from_s"] - T0, by_step["until_s"] - T0) == (16, 20)  # a step's row is of its end
    assert [one["machines"][0]["spans"][0][0] for one in begun["lanes"]] == ["requested"] * 3
    assert (begun["from_s"] - T0, begun["until_s"] - T0) == (2, 3)
    policies = [(one["policy"], one["forks"]) for one in forked["policies"]]
    assert policies == [("0-4", False), ("0-5", False), ("1-5", True)]
    assert forked["until_s"] - T0 == 40  # nobody steers it: until the last word


def test_invalid_window_is_refused() -> None:
    world = run_of()
    visit(world, *(f"/lanes?{one}" for one in ("count=100000", "ended=1", "first=-1", "from=nan")), status=400)
    visit(world, "/lanes?from=9&to=3")
