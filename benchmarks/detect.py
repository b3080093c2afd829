"""How soon divergence is told, how often wrongly, and how far back a run would go: `make bench-detect`.

The runs are synthetic, healthy and diverging, labelled, and logged as TRL would
(`tests/generators/divergence_traces.py`). Half are of the ranges that the tests draw from, half of wilder ones.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.rig.local_run import ROOT
from policies.detect.divergence import Detector, Verdict, follow
from tests.generators.divergence_diverging import SAVE_STEPS
from tests.generators.divergence_score import Checkpoints, Outcome, Score, by_family, judge, score
from tests.generators.divergence_signals import Setting
from tests.generators.divergence_traces import Trace, traces

SETS = {
    "as in the tests": Setting(seed=2),
    "wilder": Setting(
        seed=3,
        kl_sigma=(0.01, 0.5),
        kinship=(0.0, 0.93),
        freedom=3.2,
        completions=(16, 128),
        grad_sigma=(0.05, 0.6),
        spike=(5.0, 5000.0),
    ),
}
HEALTHY_EACH, DIVERGING_EACH = 4, 12  # traces a family and set
TIMED = 40  # traces
LINE_NATS, LINE_POINTS = 1.0, 5

console = Console()


def main() -> None:
    outcomes: dict[str, list[Outcome]] = {}
    timed: list[Trace] = []
    for name, setting in SETS.items():
        with console.status(f"traces {name}"):
            made = traces(setting, HEALTHY_EACH, DIVERGING_EACH)
            outcomes[name] = [judge(trace) for trace in made]
            timed += made[:: len(made) * len(SETS) // TIMED]
    show(outcomes, microseconds_a_point(timed))


def judge_by_a_line(trace: Trace) -> Outcome:
    """What most people would do: stop where KL is above a fixed line for some points in a row, or no number."""
    above: list[int] = []
    kept = Checkpoints(trace.logging_steps)
    for point in trace.points:
        kept.save_before(point.step, Verdict())
        kl = point.values.get("kl", 0.0)
        above = [*above, point.step] if kl is None or kl > LINE_NATS else []
        if len(above) == LINE_POINTS:
            return Outcome(trace, point.step, above[0], kept.steps)
    return Outcome(trace, None, None, kept.steps)


def microseconds_a_point(made: Sequence[Trace]) -> float:
    """The median over the traces of what following one point takes."""
    taken = []
    for trace in made:
        detector, since_s = Detector(), time.perf_counter()
        for point in trace.points:
            detector = follow(detector, point, trace.limit)
        taken.append((time.perf_counter() - since_s) / len(trace.points))
    return 1e6 * median(taken)


def show(outcomes: dict[str, list[Outcome]], point_us: float) -> None:
    """Print the tables and write the figures."""
    every = [one for found in outcomes.values() for one in found]
    total = score(every)
    console.print(
        f"Conditions: {total.traces} synthetic traces, {total.healthy_steps:,} healthy steps, logged every "
        f"1, 5, 10 or 20 steps, a checkpoint every {SAVE_STEPS}, of which the default retention keeps what it "
        "keeps. Delay: logged points from the first bad update "
        "to the trip. False trips are for each 1,000 healthy steps.",
        highlight=False,
        soft_wrap=True,
    )
    title = "Divergence: median delay in points, good targets, median loss in steps"
    table = Table(title=title, box=None, header_style="dim", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("family", no_wrap=True)
    for column in ("traces", "missed", "false", "delay", "most", "targets", "lost", "good"):
        table.add_column(column, justify="right")
    for family, found in by_family(every).items():
        table.add_row(family.replace("_", " "), *_cells(score(found)))
    table.add_section()
    for name, found in outcomes.items():
        table.add_row(f"all, {name}", *_cells(score(found)))
    table.add_row("all", *_cells(total))
    lined = score([judge_by_a_line(one.trace) for one in every])
    table.add_row(f"a line at KL {LINE_NATS:g}, {LINE_POINTS} in a row", *_cells(lined))
    console.print(table)
    figures = {
        **_figures(total),
        "microseconds_a_point": round(point_us, 1),
        "by_a_line": _figures(lined),
        "sets": {name: _figures(score(found)) for name, found in outcomes.items()},
    }
    out = ROOT / "benchmarks" / "results" / "detect.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(figures, indent=2) + "\n")
    console.print(json.dumps(figures, indent=2), highlight=False)


def _cells(one: Score) -> list[str]:
    told = [str(one.traces), str(one.missed), str(one.false_trips), *[""] * 5]
    if one.delay_points_median is not None:
        told[3:5] = [f"{one.delay_points_median:g}", f"{one.delay_points_max:g}"]
        told[5] = f"{one.target_before_onset_share:.3f}"
        told[6:] = [f"{one.steps_thrown_away_median:g}", f"{one.good_steps_thrown_away_median:g}"]
    return told


def _figures(one: Score) -> dict[str, Any]:
    return {
        "traces": one.traces,
        "missed": one.missed,
        "false_trips_per_1000": round(one.false_trips_per_1000, 4),
        "false_trips": one.false_trips,
        "healthy_steps": one.healthy_steps,
        "delay_points_median": one.delay_points_median,
        "target_before_onset_share": one.target_before_onset_share,
        "steps_thrown_away_median": one.steps_thrown_away_median,
        "good_steps_thrown_away_median": one.good_steps_thrown_away_median,
        "without_target": one.without_target,
    }


if __name__ == "__main__":
    main()
