"""How sure a share or a mean over so many samples is, and the difference of two on the same samples.

All intervals are of 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z = 1.959963984540054  # the normal distribution's 97.5 % point


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its interval."""

    value: float
    low: float
    high: float


def share(count: int, of: int) -> Estimate:
    """`count` of `of` as a share, with Wilson's score interval (JASA 22, 1927, pages 209-212), which also holds
    near 0 and 1. `of` is at least 1."""
    found = count / of
    middle = (found + Z**2 / (2 * of)) / (1 + Z**2 / of)
    half = Z * math.sqrt(found * (1 - found) / of + Z**2 / (4 * of**2)) / (1 + Z**2 / of)
    # Of none and of all one end is the share itself, up to rounding.
    return Estimate(found, min(found, max(0.0, middle - half)), max(found, min(1.0, middle + half)))


def shares_apart(before: Sequence[bool], after: Sequence[bool]) -> Estimate:
    """How much larger the share is in `after` than in `before`, sample by sample the same ones; at least one.

    Newcombe's method 10 for paired proportions (Statistics in Medicine 17, 1998, pages 2635-2650): two of Wilson's
    intervals, joined by how alike the samples came out.
    """
    pairs = list(zip(after, before, strict=True))
    both, gained, lost = pairs.count((True, True)), pairs.count((True, False)), pairs.count((False, True))
    count, neither = len(pairs), len(pairs) - both - gained - lost
    new, old = share(both + gained, count), share(both + lost, count)
    like = _likeness(both, gained, lost, neither)
    value = new.value - old.value
    below = _joined(new.value - new.low, old.high - old.value, like)
    above = _joined(new.high - new.value, old.value - old.low, like)
    return Estimate(value, max(-1.0, value - below), min(1.0, value + above))


def mean(values: Sequence[float]) -> Estimate:
    """The mean with the interval of the central limit theorem, as in arXiv:2411.00640, section 2.1.

    At least one value; of one the interval has no width, for nothing is known of it.
    """
    count = len(values)
    middle = math.fsum(values) / count
    if count == 1:
        return Estimate(middle, middle, middle)
    variance = math.fsum((one - middle) ** 2 for one in values) / (count - 1)
    half = Z * math.sqrt(variance / count)
    return Estimate(middle, middle - half, middle + half)


def means_apart(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """The mean of the differences, sample by sample (arXiv:2411.00640, section 4.2); at least one."""
    return mean([new - old for new, old in zip(after, before, strict=True)])


def _likeness(both: int, gained: int, lost: int, neither: int) -> float:
    """The correlation phi of two columns, corrected for continuity as the method asks."""
    size = (both + gained) * (lost + neither) * (both + lost) * (gained + neither)
    if size == 0:
        return 0.0
    apart = float(both * neither - gained * lost)
    if apart > 0:
        apart = max(0.0, apart - (both + gained + lost + neither) / 2)
    return apart / math.sqrt(size)


def _joined(one: float, other: float, like: float) -> float:
    return math.sqrt(max(0.0, one**2 - 2 * like * one * other + other**2))
