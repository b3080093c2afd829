"""Robust statistics of one logged signal: where it is now, where it was, and by how much it left its own past.

What trainers log has heavy tails: TRL's KL estimate is exponential in a single token, so points of 10 to 1,000
times the level come and go, two or three in a row. Nothing here is a mean of raw values: the present is an order
statistic of the last points, the past is made of running medians, kept finer the newer they are, so that what is
remembered stays small and the time of a change is known to a share of its age.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

# A running median over seven points shrugs off three wild ones in a row.
BRIEF_POINTS = 7
# Seven of nine is what nothing but a change brings about: were one point in ten wild, once in 300,000 points.
LONG_POINTS = 9
OUTLIERS = 2
# After six of one size two become one: a block is at most a sixth of its age, and 10,000 points are 70 blocks.
BLOCKS_OF_A_SIZE = 6
# The upper envelope of the past forgets a peak of e times the level in so many points: a bump in the beginning
# does not shield the rest of the run.
FORGET_POINTS = 200.0
# When a change began is known to a share of the time it took to arrive where it is.
DOUBT_SHARE = 0.3
DOUBT_POINTS = 1
MOSTLY = 0.6  # of the points since a change are beyond it: what swings is not back at each trough
# A point this share of the way from calm to the present has left calm; one this share short of it has arrived.
EDGE_SHARE = 0.25
UNDER_FLOOR = math.log(10)
SAME = 0.15  # two medians that differ by less, in logarithms, are the same: no run is less noisy
CALM_SHARE = 0.75  # what calm was is told by the last quarter of the points up to the change
START_POINTS = 3
# The wobble is over so many points, each cut at three times what it was before, so that wild ones hardly count.
WOBBLE_POINTS = 32
WOBBLE_CUT = 3.0
HUGE = 1e30  # values beyond count as this, so that differences stay finite


@dataclass(frozen=True, slots=True)
class Series:
    """What is remembered of one signal.

    `recent` are its last LONG_POINTS values, of `steps`. The past is in blocks, oldest first: how many points lie
    in it, the step of the last of them, and the mean of their running medians. `best` is the highest level that
    was sustained, and fades; `wobble` the mean distance of a value from the running median.
    """

    points: int = 0
    recent: tuple[float, ...] = ()
    steps: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    levels: tuple[float, ...] = ()
    start: float | None = None  # the median of the first START_POINTS
    best: float = -HUGE
    wobble: float = 0.0

    @property
    def now(self) -> float:
        """The running median."""
        return _median(self.recent[-BRIEF_POINTS:])

    def sustained(self, sign: float, points: int) -> float:
        """What all but OUTLIERS of the last points reach (sign 1) or stay under (-1); while there are too few,
        so far off that nothing follows from it."""
        if len(self.recent) <= 2 * OUTLIERS:
            return -sign * HUGE
        return sorted(self.recent[-points:], reverse=sign < 0)[OUTLIERS]

    def level_at(self, step: int) -> float:
        """The level at an earlier step."""
        at = min(bisect_right(self.ends, step - 1), len(self.ends) - 1)
        return self.levels[at] if self.levels else self.now


@dataclass(frozen=True, slots=True)
class Shift:
    """How far a signal has left its past, in its own unit, the level it left, and when it was last seen there.

    `onset_step` is the first step that the shift may have touched, with what is not known of it on the early side.
    """

    by: float
    calm: float
    calm_step: int
    onset_step: int
    points: int  # since it was last seen there


def follow_series(series: Series, step: int, value: float) -> Series:
    """Return the series after one more finite value."""
    value = min(max(value, -HUGE), HUGE)
    recent, steps = (*series.recent, value)[-LONG_POINTS:], (*series.steps, step)[-LONG_POINTS:]
    points = series.points + 1
    grown = replace(series, points=points, recent=recent, steps=steps)
    now, wobble, best = grown.now, series.wobble, series.best
    if points >= START_POINTS:
        off = abs(value - now) if points <= WOBBLE_POINTS else min(abs(value - now), WOBBLE_CUT * wobble)
        wobble = _short(wobble + (off - wobble) / min(points - START_POINTS + 1, WOBBLE_POINTS))
        faded = best - max(best - now, 0.0) / (2 * FORGET_POINTS)
        best = _short(max(grown.sustained(1.0, LONG_POINTS), faded))
    start = now if points == START_POINTS else series.start
    width = min(points, BRIEF_POINTS)
    past = (series.sizes, series.ends, series.levels)
    if width % 2:  # a median belongs to the point in its middle; an even window, while it grows, has none
        past = _with_block(past, steps[-1 - width // 2], now)
    return Series(points, recent, steps, *past, start, best, wobble)


def shift(series: Series, sign: float, points: int, least: float, floor: float = -HUGE) -> Shift | None:
    """Return how far the last points lie beyond what the past explains, or None where it is under `least`.

    For logarithms of a positive signal. One that grows from nothing in a concave way, as the KL of a healthy run
    does, is at its point n at most n/m times what it was at its point m, for every m. What goes beyond that is the
    shift, taken from the m for which it is most.

    Args:
        series: of logarithms.
        sign: 1 for a rise, -1 for a fall.
        points: how many of the last are the present.
        least: no smaller shift is of interest.
        floor: levels under it, in the direction of `sign`, count as being there.
    """
    present = sign * series.sustained(sign, points)
    lowest = min(series.levels, default=HUGE) if sign > 0 else -max(series.levels, default=-HUGE)
    if present - max(lowest, floor) < least:  # most are done here
        return None
    counts = _counts(series)
    by = present - min(_explained(series, counts, sign, floor)) - math.log(series.points)
    if by < least:
        return None
    # How far it went is told from the floor; when it set out, from further down.
    explained = _explained(series, counts, sign, floor - UNDER_FLOOR)
    levels = [max(sign * level, floor - UNDER_FLOOR) for level in series.levels]
    # A concave past explains as much from each of its points: the latest of them says best what calm was.
    edge = min(explained) + SAME
    at = max(i for i, one in enumerate(explained) if one <= edge)
    since = min(bisect_right(counts, CALM_SHARE * counts[at]), at)
    calm = max(levels[at], _median(levels[since : at + 1]))
    return _dated(series, counts, levels, by, sign, calm)


def _explained(series: Series, counts: Sequence[int], sign: float, floor: float) -> list[float]:
    """Return what the first point would be, had the signal grown in proportion to time up to each block."""
    envelope, explained = -HUGE, list[float]()
    for size, count, level in zip(series.sizes, counts, series.levels, strict=True):
        envelope = max(envelope - size / FORGET_POINTS, sign * level, floor)
        explained.append(envelope - math.log(count - (size - 1) / 2))
    return explained


def fall(series: Series, top: float, calm: float, points: int) -> Shift:
    """Return the fall of a signal in its own unit from `top`; at `calm` and over it, it was itself."""
    by = top - series.sustained(-1.0, points)
    return _dated(series, _counts(series), [-level for level in series.levels], by, -1.0, -calm)


def rise(series: Series, calm: float, points: int) -> Shift:
    """Return the rise of a signal in its own unit over `calm`; at that and under it, it was itself."""
    by = series.sustained(1.0, points) - calm
    return _dated(series, _counts(series), series.levels, by, 1.0, calm)


def _dated(
    series: Series, counts: list[int], levels: Sequence[float], by: float, sign: float, calm: float
) -> Shift:
    """Say when the signal left `calm`: after it was last there or, if earlier, since it is mostly above."""
    edge = calm + EDGE_SHARE * by
    last, above, seen = -1, 0, 0
    since = len(levels)
    for i in range(len(levels) - 1, -1, -1):
        seen += series.sizes[i]
        if levels[i] > edge:
            above += series.sizes[i]
            since = i if above >= MOSTLY * seen else since
        elif last < 0 and levels[i] <= calm:
            last = i
    last = min(last, since - 1)
    if last < 0:
        return Shift(by, sign * calm, 0, 0, series.points)
    there = calm + (1 - EDGE_SHARE) * by
    arrived = next((counts[i] for i in range(last + 1, len(levels)) if levels[i] >= there), series.points)
    before = bisect_right(counts, counts[last] - DOUBT_POINTS - DOUBT_SHARE * (arrived - counts[last])) - 1
    onset = series.ends[before] if before >= 0 else 0
    return Shift(by, sign * calm, series.ends[last], onset, series.points - counts[last])


def _counts(series: Series) -> list[int]:
    """How many points there were up to the end of each block."""
    return [*accumulate(series.sizes)]


def _with_block(
    past: tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]], step: int, level: float
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
    """Add a block of one point; of too many of one size the two oldest become one. Sizes never grow with time."""
    sizes, ends, levels = [*past[0], 1], [*past[1], step], [*past[2], _short(level)]
    at = len(sizes) - 1
    while at - (first := sizes.index(sizes[at])) >= BLOCKS_OF_A_SIZE:
        sizes[first : first + 2] = [2 * sizes[first]]
        levels[first : first + 2] = [_short((levels[first] + levels[first + 1]) / 2)]
        del ends[first]
        at = first
    return tuple(sizes), tuple(ends), tuple(levels)


def _median(values: Sequence[float]) -> float:
    """The middle one, of an even number the lower."""
    return sorted(values)[(len(values) - 1) // 2]


def _short(value: float) -> float:
    """Five digits: what is remembered is written often."""
    return float(f"{value:.5g}")
