"""Robust statistics of one logged signal: where it is now, what its own past explains, and since when it does not.

What trainers log has heavy tails: TRL's KL estimate is exponential in a single token, so points of 10 to 1,000
times the level come and go, two or three in a row. Nothing here is a mean of raw values: the present is an order
statistic of the last points, the past is made of running medians, kept finer the newer they are, so that what is
remembered stays small and the time of a change is known to a share of its age.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

# Points. The present: all but OUTLIERS of them must say so. Spikes of the KL come in twos and threes.
WINDOW_POINTS = 7
OUTLIERS = 2
# Points. What a run has lived with for so long is its own past: an adapter's KL of 0.5, a bump in the beginning.
PAST_POINTS = 100
# Of the time that a change took: so much earlier it may have begun. Slow ramps need it.
DOUBT_SHARE = 0.75
# After six of one size two become one: a block is at most a sixth of its age, and 10,000 points are 70 blocks.
BLOCKS_OF_A_SIZE = 6
HUGE = 1e30  # values beyond count as this, so that differences stay finite


@dataclass(frozen=True, slots=True)
class Series:
    """What is remembered of one signal.

    `recent` are its last WINDOW_POINTS values. The past is in blocks, oldest first: how many points lie in it, the
    step of the last of them, and the mean of their running medians. `wobble` is the mean distance of a value from
    its true level, told from second differences, in which no trend is.
    """

    points: int = 0
    recent: tuple[float, ...] = ()
    sizes: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    levels: tuple[float, ...] = ()
    start: float | None = None  # the median of the first three
    wobble: float = 0.0

    def sustained(self, sign: float) -> float:
        """What all but OUTLIERS of the last points reach (sign 1) or stay under (-1); while there are too few,
        so far off that nothing follows from it."""
        if len(self.recent) < WINDOW_POINTS:
            return -sign * HUGE
        return sorted(self.recent, reverse=sign < 0)[OUTLIERS]

    def level_at(self, step: int) -> float:
        """The level at an earlier step."""
        return next(
            (level for end, level in zip(self.ends, self.levels, strict=True) if end >= step), self.levels[-1]
        )


@dataclass(frozen=True, slots=True)
class Shift:
    """The level that a signal has left, and when it was last seen there.

    `onset_step` is the first step that the shift may have touched, with what is not known of it on the early side.
    """

    calm: float
    calm_step: int
    onset_step: int
    points: int  # since it was last seen there


def follow_series(series: Series, step: int, value: float) -> Series:
    """Return the series after one more finite value."""
    value = min(max(value, -HUGE), HUGE)
    recent, points = (*series.recent, value)[-WINDOW_POINTS:], series.points + 1
    middle, wobble = median(recent), series.wobble
    if points >= WINDOW_POINTS:
        # A wild one counts as three times the usual.
        off = abs(recent[-1] - 2 * recent[-2] + recent[-3]) / math.sqrt(6)
        off = min(off, 3 * wobble) if wobble and points > 3 * WINDOW_POINTS else off
        wobble = _short(wobble + (off - wobble) / min(points - WINDOW_POINTS + 1, PAST_POINTS))
    start = middle if points == 3 else series.start
    return Series(points, recent, *_with_block(series, step, middle), start, wobble)


def explained(series: Series, sign: float, *, concave: bool = True) -> float:
    """Return the level that the past explains, in the direction of `sign`; concave: of a logarithm.

    A positive signal that grows from nothing in a concave way, as the KL of a healthy run does, is at its point n
    at most n/m times what it was at its point m, for every m. What the lowest few of these allow is explained.
    """
    count, past = series.points, list[tuple[float, int]]()
    for i in range(len(series.levels) - 1, -1, -1):
        if series.points - count >= PAST_POINTS:
            break
        grown = math.log(series.points / (count - (series.sizes[i] - 1) / 2)) if concave else 0.0
        past.append((sign * series.levels[i] + grown, series.sizes[i]))
        count -= series.sizes[i]
    below = (series.points - count) / 10
    for level, size in sorted(past):
        below -= size
        if below <= 0:
            return sign * level
    return sign * HUGE


def dated(series: Series, sign: float, by: float, *, ramp: bool = True) -> Shift:
    """Say since when a signal is beyond the level `by` under where it is now: the change that fits best.

    Each point votes for or against having changed, with how far it is beyond a fifth of the way and no more than
    that, so that what swings is not back at each trough. A logarithm's ramp that began before the past that was
    looked at is followed down.
    """
    present = sign * series.sustained(sign)
    levels, counts = [sign * level for level in series.levels], [0, *accumulate(series.sizes)]
    calm, first = present - by, 0
    for _ in range(len(levels)):
        first = _changed_at(levels, series.sizes, calm, present, ramp=ramp)
        before = max(1, 2 * counts[first] - series.points)
        earlier = [i for i in range(first) if counts[i + 1] >= before]
        lowest = min((levels[i] for i in earlier), default=calm)
        if not ramp or calm - lowest - math.log(max(counts[first], 1) / before) <= (present - calm) / 4:
            break
        calm = lowest
    there = calm + 3 / 4 * (present - calm)
    arrived = next((counts[i] for i in range(first, len(levels)) if levels[i] >= there), series.points)
    # A running median is of the middle of its window.
    latest = counts[first] - WINDOW_POINTS // 2 - 1 - DOUBT_SHARE * (arrived - counts[first])
    onset = max((end for end, count in zip(series.ends, counts[1:], strict=True) if count <= latest), default=0)
    seen = series.ends[first - 1] if first else 0
    return Shift(sign * calm, seen, onset, series.points - counts[first])


def around(series: Series, points: int) -> tuple[float, float]:
    """Return the mean levels of as many points before the last ones, and of these; of PAST_POINTS at most."""
    width, count = min(points, PAST_POINTS), 0
    sums, weights = [0.0, 0.0], [0, 0]
    for size, level in zip(reversed(series.sizes), reversed(series.levels), strict=True):
        if count >= 2 * width and weights[0]:
            break
        side = int(count < width)
        sums[side] += size * level
        weights[side] += size
        count += size
    return sums[0] / max(weights[0], 1), sums[1] / max(weights[1], 1)


def lucky(series: Series, points: int) -> float:
    """The mean distance of a mean of so many points from its true level: as if they were independent, or as the
    run's own blocks are apart, whichever is more."""
    told: list[float] = []
    for (oldest, older), (_, size) in pairwise(pairwise(series.sizes)):
        if size <= WINDOW_POINTS:
            break
        at = len(told)
        off = abs(series.levels[at + 2] - 2 * series.levels[at + 1] + series.levels[at])
        told.append(off / math.sqrt(1 / oldest + 4 / older + 1 / size))
    return max(series.wobble, median(told) if told else 0.0) / math.sqrt(points)


