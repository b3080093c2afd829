"""Where a run's store is, and which of two ways to read the machines' reports costs less."""

from __future__ import annotations

from dataclasses import dataclass

GB = 10**9
LISTING_READS = 12.5  # reads that cost as much as a listing


@dataclass(frozen=True, slots=True)
class Location:
    """The location of a store or a machine.

    `cloud`: `r2`, one of list_prices.OWN, or a cloud's name; empty: unknown. `region`: empty: unknown.
    """

    cloud: str
    region: str = ""


def are_reports_listed(machines: float) -> bool:
    """Whether to list the reports of this many machines and read only changed ones, which costs less than reading
    each."""
    return machines > LISTING_READS
