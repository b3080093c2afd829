"""`grpo-orch simulate`: run the real controller in a simulated cloud, and print the results."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import structlog
import typer
from rich.console import Group
from rich.progress import Progress, TaskID
from rich.table import Table

from grpo_orch.orchestrator.cli.options import AsJson, Output, Stop, errors, print_result
from grpo_orch.orchestrator.config.load import load_spec
from grpo_orch.orchestrator.simulate.market_trace import CLIMATES, InvalidTrace, MarketTrace, climate, read_trace
from grpo_orch.orchestrator.simulate.scenarios import ScenarioResult, run_scenario
from grpo_orch.orchestrator.simulate.simulated_cloud import Physics, Prices
from grpo_orch.orchestrator.simulate.simulation import (
    HOURS,
    ON_DEMAND,
    THIS_RUN,
    InvariantViolated,
    Outcome,
    on_demand,
    simulate_hours,
)
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.spec import RunSpec, generates_itself


def simulation_json(
    market: str, scenarios: Sequence[ScenarioResult], outcomes: Mapping[str, Outcome]
) -> dict[str, Any]:
    """Return the results of scenarios with faults, and of this run without faults next to all on demand."""
    return {
        "market": market,
        "seeds": len(scenarios),
        "broken": 0,
        "scenarios": [asdict(scenario) for scenario in scenarios],
        "hours": HOURS,
        "steps_per_usd_to_on_demand": round(_ratio(outcomes, THIS_RUN), 3),
        "outcomes": {name: asdict(outcome) for name, outcome in outcomes.items()},
    }


def _ratio(outcomes: Mapping[str, Outcome], name: str) -> float:
    """Return steps per USD, as a ratio to all on demand."""
    base = outcomes[ON_DEMAND].steps_per_usd
    return outcomes[name].steps_per_usd / base if base else 0.0


def scenarios_line(scenarios: Sequence[ScenarioResult]) -> str:
    """Summarize the scenarios in one sentence."""
    counts = Counter(scenario.phase for scenario in scenarios)
    phases = ", ".join(f"{count} {phase}" for phase, count in sorted(counts.items()))
    hours = sum(scenario.hours for scenario in scenarios)
    number = f"{len(scenarios)} scenario{'s' * (len(scenarios) != 1)}"
    return f"{number} over {hours:.0f} simulated hours, no invariant violated: {phases}"


def render(market: str, outcomes: Mapping[str, Outcome]) -> Table:
    """Draw a line for each outcome."""
    title = f"{HOURS:.0f} h of spot market: {market}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for name in ("steps", "USD", "steps/USD", "vs on demand", "machines"):
        table.add_column(name, justify="right")
    for name, outcome in outcomes.items():
        figures = f"{outcome.steps:.0f}", f"{outcome.usd:.2f}", f"{outcome.steps_per_usd:.2f}"
        machines = str(outcome.bought) if outcome.bought else ""
        table.add_row(name, *figures, f"{_ratio(outcomes, name):.2f}", machines)
    return table


# The command.

MarketOf = Callable[[int], MarketTrace]  # by seed
SEEDS = 20
DEFAULT_CLIMATE = "storms"


def simulate(
    run_yaml: Annotated[Path, typer.Argument(help="The run's specification.")] = Path("run.yaml"),
    climate_name: Annotated[
        str | None,
        typer.Option(
            "--climate",
            metavar="NAME",
            help=f"Spot market: one of {', '.join(CLIMATES)}.",
            autocompletion=lambda: list(CLIMATES),
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Recorded spot market: JSON, as SkyPilot's traces."),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", help="Number of fault scenarios.")] = SEEDS,
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="Seed of the first scenario.")] = 0,
    output: AsJson = Output.TEXT,
) -> None:
    """Simulate a run: test its controller with faults and a spot market, and estimate its cost.

    Starts no machine. Exit code 1: an invariant was violated; the message names the command that replays it.
    """
    spec = load_spec(run_yaml)
    if climate_name and trace:
        raise Stop("--climate and --trace are mutually exclusive")
    if seeds < 1:
        raise Stop(f"--seeds {seeds}: expected a whole number above 0")
    if generates_itself(spec):
        raise Stop(f"{run_yaml}: rollout.replicas is 0, so there is no fleet to simulate")
    name = climate_name or (str(trace) if trace else DEFAULT_CLIMATE)
    market_of = _market_of(name, trace, spec)
    option = "--trace" if trace else "--climate"
    replay = f"grpo-orch simulate {quote(str(run_yaml))} {option} {quote(name)} --seeds 1 --seed"
    with _quiet(), Progress(console=errors, transient=True, disable=output is Output.JSON) as progress:
        scenarios = list(_scenarios(range(seed, seed + seeds), spec, market_of, replay, progress))
        task = progress.add_task("this run and all on demand", total=2)
        outcomes: dict[str, Outcome] = {}
        for label, run in ((THIS_RUN, spec), (ON_DEMAND, on_demand(spec))):
            outcomes[label] = simulate_hours(run, market_of(seed), Physics(), _prices(spec), HOURS, seed)
            progress.advance(task)
    text = Group(scenarios_line(scenarios), render(name, outcomes))
    print_result(output, simulation_json(name, scenarios, outcomes), text)


def _market_of(name: str, trace: Path | None, spec: RunSpec) -> MarketOf:
    """Return the spot market of a seed: a model's varies with the seed, a trace's does not. Raises Stop."""
    nodes = spec.rollout.replicas.max
    if trace is None:
        if name not in CLIMATES:
            raise Stop(f"--climate {name}: expected one of {', '.join(CLIMATES)}")
        return lambda seed: climate(name, seed, nodes)
    try:
        recorded = read_trace(trace, nodes)
    except InvalidTrace as error:
        raise Stop(str(error)) from None
    return lambda _: recorded


def _prices(spec: RunSpec) -> Prices:
    """Return the prices of `rehearse` in run.yaml, else list prices of an H200."""
    default = Prices()
    if spec.rehearse is None:
        return default
    trainer, rollout = spec.rehearse.prices.trainer, spec.rehearse.prices.rollout
    return Prices(
        trainer.on_demand_usd_per_h or default.trainer_usd_per_h,
        rollout.on_demand_usd_per_h or default.node_usd_per_h,
        rollout.spot_usd_per_h or default.spot_usd_per_h,
    )


def _scenarios(
    seeds: range, spec: RunSpec, market_of: MarketOf, replay: str, progress: Progress
) -> Iterator[ScenarioResult]:
    task: TaskID = progress.add_task("scenarios", total=len(seeds))
    for seed in seeds:
        try:
            yield run_scenario(seed, spec, trace=market_of(seed), prices=_prices(spec))
        except InvariantViolated as error:
            raise Stop(f"{error}\nreplay it with: {replay} {seed}", exit_codes.FAILED) from None
        progress.advance(task)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the log of thousands of ticks."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)
