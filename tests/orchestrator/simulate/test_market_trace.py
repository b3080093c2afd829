"""Spot market traces: what the climates promise, and files in public formats."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.contest.markets import MARKETS, market
from grpo_orch.orchestrator.simulate.market_trace import InvalidTrace, Zone, read_trace
from grpo_orch.orchestrator.simulate.scenarios import run_scenario
from grpo_orch.orchestrator.simulate.simulation import on_demand
from grpo_orch.policies.fleet.market import market_of
from grpo_orch.policies.model.vocabulary import Market, Role, RunPhase
from tests.stand_ins.world import spec


@pytest.mark.parametrize("name", MARKETS)
def test_a_climate_follows_from_its_seed(name: str) -> None:
    assert market(name, 3, 4) == market(name, 3, 4)
    spot = [zone for zone in market(name, 3, 4) if zone.market is Market.SPOT]
    assert all(0 <= count <= 4 for zone in spot for count in zone.counts)


def drops_a_day(zone: Zone) -> float:
    """How often a day fewer machines can be held than just before."""
    drops = sum(after < before for before, after in zip(zone.counts, zone.counts[1:], strict=False))
    return drops * 86400 / (zone.gap_s * len(zone.counts))


def test_scarce_weather_is_as_public_traces_show() -> None:
    found = [market("scarce", seed, 4)[0] for seed in range(40)]
    assert all(0.16 <= zone.counts.count(0) / len(zone.counts) <= 0.62 for zone in found)
    assert all(3 <= drops_a_day(zone) <= 11 for zone in found)


def test_trace_in_the_public_format_is_read(tmp_path: Path) -> None:
    gaps = tmp_path / "zone.json"
    gaps.write_text(json.dumps({"metadata": {"gap_seconds": 600}, "data": [0, 1, 0]}))
    [zone] = read_trace(gaps, 4)
    assert (zone.gap_s, zone.counts) == (600.0, (4, 0, 4)), "1 says that the one machine is taken"
    gaps.write_text(json.dumps({"metadata": {"gap_seconds": 600}, "data": [3, 1, 0]}))
    assert read_trace(gaps, 4)[0].counts == (3, 1, 0)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "JSONDecodeError"),
        ("time,count\n0,4\n", "JSONDecodeError"),
        ("[0, 1]", "TypeError"),
        ('{"data": [1]}', "metadata"),
        ('{"metadata": {"gap_seconds": 0}, "data": [1]}', "gap_seconds"),
        ('{"metadata": {"gap_seconds": NaN}, "data": [1]}', "gap_seconds"),
        ('{"metadata": {"gap_seconds": 60}, "data": [Infinity]}', "infinity"),
        ('{"a":' * 100_000, "recursion"),
    ],
)
def test_invalid_trace_is_refused_with_the_expected_form(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "t"
    file.write_text(text)
    with pytest.raises(InvalidTrace, match=rf"{file}.*{told}.*expected JSON"):
        read_trace(file, 4)


def test_on_demand_run_buys_both_roles_on_demand() -> None:
    run = spec(2)
    run = replace(run, trainer=replace(run.trainer, resources={"use_spot": True}))
    assert {market_of(role, on_demand(run)) for role in Role} == {Market.ON_DEMAND}


SPOT_TRAINER, SPOT_NODES = {"trainer": {"use_spot": True}}, {"rollout": {"use_spot": True}}


@pytest.mark.parametrize(
    ("seed", "name", "nodes", "resources", "end"),
    [
        (2, "never", 2, SPOT_TRAINER, RunPhase.STARTING),
        (2, "never", 2, SPOT_NODES, RunPhase.PARKED),
        (2, "never", 2, {}, RunPhase.FINISHED),  # nodes on demand stand in
        (6, "storms", 3, {}, RunPhase.FINISHED),  # it is asked to stop at its end
        (22, "unclouded", 2, SPOT_NODES, RunPhase.PARKED),  # its zone is lost for good
    ],
)
def test_scenario_in_a_market_ends_or_waits(
    seed: int, name: str, nodes: int, resources: dict[str, dict[str, bool]], end: RunPhase
) -> None:
    run = spec(nodes)
    trainer = replace(run.trainer, resources=resources.get("trainer", {}))
    run = replace(run, trainer=trainer, rollout=replace(run.rollout, resources=resources.get("rollout", {})))
    assert run_scenario(seed, run, trace=market(name, seed, nodes)).phase is end
