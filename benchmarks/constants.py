"""How much each constant of the detectors matters: `make bench-constants`.

Each is moved by a quarter, down and up, one at a time, and the detector judges traces of every family and the
recordings that it was made with in sight. What was set aside is not touched: nobody is to tune by it.
"""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from math import ceil
from multiprocessing import get_context

from rich.console import Console
from rich.table import Table

from benchmarks.rig.detect_runs import SEEN
from benchmarks.rig.divergence.families import CAUSES
from benchmarks.rig.divergence.recorded import recorded_traces
from benchmarks.rig.divergence.score import Score, judge, score
from benchmarks.rig.divergence.signals import Setting
from benchmarks.rig.divergence.traces import traces
from benchmarks.rig.local_run import ROOT
from grpo_orch.policies.detect import divergence, signals, slides, symptoms

HOMES = {
    signals: ("WINDOW_POINTS", "OUTLIERS", "PAST_POINTS", "DOUBT_SHARE", "BLOCKS_OF_A_SIZE"),
    symptoms: ("FACTOR", "SURE_WOBBLES", "LASTING_POINTS", "SEQUENCE_TOKENS"),
    divergence: ("KL_UNPAID", "KL_PAID", "KL_BROKEN", "NOT_FINITE_POINTS", "OVERFLOW_STEPS"),
}
CONSTANTS: dict[str, float] = {name: vars(home)[name] for home, names in HOMES.items() for name in names}
QUARTERS = (0.75, 1.25)
AS_THEY_ARE = ("as they are", 0.0)
SETTING = Setting(seed=1)
EACH_HEALTHY, EACH_DIVERGING = 1, 2  # traces a family
COLUMNS = ("missed", "false", "delay", "bad targets")

console = Console()


def main() -> None:
    moves = [AS_THEY_ARE, *((name, moved(name, by)) for name in CONSTANTS for by in QUARTERS)]
    # A process judges with one value of one constant: it is set in every module that uses it.
    pool = ProcessPoolExecutor(mp_context=get_context("spawn"), max_tasks_per_child=1)
    with console.status("judging all runs once for each value"), pool:
        scores = list(pool.map(judged_with, *zip(*moves, strict=True)))
    show(dict(zip(moves, scores, strict=True)))


def moved(name: str, by: float) -> float:
    """The constant so many times as much; of whole points the next one up."""
    value = CONSTANTS[name]
    return ceil(value * by) if isinstance(value, int) else value * by


def judged_with(name: str, value: float) -> Score:
    """Judge every run with this constant at that value."""
    for module in (signals, symptoms, slides, divergence):
        if name in vars(module):
            setattr(module, name, value)
    healthy = [family for cause in CAUSES.values() for family in cause.healthy]
    diverging = [family for cause in CAUSES.values() for family in cause.diverging]
    made = traces(SETTING, EACH_HEALTHY, EACH_DIVERGING, healthy=healthy, diverging=diverging)
    return score([judge(one) for one in (*made, *recorded_traces(SEEN.rpartition(" ")[2]))])


def show(found: dict[tuple[str, float], Score]) -> None:
    """Print the table and write the figures."""
    at_rest = found[AS_THEY_ARE]
    table = Table(
        title=f"{at_rest.healthy_runs} healthy runs and {at_rest.diverging_runs} that diverge; one constant moved",
        box=None,
        header_style="dim",
    )
    for column in ("constant", "value", *COLUMNS):
        table.add_column(column, justify="left" if column == "constant" else "right", no_wrap=True)
    for (name, value), one in found.items():
        table.add_row(name, f"{value:.3g}" if value else "", *_cells(one))
    console.print(table)
    out = ROOT / "benchmarks" / "results" / "constants.json"
    out.parent.mkdir(exist_ok=True)
    figures = [{"constant": name, "value": value, **asdict(one)} for (name, value), one in found.items()]
    out.write_text(json.dumps(figures, indent=2) + "\n")
    console.print(f"Wrote {out.relative_to(ROOT)}", highlight=False)


def _cells(one: Score) -> list[str]:
    caught = one.diverging_runs - one.missed - (one.false_trips - one.healthy_tripped)
    bad = round(caught * (1 - (one.target_before_onset_share or 0.0)))
    return [f"{one.missed}", f"{one.false_trips}", f"{one.delay_points_median or 0:g}", f"{bad}"]


if __name__ == "__main__":
    main()
