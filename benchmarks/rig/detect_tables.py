"""The tables and the figures of `make bench-detect`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from benchmarks.rig.detect_runs import DETECTOR, JUDGES, SEEN, SYNTHETIC, UNSEEN, Judged, outcomes_of
from benchmarks.rig.divergence.score import Outcome, Score, score

COLUMNS = ("missed", "false", "per 1,000", "delay", "p90", "targets", "good lost")


def by_set(judged: Sequence[Judged]) -> Table:
    """A row for each set and judge; of the synthetic set also one for each setting."""
    table = _table(
        "Divergence: the detector beside two lines, 5 points in a row above them", "set", "judge", *COLUMNS
    )
    for name in (SYNTHETIC, SEEN, UNSEEN):
        there = [one for one in judged if one.set == name]
        if not there:
            table.add_row(name, "no runs there")
        for judge_name in JUDGES if there else ():
            table.add_row(name, judge_name, *_cells(score(outcomes_of(there, judge_name))))
        table.add_section()
    for setting, found in _grouped(judged, lambda one: one.setting).items():
        if setting:
            table.add_row(f"synthetic, {setting}", DETECTOR, *_cells(score(outcomes_of(found, DETECTOR))))
    return table


def by_family(judged: Sequence[Judged]) -> Table:
    """The synthetic runs: a row for each cause, and under it one for each of its families."""
    lines = [name for name in JUDGES if name != DETECTOR]
    table = _table("Synthetic runs by family", "family", *COLUMNS, *lines)
    synthetic = [one for one in judged if one.set == SYNTHETIC]
    for cause, found in _grouped(synthetic, lambda one: one.cause).items():
        table.add_row(f"[bold]{cause}", *_detector_and_lines(found, lines))
        for family, ones in _grouped(found, lambda one: one.name).items():
            table.add_row("  " + family.replace("_", " "), *_detector_and_lines(ones, lines))
        table.add_section()
    return table


def by_run(judged: Sequence[Judged]) -> Table:
    """The recorded runs that diverge, or that any judge tripped on: each judge's trip, and the onset it told."""
    table = _table("Recorded runs: the step of the trip, and of the onset that was told", "run", "onset", *JUDGES)
    for one in judged:
        onset = one.outcomes[DETECTOR].trace.onset_step
        told = [_trip(outcome) for outcome in one.outcomes.values()]
        if one.set != SYNTHETIC and (onset is not None or any(told)):
            table.add_row(
                f"{one.name} ({one.set.split(', ')[1]})", "healthy" if onset is None else str(onset), *told
            )
    return table


def figures(judged: Sequence[Judged]) -> dict[str, Any]:
    """Everything in the tables, for `detect.json`."""
    synthetic = [one for one in judged if one.set == SYNTHETIC]
    return {
        "sets": _by_judge(_grouped(judged, lambda one: one.set)),
        "settings": _by_judge(_grouped(synthetic, lambda one: one.setting)),
        "causes": _by_judge(_grouped(synthetic, lambda one: one.cause)),
        "families": _by_judge(_grouped(synthetic, lambda one: one.name)),
        "recorded_runs": {one.name: _run_figures(one) for one in judged if one.set != SYNTHETIC},
    }


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=None, header_style="dim", pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        left = column in ("set", "judge", "family", "run")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    return table


def _grouped(judged: Sequence[Judged], key: Callable[[Judged], str]) -> dict[str, list[Judged]]:
    groups: dict[str, list[Judged]] = {}
    for one in judged:
        groups.setdefault(key(one), []).append(one)
    return groups


def _detector_and_lines(found: Sequence[Judged], lines: Sequence[str]) -> list[str]:
    lined = [score(outcomes_of(found, name)) for name in lines]
    return [*_cells(score(outcomes_of(found, DETECTOR))), *(_missed_and_false(one) for one in lined)]


def _cells(one: Score) -> list[str]:
    """Nothing where there was nothing to count: no diverging runs, no healthy ones, none caught."""
    missed = f"{one.missed} of {one.diverging_runs}" if one.diverging_runs else ""
    false = f"{one.healthy_tripped} of {one.healthy_runs}" if one.healthy_runs else ""
    if early := one.false_trips - one.healthy_tripped:
        false += f" + {early} early"
    told = [missed, false, f"{one.false_trips_per_1000:.2f}" if one.healthy_points else "", "", "", "", ""]
    if one.delay_points_median is not None:
        told[3:5] = [f"{one.delay_points_median:g}", f"{one.delay_points_p90}"]
        told[5:] = [f"{one.target_before_onset_share:.3f}", f"{one.good_steps_thrown_away_median:g}"]
    return told


def _missed_and_false(one: Score) -> str:
    return f"{one.missed} missed, {one.false_trips} false"


def _trip(outcome: Outcome) -> str:
    return "" if outcome.trip_step is None else f"{outcome.trip_step} ({outcome.told_onset_step})"


def _by_judge(groups: dict[str, list[Judged]]) -> dict[str, dict[str, Any]]:
    return {
        name: {judge_name: _figures(score(outcomes_of(found, judge_name))) for judge_name in JUDGES}
        for name, found in groups.items()
    }


def _run_figures(one: Judged) -> dict[str, Any]:
    trips = {name: [found.trip_step, found.told_onset_step] for name, found in one.outcomes.items()}
    return {"set": one.set, "onset_step": one.outcomes[DETECTOR].trace.onset_step, "trip_and_told_onset": trips}


def _figures(one: Score) -> dict[str, Any]:
    return {
        "diverging_runs": one.diverging_runs,
        "missed": one.missed,
        "healthy_runs": one.healthy_runs,
        "healthy_runs_tripped": one.healthy_tripped,
        "false_trips": one.false_trips,
        "false_trips_per_1000_points": round(one.false_trips_per_1000, 4),
        "healthy_points": one.healthy_points,
        "delay_points_median": one.delay_points_median,
        "delay_points_p90": one.delay_points_p90,
        "target_before_onset_share": one.target_before_onset_share,
        "steps_thrown_away_median": one.steps_thrown_away_median,
        "good_steps_thrown_away_median": one.good_steps_thrown_away_median,
        "without_target": one.without_target,
    }
