"""What `doctor` finds, a line each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is there or missing; `told` holds the remedy then. Without a `needed` one nothing starts.

    With a `warning` a run starts, and may cost or lose more than its user knows. `machines`: it tells whether
    machines can be started somewhere.
    """

    what: str
    ok: bool
    needed: bool
    told: str
    warning: bool = False
    machines: bool = False
