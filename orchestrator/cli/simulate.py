"""`simulate`: a run on a simulated cloud, and its result as text or plain values."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import structlog
import typer
from rich.progress import Progress, TaskID
from rich.table import Table

from orchestrator.cli.options import AsJson, Output, Stop, console, errors, print_json
from orchestrator.config.load import load_spec
from orchestrator.simulate.cloud import Physics, Prices
from orchestrator.simulate.stories import Told, tell
from orchestrator.simulate.weather import CLIMATES, NotWeather, Weather, climate, read_weather
from orchestrator.simulate.world import HOURS, ON_DEMAND, THIS_RUN, Broken, Outcome, on_demand, simulate_hours
from policies.model import exit_codes
from policies.model.spec import RunSpec, generates_itself


@dataclass(frozen=True, slots=True)
class Simulation:
    """Scenarios with faults, and this run without faults next to the same run on demand."""

    weather: str
    hours: float  # of each outcome
    stories: Sequence[Told]
    outcomes: Mapping[str, Outcome]

    @property
    def ratios(self) -> dict[str, float]:
        """Steps per USD, as a ratio to all on demand."""
        base = self.outcomes[ON_DEMAND].steps_per_usd
        return {name: one.steps_per_usd / base if base else 0.0 for name, one in self.outcomes.items()}


def simulation_json(found: Simulation) -> dict[str, Any]:
    return {
        "weather": found.weather,
        "seeds": len(found.stories),
        "broken": 0,
        "stories": [asdict(one) for one in found.stories],
        "hours": found.hours,
        "steps_per_usd_to_on_demand": round(found.ratios[THIS_RUN], 3),
        "outcomes": {name: asdict(outcome) for name, outcome in found.outcomes.items()},
    }


def stories_line(stories: Sequence[Told]) -> str:
    """Sum the stories up in a sentence."""
    ends: dict[str, int] = {}
    for one in stories:
        ends[one.phase] = ends.get(one.phase, 0) + 1
    told = ", ".join(f"{count} {phase}" for phase, count in sorted(ends.items()))
    hours = sum(one.hours for one in stories)
    return f"{len(stories)} stories over {hours:.0f} simulated hours, no promise broken: {told}"


def render(found: Simulation) -> Table:
    title = f"{found.hours:.0f} h of weather: {found.weather}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for name in ("steps", "USD", "steps a USD", "of all on demand", "machines"):
        table.add_column(name, justify="right")
    for name, one in found.outcomes.items():
        bought = str(one.bought) if one.bought else ""
        row = (f"{one.steps:.0f}", f"{one.usd:.2f}", f"{one.steps_per_usd:.2f}", f"{found.ratios[name]:.2f}")
        table.add_row(name, *row, bought)
    return table


# The command.

SEEDS = 20
DEFAULT_CLIMATE = "storms"


def simulate(
    run_yaml: Annotated[Path, typer.Argument(help="The run.")] = Path("run.yaml"),
    climate_name: Annotated[
        str | None, typer.Option("--climate", metavar="NAME", help=f"One of {', '.join(CLIMATES)}.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Spot weather: SkyPilot's JSON, or time,count.")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", help="How many stories of faults.")] = SEEDS,
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="The first story's; replays it.")] = 0,
    output: AsJson = Output.TEXT,
) -> None:
    """Simulate a run: its controller through faults and a spot market, and what it would cost.

    Starts nothing. Exit code 1 means that a promise was broken; the message names the command that replays it.
    """
    spec = load_spec(run_yaml)
    if climate_name and trace:
        raise Stop("--climate and --trace: expected one of them", exit_codes.USAGE)
    if seeds < 1:
        raise Stop(f"--seeds {seeds}: expected a whole number above 0", exit_codes.USAGE)
    if generates_itself(spec):
        raise Stop(f"{run_yaml}: rollout.replicas is 0, and there is no fleet to simulate", exit_codes.USAGE)
    spec = _without_deadline(spec)
    name = climate_name or (str(trace) if trace else DEFAULT_CLIMATE)
    weather_of = _weather(name, trace, spec)
    option = "--trace" if trace else "--climate"
    replay = f"grpo-orch simulate {quote(str(run_yaml))} {option} {quote(name)} --seeds 1 --seed"
    with _quiet(), Progress(console=errors, transient=True, disable=output is Output.JSON) as progress:
        stories = list(_stories(range(seed, seed + seeds), spec, weather_of, replay, progress))
        shown = progress.add_task("this run and all on demand", total=2)
        outcomes: dict[str, Outcome] = {}
        for label, run in ((THIS_RUN, spec), (ON_DEMAND, on_demand(spec))):
            outcomes[label] = simulate_hours(run, weather_of(seed), Physics(), _prices(spec), HOURS, seed)
            progress.advance(shown)
    found = Simulation(name, HOURS, stories, outcomes)
    if output is Output.JSON:
        print_json(simulation_json(found))
    else:
        console.print(stories_line(stories), highlight=False)
        console.print(render(found), highlight=False)


def _without_deadline(spec: RunSpec) -> RunSpec:
    """The run as it is simulated: with steps and a clock of its own, so that its deadline means nothing there."""
    fleet = spec.policies.fleet
    if fleet.deadline is None:
        return spec
    errors.print(
        "policies.fleet.deadline is left out: what is simulated has steps and a clock of its own", highlight=False
    )
    return replace(spec, policies=replace(spec.policies, fleet=replace(fleet, deadline=None)))


class _WeatherOf:
    """The weather of a seed: a climate's differs from seed to seed, a trace's does not."""

    def __init__(self, name: str, trace: Weather | None, nodes: int) -> None:
        self._name, self._trace, self._nodes = name, trace, nodes

    def __call__(self, seed: int) -> Weather:
        return self._trace or climate(self._name, seed, self._nodes)


def _weather(name: str, trace: Path | None, spec: RunSpec) -> _WeatherOf:
    nodes = spec.rollout.replicas.max
    if trace is None and name not in CLIMATES:
        raise Stop(f"--climate {name}: expected one of {', '.join(CLIMATES)}", exit_codes.USAGE)
    try:
        return _WeatherOf(name, read_weather(trace, nodes) if trace else None, nodes)
    except NotWeather as error:
        raise Stop(str(error), exit_codes.USAGE) from None


def _prices(spec: RunSpec) -> Prices:
    """The rehearsal's where run.yaml has them, else list prices of an H200."""
    usual = Prices()
    if spec.rehearse is None:
        return usual
    trainer, rollout = spec.rehearse.trainer_prices, spec.rehearse.rollout_prices
    return Prices(
        trainer.on_demand_usd_per_h or usual.trainer_usd_per_h,
        rollout.on_demand_usd_per_h or usual.node_usd_per_h,
        rollout.spot_usd_per_h or usual.spot_usd_per_h,
    )


def _stories(
    seeds: range, spec: RunSpec, weather_of: _WeatherOf, replay: str, progress: Progress
) -> Iterator[Told]:
    shown: TaskID = progress.add_task("stories", total=len(seeds))
    for seed in seeds:
        try:
            yield tell(seed, spec, weather=weather_of(seed), prices=_prices(spec))
        except Broken as error:
            raise Stop(f"{error}\nreplay it with: {replay} {seed}", exit_codes.FAILED) from None
        progress.advance(shown)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the log of thousands of ticks."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)
