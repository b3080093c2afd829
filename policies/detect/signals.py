"""Robust statistics of one logged signal: its present level, what its past explains, and when it left its past.

Logged metrics have heavy tails: TRL's KL estimate is exponential in a single token, so outliers of 10 to 1,000
times the level occur, two or three in a row. So no mean of raw values is used: the present is an order statistic
of the last points, the past consists of running medians. Newer medians are kept in finer blocks, so that the state
stays small and the time of a change is known to a share of its age.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

# The present, in points. All but OUTLIERS of them must agree, because KL spikes last two or three points.
WINDOW_POINTS = 7
OUTLIERS = 2
# Points after which a level counts as the run's normal past: an adapter's KL of 0.5, a bump at the start.
PAST_POINTS = 100
# A change may have begun earlier than seen, by this share of the time it took. Needed for slow ramps.
DOUBT_SHARE = 0.75
# When a size has more than six blocks, the two oldest are merged. A block spans at most a sixth of its age, and
# 10,000 points need 70 blocks.
BLOCKS_OF_A_SIZE = 6
HUGE = 1e30  # values are clamped to this, so that differences stay finite


@dataclass(frozen=True, slots=True)
class Series:
    """The stored state of one signal.

    `recent` are its last WINDOW_POINTS values. The past is in blocks, oldest first: `sizes` are their point
    counts, `ends` the step of each block's last point, `levels` the mean of its running medians. `wobble` is the
    mean distance of a value from its true level, estimated from second differences, which contain no trend.
    """

    points: int = 0
    recent: tuple[float, ...] = ()
    sizes: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    levels: tuple[float, ...] = ()
    start: float | None = None  # the median of the first three
    wobble: float = 0.0

    def sustained(self, sign: float) -> float:
        """Return the level that all but OUTLIERS of the last points reach (sign 1) or stay under (sign -1).

        With too few points, it is -HUGE or HUGE, which triggers nothing.
        """
        if len(self.recent) < WINDOW_POINTS:
            return -sign * HUGE
        return sorted(self.recent, reverse=sign < 0)[OUTLIERS]

    def level_at(self, step: int) -> float:
        """Return the level at an earlier step."""
        return next(
            (level for end, level in zip(self.ends, self.levels, strict=True) if end >= step), self.levels[-1]
        )


@dataclass(frozen=True, slots=True)
class Shift:
    """The calm level that a signal has left, and when it was last seen there.

    `onset_step` is the first step that the shift may have affected; its uncertainty is on the early side.
    """

    calm: float
    calm_step: int
    onset_step: int
    points: int  # since `calm_step`


def follow_series(series: Series, step: int, value: float) -> Series:
    """Return the series after another finite value."""
    value = min(max(value, -HUGE), HUGE)
    recent, points = (*series.recent, value)[-WINDOW_POINTS:], series.points + 1
    middle, wobble = median(recent), series.wobble
    if points >= WINDOW_POINTS:
        # Outliers are clamped to three times the usual.
        distance = abs(recent[-1] - 2 * recent[-2] + recent[-3]) / math.sqrt(6)
        distance = min(distance, 3 * wobble) if wobble and points > 3 * WINDOW_POINTS else distance
        wobble = _rounded(wobble + (distance - wobble) / min(points - WINDOW_POINTS + 1, PAST_POINTS))
    start = middle if points == 3 else series.start
    return Series(points, recent, *_with_block(series, step, middle), start, wobble)


def explained(series: Series, sign: float, *, concave: bool = True) -> float:
    """Return the level that the past explains, in the direction of `sign`. Use `concave` for a logarithm.

    A positive signal with concave growth from 0, as the KL of a healthy run, is at point n at most n/m times its
    value at point m, for every m. The result is the bound from the lowest tenth of these points.
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
    """Return when a signal left the level that is `by` below its present one: the change that fits best.

    Each point votes for or against a change, with its distance from a fifth of the way. Votes are capped at that
    fifth, so that an oscillating signal does not count as calm at each trough. For a logarithm, a ramp that began
    before the examined past is followed down (`ramp`).
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
    three_quarters = calm + 3 / 4 * (present - calm)
    arrived = next((counts[i] for i in range(first, len(levels)) if levels[i] >= three_quarters), series.points)
    # A running median describes the middle of its window.
    latest = counts[first] - WINDOW_POINTS // 2 - 1 - DOUBT_SHARE * (arrived - counts[first])
    onset = max((end for end, count in zip(series.ends, counts[1:], strict=True) if count <= latest), default=0)
    seen = series.ends[first - 1] if first else 0
    return Shift(sign * calm, seen, onset, series.points - counts[first])


def around(series: Series, points: int) -> tuple[float, float]:
    """Return the mean levels of the points before the last `points`, and of these; at most PAST_POINTS each."""
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


def noise_of_mean(series: Series, points: int) -> float:
    """Return the mean distance of a mean of `points` points from its true level.

    It is the larger of two estimates: for independent points, and from the differences of the run's own blocks.
    """
    distances: list[float] = []
    for (oldest, older), (_, size) in pairwise(pairwise(series.sizes)):
        if size <= WINDOW_POINTS:
            break
        at = len(distances)
        distance = abs(series.levels[at + 2] - 2 * series.levels[at + 1] + series.levels[at])
        distances.append(distance / math.sqrt(1 / oldest + 4 / older + 1 / size))
    return max(series.wobble, median(distances) if distances else 0.0) / math.sqrt(points)


def _changed_at(levels: Sequence[float], sizes: Sequence[int], calm: float, present: float, *, ramp: bool) -> int:
    """Return the first of the last blocks with the most votes for a change, none of them before a calm time."""
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
    """Return the median, the lower of two middle values."""
    return sorted(values)[(len(values) - 1) // 2]


def _with_block(
    series: Series, step: int, level: float
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
    """Add a block of one point, and merge the two oldest of a size that has too many. Older blocks are larger."""
    sizes, ends, levels = [*series.sizes, 1], [*series.ends, step], [*series.levels, _rounded(level)]
    at = len(sizes) - 1
    while at - (first := sizes.index(sizes[at])) >= BLOCKS_OF_A_SIZE:
        sizes[first : first + 2] = [2 * sizes[first]]
        levels[first : first + 2] = [_rounded((levels[first] + levels[first + 1]) / 2)]
        del ends[first]
        at = first
    return tuple(sizes), tuple(ends), tuple(levels)


def resolution(level: float) -> float:
    """Return the difference below which two levels are equal; levels are stored with five digits."""
    return abs(level) / 1e4


def _rounded(value: float) -> float:
    """Round to five digits, because the state is stored often."""
    return float(f"{value:.5g}")
