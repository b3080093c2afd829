"""What is journalled of money, of time, and of what money cannot buy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BudgetRefused:
    """No more machines of a role are bought, for they do not fit under the budget. The run goes on."""

    role: str
    reason: str


@dataclass(frozen=True, slots=True)
class BudgetReached:
    """The run stores what it has and stops: no more money is left than that takes."""

    spent_usd: float
    reason: str
    at: str  # pause, down


@dataclass(frozen=True, slots=True)
class BudgetNeared:
    """Four fifths of `budget.usd` are spent. The run goes on."""

    spent_usd: float
    usd: float


@dataclass(frozen=True, slots=True)
class CapacityMissing:
    """There has been no machine of a role for an hour, though one is wanted. It is still asked for."""

    role: str
    since_s: float  # seconds since the epoch
    reason: str


@dataclass(frozen=True, slots=True)
class DeadlineMissed:
    """The deadline has passed, or is out of reach even with the most nodes that there may be. The run goes on.

    `expected_end_s` with so many `nodes`, each step of `step_s`; None before steps were measured.
    """

    deadline_s: float  # seconds since the epoch
    expected_end_s: float | None
    step: int
    steps: int
    nodes: int
    step_s: float | None


@dataclass(frozen=True, slots=True)
class BudgetSet:
    """A user has set another `budget.usd` for this run."""

    usd: float


MoneyEvent = BudgetRefused | BudgetReached | BudgetNeared | CapacityMissing | DeadlineMissed | BudgetSet
