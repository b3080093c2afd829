"""All runs, in the order in which they are recorded, and which of them nobody sees before detectors are judged."""

from __future__ import annotations

import itertools

from benchmarks.recordings.diverging import DIVERGING
from benchmarks.recordings.healthy import HEALTHY
from benchmarks.recordings.held_out import HELD_OUT
from benchmarks.recordings.more import LONGER, MORE, SIGNED
from benchmarks.recordings.regime import Regime

REGIMES: dict[str, Regime] = {
    regime.name: regime
    for pair in itertools.zip_longest(HEALTHY, DIVERGING, MORE, LONGER, SIGNED)
    for regime in pair
    if regime is not None
} | {regime.name: regime for regime in HELD_OUT}


def split(regime: Regime) -> str:
    return "unseen" if regime in HELD_OUT else "seen"
