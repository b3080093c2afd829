"""Slow slides: what a run loses little by little, within the noise of its points.

A reward of one prompt a step is 0 or 1: of a few points it says nothing, of sixty it does. So windows of growing
length are looked at, each beside the best of its length before it. What counts is more than luck at that length,
which the run's own blocks tell: how far means of so many points are apart for no reason. A reward alone proves
nothing here either; something that is written otherwise has to go with it, or a KL that the past does not explain.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from policies.detect.signals import PAST_POINTS, Series, dated, lucky, resolution
from policies.detect.symptoms import (
    ENTROPY,
    FACTOR,
    LASTING_POINTS,
    LENGTH,
    REWARD,
    SAMPLING,
    SIGNALS,
    SURE_WOBBLES,
    Signal,
    Symptom,
    as_factor,
    gained_wobbles,
    natural,
)

# What is another when other things are written. Harder prompts have more of their answers cut, groups that are
# alike and other gradients; they make no answers of three times the length.
WRITTEN = tuple(signal for signal in SIGNALS if signal.name in (ENTROPY, LENGTH, SAMPLING))


@dataclass(frozen=True, slots=True)
class Slide:
    """A window that is surely lower than the best of its length before it.

    `best` and `now` are their means; `onset_step` is in the middle of the best one. Until `still_until` the reward
    was not surely lower than that, over a window after `still_from`. The last window begins after `now_from`.
    `window` is their length in points; `points` came after `still_until`.
    """

    best: float
    now: float
    onset_step: int
    still_from: int
    still_until: int
    now_from: int
    window: int
    points: int


def slid(series: Mapping[str, Series]) -> tuple[Symptom, ...]:
    """Return the reward's symptom where it has slid, and after it those of what else is written since: of the
    shortest window that has any of those, else of the shortest of LASTING_POINTS or more."""
    alone: tuple[Symptom, ...] = ()
    for slide in slides_of(series[REWARD]) if REWARD in series else ():
        text = (
            f"{REWARD} {slide.now:.3g} over {slide.window} points, {slide.best:.3g} up to step {slide.still_until}"
        )
        lead = Symptom(REWARD, text, slide.onset_step, slide.still_until, slide.points)
        beside = (_beside(signal, series.get(signal.name), slide) for signal in WRITTEN)
        found = (lead, *(one for one in beside if one is not None))
        if len(found) > 1:
            return found
        if slide.window >= LASTING_POINTS:
            alone = alone or found
    return alone


def slides_of(series: Series) -> Iterator[Slide]:
    """The slides that are sure, the shortest window first; none where it rises again."""
    sums = _Sums(series)
    found = (sums.slide(window) for window in sums.windows())
    return (one for one in found if one is not None)


class _Sums:
    """The blocks of a series, to take means over any of them."""

    def __init__(self, series: Series) -> None:
        self._series = series
        self._luck = lucky(series, 1)
        self._start = math.inf if series.start is None else series.start
        self._ends = (0, *series.ends)
        self._counts = [0, *accumulate(series.sizes)]
        self._sums = [0.0, *accumulate(s * level for s, level in zip(series.sizes, series.levels, strict=True))]

    def windows(self) -> Iterator[int]:
        """Lengths, doubling, of which there are three in the series: the best of one is none.

        A short log has one window of half of LASTING_POINTS.
        """
        window = LASTING_POINTS if self._counts[-1] >= 3 * LASTING_POINTS else LASTING_POINTS // 2
        while 3 * window <= self._counts[-1]:
            yield window
            window *= 2

    def slide(self, window: int) -> Slide | None:
        """The last window beside the best before it, of those that are not older than so many windows as what is
        lived with for long."""
        counts, sums, last = self._counts, self._sums, len(self._counts) - 1
        oldest = self._first_within(window + window * PAST_POINTS // LASTING_POINTS)
        now_first, lowest, end = self._first_within(window), self._start, 0
        before = list[tuple[float, int, int]]()
        for first in range(now_first):
            while counts[end] < counts[first] + window:
                end += 1
            if end > now_first:
                break
            level = (sums[end] - sums[first]) / (counts[end] - counts[first])
            if level < lowest:
                lowest = level
            if first >= oldest:
                before.append((level, first, end))
        if not before:
            return None
        (best, best_first, best_end), now = max(before), self._mean(now_first, last)
        there, luck = (
            max(now, self._mean(self._first_within(LASTING_POINTS), last)),
            self._luck / math.sqrt(window),
        )
        least = max(2 * SURE_WOBBLES * luck, (best - lowest) / 2, resolution(best))
        if best - there <= least or self._rises(best_end):
            return None
        still = best - max(SURE_WOBBLES * luck, (best - there) / 5)
        _, late, late_end = next(one for one in reversed(before) if one[0] >= still)
        middle = bisect_right(counts, (counts[best_first] + counts[best_end]) / 2) - 1
        return Slide(
            best=best,
            now=now,
            onset_step=self._ends[middle],
            still_from=self._ends[late],
            still_until=self._ends[late_end],
            now_from=self._ends[now_first],
            window=window,
            points=counts[-1] - counts[late_end],
        )

    def _rises(self, since: int) -> bool:
        """Whether the last points are surely higher than the lowest of those since then."""
        levels = self._series.levels
        lowest = levels.index(min(levels[since:]), since)
        return gained_wobbles(self._series, self._series.ends[lowest]) >= SURE_WOBBLES

    def _first_within(self, points: int) -> int:
        """The first block of the last ones that hold so many points, or all there are."""
        return max(bisect_right(self._counts, self._counts[-1] - points) - 1, 0)

    def _mean(self, first: int, end: int) -> float:
        return (self._sums[end] - self._sums[first]) / (self._counts[end] - self._counts[first])


def _beside(signal: Signal, series: Series | None, slide: Slide) -> Symptom | None:
    """Whether the signal is many times, and surely, what it was while the reward had not surely fallen, and left
    that no earlier."""
    if series is None:
        return None
    then, now = (
        _level(series, slide.still_from, slide.still_until),
        _level(series, slide.now_from, series.ends[-1]),
    )
    if then is None or now is None:
        return None
    by = signal.sign * (now - then)
    if by < max(math.log(FACTOR), 2 * SURE_WOBBLES * lucky(series, slide.window)):
        return None
    shift = dated(series, signal.sign, max(signal.sign * (series.sustained(signal.sign) - then), math.log(FACTOR)))
    if shift.points > slide.points + LASTING_POINTS:
        return None
    level, before = natural(signal, now), natural(signal, then)
    text = f"{signal.words} {level:.3g}, {as_factor(level, before)} its {before:.3g} of then"
    return Symptom(signal.group, text, min(shift.onset_step, slide.onset_step), shift.calm_step, shift.points)


def _level(series: Series, after_step: int, until_step: int) -> float | None:
    """The mean level in these steps, None where none was logged."""
    blocks = zip(series.sizes, series.levels, series.ends, strict=True)
    inside = [(size, level) for size, level, end in blocks if after_step < end <= until_step]
    return sum(size * level for size, level in inside) / sum(size for size, _ in inside) if inside else None
