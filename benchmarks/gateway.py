"""Our gateway beside other balancers: `make bench-gateway`, as root, under seven minutes.

One of three servers is killed, stopped or cut off with 64 requests under way: what fails, what is made twice, how
long it takes. Then, while nothing fails: CPU time per token, added latency, short requests a second on one core;
and how evenly a step is divided whose members come one after another.
Servers and client are small programs in C, so that what is measured is what stands between them.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.rig import costs, faults
from benchmarks.rig.costs import Cost, Costs
from benchmarks.rig.faults import Outcome
from benchmarks.rig.gateway import skew
from benchmarks.rig.gateway.balancers import (
    NOBODY,
    OURS,
    System,
    documents_whole,
    install,
    others,
    ours_as,
    start_nothing,
    streams,
)
from benchmarks.rig.gateway.fakes import compile_programs
from benchmarks.rig.gateway.skew import Skewed
from benchmarks.rig.local_run import ROOT

Struck = dict[str, dict[str, Outcome | str]]  # by fault and system

console = Console()


def main() -> None:
    if os.geteuid() != 0:
        raise SystemExit("network namespaces and a balancer's own processor need root")
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    with console.status("compiling, and installing what is measured beside ours"):
        compile_programs()
        versions = install()
    streaming = [system for system in others(streams) if system.name in versions]
    whole = [system for system in others(documents_whole) if system.name in versions]
    to_strike = {OURS.name: OURS}
    to_strike |= {f"{one.name}, streaming": one for one in [ours_as(streams), *streaming]}
    to_strike |= {f"{one.name}, JSON": one for one in [ours_as(documents_whole), *whole]}
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        struck: Struck = {}
        for fault in faults.FAULTS:
            with console.status(f"{faults.REQUESTS} requests under way: {fault}"):
                found = faults.measure(fault, list(to_strike.values()), base / fault)
                struck[fault] = dict(zip(to_strike, found, strict=True))
        with console.status("what it costs when nothing fails"):
            nothing = System(NOBODY, start_nothing, streams)
            found_costs = costs.measure([OURS, *streaming, nothing], [OURS, *whole, nothing], base / "costs")
        with console.status("a step whose members come one after another"):
            skewed = skew.measure(base)
    for one in others(streams):
        if one.name not in versions:
            found_costs.missing[one.name] = "it could not be installed here"
    show(versions, struck, found_costs, skewed)
    if OURS.name in found_costs.missing:
        raise SystemExit("our own gateway could not be measured")


def show(versions: dict[str, str], struck: Struck, found: Costs, skewed: Sequence[Skewed]) -> None:
    """Print the tables and write the figures."""
    console.print(conditions(versions), highlight=False, soft_wrap=True)
    for fault, outcomes in struck.items():
        console.print(fault_table(fault, outcomes))
    console.print(cpu_table(found))
    for number in costs.TOKENS:
        console.print(latency_table(number, found))
    table = Table("", "a second", "CPU, us each", title=f"Short requests ({costs.SHORT_TOKENS} tokens), one core")
    for name, turns in found.short.items():
        cpu = "" if name == NOBODY else f"{average(turns, 'cpu_us'):.0f}"
        table.add_row(name, f"{average(turns, 'per_s'):,.0f}", cpu)
    console.print(table)
    console.print(skew_table(skewed))
    for name, why in found.missing.items():
        console.print(f"Not measured: {name}: {why}", highlight=False)
    figures = figures_of(versions, struck, found)
    figures["skew"] = [asdict(one) for one in skewed]
    out = ROOT / "benchmarks" / "results" / "gateway.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(figures, indent=2) + "\n")
    console.print(json.dumps(figures, indent=2), highlight=False)


def conditions(versions: dict[str, str]) -> str:
    """What the figures depend on."""
    systems = ", ".join(f"{name} {version}" for name, version in versions.items())
    sizes = " and ".join(f"{number:,} streams of {tokens:,} tokens" for number, tokens in costs.TOKENS.items())
    return (
        f"Conditions: {os.cpu_count()} processors, {platform.system()} {platform.release()}, Python "
        f"{platform.python_version()}, loopback; servers are a fast stand-in for vLLM. {systems}. "
        f"Faults: {faults.REQUESTS} requests of {faults.TOKENS} tokens on three servers, an event every "
        f"{faults.STEP_US / 1000:g} ms, one server struck after {faults.STRIKE_S:g} s of {faults.IDEAL_S:g}; all "
        f"systems at the same time. Costs: {sizes}, {costs.TOKENS_PER_S:,} tokens/s, the balancer on one "
        f"processor, servers and client on another, {costs.TURNS} turns."
    )


def fault_table(fault: str, outcomes: dict[str, Outcome | str]) -> Table:
    titles = {
        "kill": "One server killed",
        "stop": "One server stopped",
        "drop": "One server cut off, packets lost",
    }
    table = Table("", "failed", "tokens made again", "seconds longer", title=titles[fault])
    for name, outcome in outcomes.items():
        if isinstance(outcome, str):
            table.add_row(name, "not measured: " + outcome)
            continue
        longer = "never" if outcome.seconds_to_recover is None else f"{outcome.seconds_to_recover:.1f}"
        table.add_row(name, str(outcome.failed), str(outcome.tokens_regenerated), longer)
    return table


def cpu_table(found: Costs) -> Table:
    loads = [(number, interval) for number in costs.TOKENS for interval in costs.INTERVALS]
    title = "CPU, us a token, by streams and tokens an event"
    table = Table("", *(f"{number:,}, {interval}" for number, interval in loads), title=title)
    for name, by_load in found.streams.items():
        if name != NOBODY:
            table.add_row(name, *(f"{average(by_load[load], 'cpu_us'):.2f}" for load in loads))
    return table


def latency_table(number: int, found: Costs) -> Table:
    title = f"{number:,} streams: ms added to an answer, median (99 %), by tokens an event"
    table = Table("", *map(str, costs.INTERVALS), title=title)
    for name, by_load in found.streams.items():
        turns = [by_load[number, interval] for interval in costs.INTERVALS]
        added = [f"{average(each, 'latency_ms'):.0f} ({average(each, 'latency_99_ms'):.0f})" for each in turns]
        failed = sum(cost.failed for each in turns for cost in each)
        table.add_row(name + (f", {failed} FAILED" if failed else ""), *added)
    return table


def skew_table(skewed: Sequence[Skewed]) -> Table:
    title = f"A step of {skew.REQUESTS} requests, {len(skew.HOSTS)} members ready one after another"
    table = Table("seconds apart", "took, s", "ideal, s", "ratio", "requests moved", title=title)
    for one in skewed:
        took = f"{one.took_s:.2f}", f"{one.ideal_s:.2f}", f"{one.took_s / one.ideal_s:.3f}"
        table.add_row(f"{one.skew_s:g}", *took, str(one.moved))
    return table


def average(turns: Sequence[Cost], what: str) -> float:
    return mean(float(getattr(cost, what)) for cost in turns)


def figures_of(versions: dict[str, str], struck: Struck, found: Costs) -> dict[str, Any]:
    """What is written down: times in the units that their names say."""

    def by_interval(number: int, what: str) -> dict[str, dict[str, float]]:
        return {
            name: {str(n): round(average(by_load[number, n], what), 3) for n in costs.INTERVALS}
            for name, by_load in found.streams.items()
        }

    figures: dict[str, Any] = {}
    for fault, outcomes in struck.items():
        figures[fault] = {name: _plain(outcome) for name, outcome in outcomes.items()}
    few, many = sorted(costs.TOKENS)
    figures["cpu_us_per_token"] = _without_nobody(by_interval(many, "cpu_us"))
    figures[f"cpu_us_per_token_{few}_streams"] = _without_nobody(by_interval(few, "cpu_us"))
    for number in (few, many):
        figures[f"latency_ms_{number}_streams"] = by_interval(number, "latency_ms")
        figures[f"latency_99_ms_{number}_streams"] = by_interval(number, "latency_99_ms")
    figures["short_requests_per_s"] = {name: round(average(turns, "per_s")) for name, turns in found.short.items()}
    figures["not_measured"] = found.missing
    figures["versions"] = versions
    return figures


def _plain(outcome: Outcome | str) -> Any:
    return {"not_measured": outcome} if isinstance(outcome, str) else asdict(outcome)


def _without_nobody(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if name != NOBODY}


if __name__ == "__main__":
    main()
