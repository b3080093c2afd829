"""What a run has lived through in one pool: launches, stays, refusals and losses, the newest of each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from policies.model.pools import Pool

KEPT = 32  # launches and stays a pool; older ones count for little
STAYED_S = 3600.0  # a machine that was there for so long shows that the pool holds again
# For so long a machine counts as at risk once its cloud has said so. A replacement serves within half of it, even
# one that takes all of `policies.boot_timeout_s`, so that a loss later on is none that it would have to hurry for;
# and in half an hour 3 % of machines of which nothing was said are taken, too few to be mistaken for foretold.
AT_RISK_S = 1800.0


@dataclass(frozen=True, slots=True)
class Launched:
    """A machine was asked for in the pool, and came or did not."""

    at_s: float
    came: bool


@dataclass(frozen=True, slots=True)
class Stayed:
    """A machine was there until then, for so many hours; the cloud took it, or it was given back."""

    until_s: float
    hours: float
    taken: bool


@dataclass(frozen=True, slots=True)
class PoolRecord:
    """A pool's history, as far as it is kept."""

    pool: Pool
    launches: tuple[Launched, ...] = ()
    stays: tuple[Stayed, ...] = ()
    refused_in_a_row: int = 0  # since it last gave a machine
    refused_at_s: float = 0.0
    taken_in_a_row: int = 0  # each within STAYED_S
    taken_at_s: float = 0.0
    at_risk: tuple[Stayed, ...] = ()  # the same of machines that were said to be at risk, from then on


def refused(record: PoolRecord, asked_at_s: float, time_s: float) -> PoolRecord:
    """Return the record after the pool gave no machine. Requests side by side that it refuses are one in a row."""
    launches = (*record.launches, Launched(time_s, False))[-KEPT:]
    again = not record.refused_in_a_row or asked_at_s >= record.refused_at_s
    count = record.refused_in_a_row + again
    return replace(record, launches=launches, refused_in_a_row=count, refused_at_s=time_s)


def came(record: PoolRecord, time_s: float) -> PoolRecord:
    """Return the record after the pool gave a machine."""
    launches = (*record.launches, Launched(time_s, True))[-KEPT:]
    return replace(record, launches=launches, refused_in_a_row=0)


def stayed(record: PoolRecord, since_s: float, time_s: float, *, taken: bool) -> PoolRecord:
    """Return the record after a machine that came at `since_s` was taken by the cloud, or given back."""
    long_s = max(0.0, time_s - since_s)
    stays = (*record.stays, Stayed(time_s, long_s / 3600, taken))[-KEPT:]
    before = 0 if long_s >= STAYED_S else record.taken_in_a_row
    count, at_s = (before + 1, time_s) if taken else (before, record.taken_at_s)
    return replace(record, stays=stays, taken_in_a_row=count, taken_at_s=at_s)


def risked(record: PoolRecord, since_s: float, time_s: float, *, taken: bool) -> PoolRecord:
    """Return the record after a machine that was said to be at risk at `since_s` was taken, or given back."""
    return replace(record, at_risk=(*record.at_risk, under_risk(since_s, time_s, taken=taken))[-KEPT:])


def under_risk(since_s: float, time_s: float, *, taken: bool) -> Stayed:
    """Return what a machine has shown by then that was said to be at risk at `since_s`. What befalls it after
    AT_RISK_S is not counted as foretold: by then it has lived on."""
    until_s = max(since_s, min(time_s, since_s + AT_RISK_S))
    return Stayed(until_s, (until_s - since_s) / 3600, taken and time_s - since_s < AT_RISK_S)
