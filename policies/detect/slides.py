"""Slow slides: losses of reward that are smaller than the noise of single points.

The reward of one prompt a step is 0 or 1: a few points show nothing, sixty do. So windows of growing length are
compared with the best earlier window of the same length. A loss must exceed the noise of means of that length,
which is estimated from the run's own blocks. A reward alone proves nothing here either: the text of the
completions must have changed with it, or KL must exceed what the past explains.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from grpo_orch.policies.detect.signals import PAST_POINTS, Series, dated, noise_of_mean, resolution
from grpo_orch.policies.detect.symptoms import (
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

# Signals that change with the text of completions. Harder prompts also cause cut answers, equal groups and other
# gradients, but not answers of three times the length.
WRITTEN = tuple(signal for signal in SIGNALS if signal.name in (ENTROPY, LENGTH, SAMPLING))


@dataclass(frozen=True, slots=True)
class Slide:
    """A window whose reward is surely lower than that of the best earlier window of the same length.

    `best` and `now` are the means of both; `onset_step` is in the middle of the best window. The window from
    `still_from` to `still_until` is the last that was not surely lower. The last window begins after `now_from`.
    `window` is the length in points; `points` counts the points after `still_until`.
    """

    best: float
    now: float
    onset_step: int
    still_from: int
    still_until: int
    now_from: int
    window: int
    points: int


def slide_symptoms(series: Mapping[str, Series]) -> tuple[Symptom, ...]:
    """Return the symptom of a reward that has slid, followed by those of changed completions.

    They are those of the shortest window with changed completions, else of the shortest window of at least
    LASTING_POINTS.
    """
    reward_only: tuple[Symptom, ...] = ()
    for slide in slides_of(series[REWARD]) if REWARD in series else ():
        text = (
            f"{REWARD} {slide.now:.3g} over {slide.window} points, {slide.best:.3g} up to step {slide.still_until}"
        )
        lead = Symptom(REWARD, text, slide.onset_step, slide.still_until, slide.points)
        changed = (_changed_signal(signal, series.get(signal.name), slide) for signal in WRITTEN)
        found = (lead, *(sign for sign in changed if sign is not None))
        if len(found) > 1:
            return found
        if slide.window >= LASTING_POINTS:
            reward_only = reward_only or found
    return reward_only


def slides_of(series: Series) -> Iterator[Slide]:
    """Yield the sure slides, the shortest window first; none if the reward rises again."""
    sums = _Sums(series)
    found = (sums.slide(window) for window in sums.windows())
    return (slide for slide in found if slide is not None)


class _Sums:
    """Prefix sums over the blocks of a series, for means over any range of them."""

    def __init__(self, series: Series) -> None:
        self._series = series
        self._noise = noise_of_mean(series, 1)
        self._start = math.inf if series.start is None else series.start
        self._ends = (0, *series.ends)
        self._counts = [0, *accumulate(series.sizes)]
        self._sums = [0.0, *accumulate(s * level for s, level in zip(series.sizes, series.levels, strict=True))]

    def windows(self) -> Iterator[int]:
        """Yield doubling window lengths that fit three times into the series.

        A short log has a single window of half of LASTING_POINTS.
        """
        window = LASTING_POINTS if self._counts[-1] >= 3 * LASTING_POINTS else LASTING_POINTS // 2
        while 3 * window <= self._counts[-1]:
            yield window
            window *= 2

    def slide(self, window: int) -> Slide | None:
        """Compare the last window with the best earlier one, at most PAST_POINTS / LASTING_POINTS windows back."""
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
        present = max(now, self._mean(self._first_within(LASTING_POINTS), last))
        noise = self._noise / math.sqrt(window)
        least = max(2 * SURE_WOBBLES * noise, (best - lowest) / 2, resolution(best))
        if best - present <= least or self._rises(best_end):
            return None
        still = best - max(SURE_WOBBLES * noise, (best - present) / 5)
        _, late, late_end = next(earlier for earlier in reversed(before) if earlier[0] >= still)
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
        """Return whether the last points are surely higher than the lowest block since block `since`."""
        levels = self._series.levels
        lowest = levels.index(min(levels[since:]), since)
        return gained_wobbles(self._series, self._series.ends[lowest]) >= SURE_WOBBLES

    def _first_within(self, points: int) -> int:
        """Return the first of the last blocks that hold `points` points, or the first of all."""
        return max(bisect_right(self._counts, self._counts[-1] - points) - 1, 0)

    def _mean(self, first: int, end: int) -> float:
        return (self._sums[end] - self._sums[first]) / (self._counts[end] - self._counts[first])


def _changed_signal(signal: Signal, series: Series | None, slide: Slide) -> Symptom | None:
    """Return the symptom of a signal that surely changed, by FACTOR or more, with the slide and not before it."""
    if series is None:
        return None
    then, now = (
        _level(series, slide.still_from, slide.still_until),
        _level(series, slide.now_from, series.ends[-1]),
    )
    if then is None or now is None:
        return None
    by = signal.sign * (now - then)
    if by < max(math.log(FACTOR), 2 * SURE_WOBBLES * noise_of_mean(series, slide.window)):
        return None
    shift = dated(series, signal.sign, max(signal.sign * (series.sustained(signal.sign) - then), math.log(FACTOR)))
    if shift.points > slide.points + LASTING_POINTS:
        return None
    level, before = natural(signal, now), natural(signal, then)
    text = f"{signal.words} {level:.3g}, {as_factor(level, before)} its {before:.3g} before"
    return Symptom(signal.group, text, min(shift.onset_step, slide.onset_step), shift.calm_step, shift.points)


def _level(series: Series, after_step: int, until_step: int) -> float | None:
    """Return the mean level in these steps, None if nothing was logged."""
    blocks = zip(series.sizes, series.levels, series.ends, strict=True)
    inside = [(size, level) for size, level, end in blocks if after_step < end <= until_step]
    return sum(size * level for size, level in inside) / sum(size for size, _ in inside) if inside else None
