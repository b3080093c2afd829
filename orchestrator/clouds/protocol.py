"""The interface between the controller and a cloud. Every cloud passes the same conformance suite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from grpo_orch.policies.model.pools import Pool, PoolOffer
from grpo_orch.policies.model.vocabulary import Market, Refusal, Role
from grpo_orch.policies.tick.snapshot import Machine


class CloudRefused(Exception):
    """A launch was refused. `refusal` is the kind of refusal; `machine_exists`: it created a machine anyway."""

    def __init__(self, refusal: Refusal, message: str, *, machine_exists: bool = False) -> None:
        super().__init__(message)
        self.refusal, self.machine_exists = refusal, machine_exists


class CloudUnavailable(Exception):
    """The cloud did not answer. Its state is unknown; retry."""


@dataclass(frozen=True, slots=True)
class LaunchOrder:
    """One machine and the work to run on it.

    `environment` holds secrets and is never stored; its `redaction.NAMES_ENV` lists the names of the user's
    secrets.
    """

    node: str
    role: Role
    market: Market
    attempt: int
    environment: dict[str, str] = field(repr=False)
    pool: Pool | None = None  # the only pool allowed; None: any that run.yaml's resources allow


@dataclass(frozen=True, slots=True)
class Offer:
    """The machine that a role would get, and its price."""

    role: Role
    market: Market
    description: str
    price_usd_per_h: float
    other_market_usd_per_h: float | None = None  # spot, if `market` is on demand; None: unavailable there
    max_usd_per_h: float = 0.0  # of the most expensive candidate
    other_market_max_usd_per_h: float | None = None  # the same there; None: unavailable or unknown


class Cloud(Protocol):
    """Machines of one run, by node id. All calls may block; the controller makes them outside its loop."""

    def machines(self) -> dict[str, Machine]:
        """Return every machine of this run that exists or is recorded as lost. Raises CloudUnavailable."""

    def launch(self, order: LaunchOrder) -> None:
        """Ensure that the machine exists and that attempt `order.attempt` of its work was started.

        Idempotent. Raises CloudRefused, CloudUnavailable.
        """

    def terminate(self, node: str) -> None:
        """Ensure that the machine is gone and its record cleared. No error if it does not exist."""

    def confirm(self, node: str) -> None:
        """Refresh what `machines` returns for this machine, however long the cloud takes to answer.

        Called repeatedly for a machine that should be up and is silent. Raises CloudUnavailable.
        """

    def offers(self) -> list[Offer]:
        """Return the machines that the run would get, the trainer's first."""

    def pools(self) -> list[PoolOffer]:
        """Return the pools of both markets that the run may buy from; empty where there is no choice.

        Raises CloudRefused, CloudUnavailable.
        """

    def log(self, node: str, *, follow: bool) -> Iterator[str]:
        """Yield the log lines of a node, of a slot's newest node, or of `daemon`; `follow` waits for new ones.

        Raises KeyError when there is no such log.
        """

    def logged_nodes(self) -> list[str]:
        """Return every name that `log` accepts."""

    def clean_up(self) -> None:
        """Ensure that nothing remains of what the run's machines shared. Called after the last one is gone.

        Raises CloudUnavailable also when something remains; it may be gone a minute later.
        """

    def close(self) -> None:
        """Stop watching. The machines stay as they are."""
