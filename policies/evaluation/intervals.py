"""Confidence intervals of 95 % for shares and means, and for their differences on the same samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z = 1.959963984540054  # the normal distribution's 97.5 % point


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its confidence interval."""

    value: float
    low: float
    high: float


def share(count: int, of: int) -> Estimate:
    """Return `count` of `of` as a share; `of` must be at least 1.

    Uses Wilson's score interval (JASA 22, 1927, pages 209-212), which is also valid near 0 and 1.
    """
    value = count / of
    middle = (value + Z**2 / (2 * of)) / (1 + Z**2 / of)
    half = Z * math.sqrt(value * (1 - value) / of + Z**2 / (4 * of**2)) / (1 + Z**2 / of)
    # For shares of 0 and 1, one end is the share itself, up to rounding.
    return Estimate(value, min(value, max(0.0, middle - half)), max(value, min(1.0, middle + half)))


def shares_apart(before: Sequence[bool], after: Sequence[bool]) -> Estimate:
    """Return the share in `after` minus the share in `before`, for at least one sample, paired by index.

    Newcombe's method 10 for paired proportions (Statistics in Medicine 17, 1998, pages 2635-2650): two Wilson
    intervals, combined with the correlation of the pairs.
    """
    pairs = list(zip(after, before, strict=True))
    both, gained, lost = pairs.count((True, True)), pairs.count((True, False)), pairs.count((False, True))
    count, neither = len(pairs), len(pairs) - both - gained - lost
    new, old = share(both + gained, count), share(both + lost, count)
    phi = _correlation(both, gained, lost, neither)
    value = new.value - old.value
    below = _combined(new.value - new.low, old.high - old.value, phi)
    above = _combined(new.high - new.value, old.value - old.low, phi)
    return Estimate(value, max(-1.0, value - below), min(1.0, value + above))


def mean(values: Sequence[float | None]) -> Estimate | None:
    """Return the mean of the values that are not None; None if all are.

    Uses the interval of the central limit theorem, as in arXiv:2411.00640, section 2.1. For a single value the
    interval has no width, because the variance is unknown.
    """
    present = [value for value in values if value is not None]
    count = len(present)
    if not count:
        return None
    middle = math.fsum(present) / count
    if count == 1:
        return Estimate(middle, middle, middle)
    variance = math.fsum((value - middle) ** 2 for value in present) / (count - 1)
    half = Z * math.sqrt(variance / count)
    return Estimate(middle, middle - half, middle + half)


def means_apart(before: Sequence[float | None], after: Sequence[float | None]) -> Estimate | None:
    """Return the mean of the paired differences (arXiv:2411.00640, section 4.2), over pairs without a None."""
    pairs = zip(before, after, strict=True)
    return mean([new - old for old, new in pairs if old is not None and new is not None])


def _correlation(both: int, gained: int, lost: int, neither: int) -> float:
    """Return the phi coefficient of the pairs, with the continuity correction of the method."""
    size = (both + gained) * (lost + neither) * (both + lost) * (gained + neither)
    if size == 0:
        return 0.0
    covariance = float(both * neither - gained * lost)
    if covariance > 0:
        covariance = max(0.0, covariance - (both + gained + lost + neither) / 2)
    return covariance / math.sqrt(size)


def _combined(first: float, second: float, phi: float) -> float:
    return math.sqrt(max(0.0, first**2 - 2 * phi * first * second + second**2))
