"""What a cloud is to the controller. Every cloud passes the same conformance suite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from policies.model.pools import Pool, PoolOffer
from policies.model.vocabulary import Market, Refusal, Role
from policies.tick.snapshot import Machine


class CloudRefused(Exception):
    """A launch was refused. `refusal` says what a caller can do; `left`: a machine of it is there all the same."""

    def __init__(self, refusal: Refusal, message: str, *, left: bool = False) -> None:
        super().__init__(message)
        self.refusal, self.left = refusal, left


class CloudUnavailable(Exception):
    """The cloud did not answer: nothing is known, try again."""


@dataclass(frozen=True, slots=True)
class Order:
    """One machine and the work to run on it.

    `environment` holds secrets and is never written down; `redaction.NAMES_ENV` in it lists the user's by name.
    """

    node: str
    role: Role
    market: Market
    attempt: int
    environment: dict[str, str] = field(repr=False)
    pool: Pool | None = None  # there and nowhere else; None: wherever run.yaml's resources allow


@dataclass(frozen=True, slots=True)
class Offer:
    """What one machine of a role would be and cost."""

    role: Role
    market: Market
    description: str
    price_usd_per_h: float
    other_market_usd_per_h: float | None = None  # spot, if `market` is on demand; None: not to be had there
    most_usd_per_h: float = 0.0  # of the dearest that it may be
    other_market_most_usd_per_h: float | None = None  # of the dearest there; None: not to be had, or not known


class Cloud(Protocol):
    """Machines of one run, by node id. All calls may block; the controller makes them outside its loop."""

    def machines(self) -> dict[str, Machine]:
        """Every machine of this run that exists or is still on record as lost. Raises CloudUnavailable."""

    def launch(self, order: Order) -> None:
        """See that the machine exists and that attempt `order.attempt` of its work was started.

        Launching twice is launching once. Raises CloudRefused, CloudUnavailable.
        """

    def terminate(self, node: str) -> None:
        """See that the machine is gone and its record cleared. No error when there is none."""

    def confirm(self, node: str) -> None:
        """Have `machines` tell the truth about this machine soon, however long asking the cloud takes.

        Called for a machine that should be up and is not heard from, again and again while it stays silent.
        Raises CloudUnavailable.
        """

    def offers(self) -> list[Offer]:
        """What the run's machines would be, the trainer first."""

    def without_quota(self) -> list[str]:
        """The kinds of machine that would be offered and that the account may not have, a line each.

        Empty also where that cannot be told.
        """

    def pools(self) -> list[PoolOffer]:
        """Where the run's machines may be bought, on either market; empty where there is nothing to choose.

        Raises CloudRefused, CloudUnavailable.
        """

    def log(self, node: str, *, follow: bool) -> Iterator[str]:
        """Lines of the log of a node, of a slot's newest node, or of `daemon`; with `follow`, on as they come.

        Raises KeyError when there is no such log.
        """

    def logged_nodes(self) -> list[str]:
        """Every name that `log` knows."""

    def clean_up(self) -> None:
        """See that nothing is left of what the run's machines shared. Called when none of them is left.

        Raises CloudUnavailable also when something is still there; it may be gone a minute later.
        """

    def close(self) -> None:
        """Stop looking. The machines stay as they are."""
