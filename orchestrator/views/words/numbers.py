"""How numbers and times are written for people, the same in every view."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import pairwise

NOT_KNOWN = "–"
_BARS = "▁▂▃▄▅▆▇█"
_LAST_S = 253_402_300_799.0  # the last second of the year 9999: a run that gets on by nothing ends at no time


def written(time_s: float, form: str, *, local: bool = True) -> str:
    """A time in a form of strftime's; one outside the years that calendars have is their first or last moment."""
    within_s = max(0.0, min(time_s, _LAST_S))
    return time.strftime(form, time.localtime(within_s) if local else time.gmtime(within_s))


def clock(time_s: float) -> str:
    """Local time of day, `14:03:59`."""
    return written(time_s, "%H:%M:%S")


def moment(time_s: float) -> str:
    """A day and a time that all read alike, `2026-11-30 18:00 UTC`."""
    return written(time_s, "%Y-%m-%d %H:%M UTC", local=False)


def duration(seconds: float) -> str:
    """`8 s`, `3:07 min`, `2:03 h`, `4.0 d`: two figures that matter, and the unit."""
    seconds = max(0.0, min(seconds, _LAST_S))
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    if whole < 48 * 3600:
        return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
    return f"{seconds / 86400:.1f} d"


def short(value: float | None) -> str:
    """Three significant figures as people write them, `1,240` and `0.00003`; a dash for what is not known."""
    if value is None:
        return NOT_KNOWN
    size = abs(value)
    if size >= 1e9 or 0 < size < 1e-7:
        return f"{value:.3g}"
    if size >= 999.5:
        return f"{value:,.0f}"
    if 0 < size < 1e-4:
        return f"{value:.{2 - math.floor(math.log10(size))}f}".rstrip("0")
    return f"{value:.3g}"


def usd(value: float) -> str:
    """Cents where they matter, four decimals below ten cents."""
    return f"${value:,.2f}" if value >= 0.1 or value == 0 else f"${value:.4f}"


def data_size(size_bytes: int) -> str:
    """`512 B`, `14.2 GiB`."""
    value, units = float(size_bytes), ["KiB", "MiB", "GiB", "TiB"]
    if value < 1024:
        return f"{size_bytes} B"
    while value >= 1024 and units:
        value, unit = value / 1024, units.pop(0)
    return f"{value:.1f} {unit}"


def sparkline(values: Sequence[float], width: int) -> str:
    """At most `width` characters from the lowest to the highest value; neighbours share one by their mean."""
    if not values:
        return ""
    size = max(1.0, len(values) / width)
    count = min(width, len(values))
    bounds = [round(place * size) for place in range(count)] + [len(values)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    if high == low:
        return _BARS[3] * count
    return "".join(_BARS[round((mean - low) / (high - low) * (len(_BARS) - 1))] for mean in means)