def _changed_at(levels: Sequence[float], sizes: Sequence[int], calm: float, present: float, *, ramp: bool) -> int:
    """The first block of those at the end that speak most for a change, none of them from before it was calm."""
    most = (present - calm) / 5
    first, votes, best = len(levels), 0.0, 0.0
    for i in range(len(levels) - 1, -1, -1):
        votes += sizes[i] * min(max(levels[i] - calm - most, -most), most)
        if votes > best:
            first, best = i, votes
        elif best - votes > 3 * WINDOW_POINTS * most or (not ramp and levels[i] <= calm):
            break
    return first


def median(values: Sequence[float]) -> float:
    """The middle one, of an even number the lower."""
    return sorted(values)[(len(values) - 1) // 2]


def _with_block(
    series: Series, step: int, level: float
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
    """Add a block of one point; of too many of one size the two oldest become one. Sizes never grow with time."""
    sizes, ends, levels = [*series.sizes, 1], [*series.ends, step], [*series.levels, _short(level)]
    at = len(sizes) - 1
    while at - (first := sizes.index(sizes[at])) >= BLOCKS_OF_A_SIZE:
        sizes[first : first + 2] = [2 * sizes[first]]
        levels[first : first + 2] = [_short((levels[first] + levels[first + 1]) / 2)]
        del ends[first]
        at = first
    return tuple(sizes), tuple(ends), tuple(levels)


def resolution(level: float) -> float:
    """Return the difference below which two levels are equal: they are stored with five digits."""
    return abs(level) / 1e4


def _short(value: float) -> float:
    """Round to five digits, because the state is written often."""
    return float(f"{value:.5g}")
