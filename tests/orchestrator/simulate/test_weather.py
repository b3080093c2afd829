"""Spot weather: what the climates promise, files in public formats, and what a run met, replayed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.contest.contenders import CONTENDERS
from benchmarks.contest.markets import MARKETS, market
from benchmarks.contest.oracle import oracle
from orchestrator.simulate.outcome import ON_DEMAND
from orchestrator.simulate.physics import Physics, Prices
from orchestrator.simulate.recorded import LAUNCH, LOSS, NOTICE, REFUSAL, RETURN, recorded, replayed, to_plain
from orchestrator.simulate.stories import tell
from orchestrator.simulate.traces import NotWeather, read_weather
from orchestrator.simulate.weather import Zone
from policies.control.fleet.markets import market_of
from policies.model.events import Event, MachineBought, NodeMoved, NodeRequested
from policies.model.pools import Pool
from policies.model.spec import Budget
from policies.model.vocabulary import Market, NodePhase, Refusal, Role, RunPhase
from tests.stand_ins.world import spec

LINE = '{"time_s": %f, "what": "refusal", "node": "n", "role": "rollout", "market": "spot", "where": "z"}'


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


def test_a_storm_takes_a_zone_at_once_and_prices_go_to_war() -> None:
    storms = market("storms", 1, 4)
    assert len(storms) == 3
    assert {0, 4} == {count for zone in storms for count in zone.counts}
    prices = [zone.price_at(at) for zone in market("price-war", 1, 4) for at in range(0, 7 * 86400, 300)]
    assert min(prices) < 0.8
    assert max(prices) > 2.0


def test_traces_in_public_formats_are_read(tmp_path: Path) -> None:
    gaps = tmp_path / "zone.json"
    gaps.write_text(json.dumps({"metadata": {"gap_seconds": 600}, "data": [0, 1, 0]}))
    [zone] = read_weather(gaps, 4)
    assert (zone.gap_s, zone.counts) == (600.0, (4, 0, 4)), "1 says that the one machine is taken"
    gaps.write_text(json.dumps({"metadata": {"gap_seconds": 600}, "data": [3, 1, 0]}))
    assert read_weather(gaps, 4)[0].counts == (3, 1, 0)
    times = tmp_path / "counts.csv"
    times.write_text("time,count\n0,4\n120,0\n180,2\n")
    assert read_weather(times, 4)[0].counts == (4, 4, 0, 2)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty"),
        ("time,count\nsoon,4\n", "soon"),
        ("0,4\n60,-1\n", "below 0"),
        ("60,4\n0,4\n", "go back"),
        ('{"data": [1]}', "metadata"),
        ('{"metadata": {"gap_seconds": 0}, "data": [1]}', "gap_seconds"),
        ('{"metadata": {"gap_seconds": NaN}, "data": [1]}', "gap_seconds"),
        ('{"metadata": {"gap_seconds": 60}, "data": [Infinity]}', "infinity"),
        ("0,inf\n", "infinity"),
        ("0,1\ninf,1\n", "infinity"),
        ("0,1\n1e12,1\n", "in seconds"),
        ("x" * 200_000, "field larger"),
        ('{"a":' * 100_000, "recursion"),
        (f"{LINE % 0}\n{LINE % 1e14}\n", "in seconds"),
    ],
)
def test_what_is_no_weather_is_refused_with_what_is_expected(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "t"
    file.write_text(text)
    with pytest.raises(NotWeather, match=rf"{file}.*{told}.*expected JSON|{file}.*{told}.*time,count"):
        read_weather(file, 4)


def test_a_spreadsheet_with_decimal_commas_is_read(tmp_path: Path) -> None:
    plain, european = tmp_path / "plain.csv", tmp_path / "european.csv"
    plain.write_text("time,count\n0,2\n90.5,0\n200,3.0\n")
    european.write_text("\ufefftime;count\r\n0;2\r\n90,5;0\r\n200;3,0\r\n")
    assert read_weather(european, 3) == read_weather(plain, 3)
    assert len(read_weather(european, 3)[0].counts) == 4


def test_what_a_run_met_is_told_and_replayed(tmp_path: Path) -> None:
    there = Pool("aws", "r", "z1", "p5", "H100:8", Market.SPOT)

    def asked(node: str, pool: Pool | None = None) -> NodeRequested:
        return NodeRequested(node, Role.ROLLOUT, "rollout-0", 1, Market.SPOT, "first", pool=pool)

    history: list[tuple[int, float, tuple[Event, ...]]] = [
        (1, 0.0, (asked("rollout-0-i1"),)),
        (2, 60.0, (NodeMoved("rollout-0-i1", NodePhase.BOOTING, "the machine is there"),)),
        (3, 60.0, (MachineBought("rollout-0-i1", Market.SPOT, "aws/r/z1 H100:8", 2.0, 6.0),)),
        (4, 300.0, (NodeMoved("rollout-0-i1", NodePhase.DRAINING, "the cloud will take it back"),)),
        (5, 420.0, (NodeMoved("rollout-0-i1", NodePhase.GONE, "preempted"), asked("rollout-0-i2", there))),
        (6, 480.0, (NodeMoved("rollout-0-i2", NodePhase.REFUSED, "none left", Refusal.NO_CAPACITY),)),
        (7, 540.0, (asked("rollout-0-i3"),)),
        (8, 600.0, (NodeMoved("rollout-0-i3", NodePhase.SERVING, "in the membership"),)),
        (9, 660.0, (NodeMoved("rollout-0-i3", NodePhase.TERMINATING, "the run is finished"),)),
        (10, 720.0, (NodeMoved("rollout-0-i3", NodePhase.GONE, "taken down"),)),
    ]
    met = recorded(history)
    assert [one.what for one in met] == [LAUNCH, NOTICE, LOSS, REFUSAL, LAUNCH, RETURN]
    assert (met[0].where, met[0].usd_per_h, met[0].after_s) == ("aws/r/z1 H100:8", 2.0, 60.0)
    assert (met[3].why, met[3].time_s, met[3].where) == ("none left", 480.0, "aws/r/z1 p5 H100:8")
    file = tmp_path / "weather.jsonl"
    file.write_text("".join(json.dumps(to_plain(one)) + "\n" for one in met))
    [zone] = read_weather(file, 2)
    assert zone.name == "aws/r/z1"
    assert zone.counts == (2, 2, 2, 2, 0, 0, 0, 0, 0, 2, 2, 2), "none from the notice to the next launch"
    assert replayed([to_plain(one) for one in met], 2) == (zone,)


def test_lines_of_several_runs_may_be_in_any_order(tmp_path: Path) -> None:
    file = tmp_path / "weather.jsonl"
    file.write_text(f"{LINE % 600}\n{LINE % 0}\n")
    [zone] = read_weather(file, 2)
    assert zone.counts == (0,) * 11


def test_all_on_demand_is_and_the_oracle_buys_what_the_run_may() -> None:
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
    assert tell(2, run, weather=market("never", 2, 2)).phase is end


def test_a_run_that_stops_at_its_budget_has_ended() -> None:
    assert tell(0, replace(spec(2), budget=Budget(usd=6.0, at="down"))).phase is RunPhase.STOPPED


def test_a_run_that_is_asked_to_stop_as_it_ends_has_ended() -> None:
    assert tell(6, spec(3), weather=market("storms", 6, 3)).phase is RunPhase.FINISHED


def test_a_run_on_spot_alone_whose_only_zone_is_lost_for_good_waits_and_breaks_no_promise() -> None:
    run = spec(2)
    run = replace(run, rollout=replace(run.rollout, resources={"use_spot": True}))
    assert tell(14, run, weather=market("unclouded", 14, 2)).phase is RunPhase.PARKED
