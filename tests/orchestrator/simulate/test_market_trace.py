"""Spot market traces: what the climates promise, and files in public formats."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.contest.contenders import CONTENDERS
from benchmarks.contest.markets import MARKETS, market
from benchmarks.contest.oracle import oracle
from grpo_orch.orchestrator.simulate.market_trace import InvalidTrace, Zone, read_trace
from grpo_orch.orchestrator.simulate.scenarios import run_scenario
from grpo_orch.orchestrator.simulate.simulated_cloud import Physics, Prices
from grpo_orch.orchestrator.simulate.simulation import ON_DEMAND
from grpo_orch.policies.fleet.market import market_of
from grpo_orch.policies.model.spec import Budget
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


def test_traces_in_public_formats_are_read(tmp_path: Path) -> None:
    gaps = tmp_path / "zone.json"
    gaps.write_text(json.dumps({"metadata": {"gap_seconds": 600}, "data": [0, 1, 0]}))
    [zone] = read_trace(gaps, 4)
    assert (zone.gap_s, zone.counts) == (600.0, (4, 0, 4)), "1 says that the one machine is taken"
    gaps.write_text(json.dumps({"metadata": {"gap_seconds": 600}, "data": [3, 1, 0]}))
    assert read_trace(gaps, 4)[0].counts == (3, 1, 0)
    times = tmp_path / "counts.csv"
    times.write_text("time,count\n0,4\n120,0\n180,2\n")
    assert read_trace(times, 4)[0].counts == (4, 4, 0, 2)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty"),
        ("time,count\nsoon,4\n", "soon"),
        ("0,4\n60,-1\n", "must not be negative"),
        ("60,4\n0,4\n", "must not decrease"),
        ('{"data": [1]}', "metadata"),
        ('{"metadata": {"gap_seconds": 0}, "data": [1]}', "gap_seconds"),
        ('{"metadata": {"gap_seconds": NaN}, "data": [1]}', "gap_seconds"),
        ('{"metadata": {"gap_seconds": 60}, "data": [Infinity]}', "infinity"),
        ("0,inf\n", "infinity"),
        ("0,1\ninf,1\n", "infinity"),
        ("0,1\n1e12,1\n", "in seconds"),
        ("x" * 200_000, "field larger"),
        ('{"a":' * 100_000, "recursion"),
    ],
)
def test_invalid_trace_is_refused_with_the_expected_form(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "t"
    file.write_text(text)
    with pytest.raises(InvalidTrace, match=rf"{file}.*{told}.*expected JSON|{file}.*{told}.*time,count"):
        read_trace(file, 4)


def test_on_demand_run_and_oracle_buy_what_the_run_may() -> None:
    """A trainer on spot costs the baseline what it costs on demand, and the oracle nothing while there is none."""
    run = spec(2)
    run = replace(run, trainer=replace(run.trainer, resources={"use_spot": True}))
    baseline = CONTENDERS[ON_DEMAND].spec_of(run)
    assert {market_of(role, baseline) for role in Role} == {Market.ON_DEMAND}
    half = (Zone("z", 3600.0, (3, 0)),)
    best = oracle(run, half, Physics(), Prices(), hours=2.0)
    assert best.usd == pytest.approx(3 * 1.19)
    assert best.steps == pytest.approx(3600 / 120)
    finest = oracle(run, (Zone("z", 1e-3, (3,)),), Physics(), Prices(), hours=2.0)  # in no more than 7200 looks
    assert finest.usd == pytest.approx(2 * 3 * 1.19)


@pytest.mark.parametrize(
    ("trainer", "rollout", "end"),
    [
        ({"use_spot": True}, {}, RunPhase.STARTING),
        ({}, {"use_spot": True}, RunPhase.PARKED),
        ({}, {}, RunPhase.FINISHED),  # nodes on demand stand in
    ],
)
def test_a_run_that_waits_for_spot_machines_breaks_no_promise(
    trainer: dict[str, bool], rollout: dict[str, bool], end: RunPhase
) -> None:
    run = spec(2)
    sections = replace(run.trainer, resources=trainer), replace(run.rollout, resources=rollout)
    run = replace(run, trainer=sections[0], rollout=sections[1])
    assert run_scenario(2, run, trace=market("never", 2, 2)).phase is end


def test_a_run_that_stops_at_its_budget_has_ended() -> None:
    assert run_scenario(0, replace(spec(2), budget=Budget(usd=6.0, at="down"))).phase is RunPhase.STOPPED


def test_run_asked_to_stop_at_its_end_has_ended() -> None:
    assert run_scenario(6, spec(3), trace=market("storms", 6, 3)).phase is RunPhase.FINISHED


def test_spot_only_run_waits_when_its_zone_is_lost_for_good() -> None:
    run = spec(2)
    run = replace(run, rollout=replace(run.rollout, resources={"use_spot": True}))
    assert run_scenario(22, run, trace=market("unclouded", 22, 2)).phase is RunPhase.PARKED
