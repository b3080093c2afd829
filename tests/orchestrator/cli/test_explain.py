"""`grpo-orch explain`: market, candidates, choice and pending changes, from the store alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.store.errors import StoreUnavailable
from grpo_orch.orchestrator.control.daemon import PLAN_EVERY_S, PlanWriter
from grpo_orch.policies.costs.steps import StepShape
from grpo_orch.policies.fleet.explain import explain
from grpo_orch.policies.model import exit_codes
from tests.generators.views_world import World as Views
from tests.rigs.command_line import Cli
from tests.stand_ins.world import World, spec, two_markets


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Views:
    monkeypatch.setenv("GRPO_ORCH_HOME", str(tmp_path))
    views = Views()
    views.starts()
    return views


def measured(**world: object) -> World:
    made = two_markets(spec(4), shape=StepShape(60.0, 120.0), no_spot=False, **world)
    made.let_pass(0.5)
    return made


def test_before_the_daemon_has_looked_there_is_no_plan(stored: Views, grpo_orch: Cli) -> None:
    answer = grpo_orch("explain", stored.store.url)
    assert answer.code == exit_codes.FAILED
    assert "the store has no plan yet" in answer.err


def test_market_candidates_and_choice_are_printed(stored: Views, grpo_orch: Cli) -> None:
    world = measured()
    documents.PLAN.write(stored.store, explain(world.state, world.snapshot(), world.spec))
    answer = grpo_orch("explain", stored.store.url)
    lines = answer.out.splitlines()
    assert answer.code == exit_codes.OK
    assert any("on spot at 1.00 USD/h: 0.200 USD a step" in line for line in lines)
    assert any("rollout on demand" in line and "open" in line for line in lines)
    (chosen,) = (line for line in lines if line.startswith("->"))
    assert "on spot at 1.00 USD/h" in chosen
    status = " ".join(grpo_orch("status", stored.store.url).out.split())
    assert "plan 4 on spot at 1.00 USD/h: 0.200 USD a step; 3 on spot: 0.194" in status


def test_explain_shows_why_nothing_is_bought(stored: Views, grpo_orch: Cli) -> None:
    world = measured()
    world.no_spot = True
    world.dry_up()
    world.wait(60.0)
    documents.PLAN.write(stored.store, explain(world.state, world.snapshot(), world.spec))
    found = json.loads(grpo_orch("explain", "-o", "json", stored.store.url).out)
    spot = next(offer for offer in found["offers"] if offer["market"] == "spot")
    assert spot["status"] in ("backing off", "broken")
    assert spot["until_s"] > 0
    assert "nothing to be had" in spot["reason"]
    (compared,) = found["comparisons"]
    assert compared["question"] == "shortage of spot"
    assert "waiting for spot" in [one["name"] for one in compared["candidates"]]
    losses = [one["loss_usd"] for one in compared["candidates"]]
    assert losses == sorted(losses)


def test_plan_is_written_only_when_it_changes(stored: Views) -> None:
    world = measured()
    writer = PlanWriter(stored.store, world.spec)
    for _ in range(3):
        writer.ticked(world.state, world.snapshot())
    first = documents.PLAN.read(stored.store)
    world.wait(PLAN_EVERY_S + 1.0)
    writer.ticked(world.state, world.snapshot())
    assert documents.PLAN.read(stored.store) == first, "nothing has changed"
    world.dry_up()
    world.wait(PLAN_EVERY_S + 1.0)
    writer.ticked(world.state, world.snapshot())
    second = documents.PLAN.read(stored.store)
    assert first is not None
    assert second is not None
    assert second.at_s - first.at_s > PLAN_EVERY_S


def test_plan_that_could_not_be_written_is_written_later(stored: Views, monkeypatch: pytest.MonkeyPatch) -> None:
    world = measured()
    writer = PlanWriter(stored.store, world.spec)

    def fails(*_: object) -> None:
        raise StoreUnavailable("no answer")

    with monkeypatch.context() as away:
        away.setattr(stored.store, "put", fails)
        writer.ticked(world.state, world.snapshot())
    assert documents.PLAN.read(stored.store) is None
    world.wait(PLAN_EVERY_S + 1.0)
    writer.ticked(world.state, world.snapshot())
    assert documents.PLAN.read(stored.store) is not None
