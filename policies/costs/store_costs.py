"""Estimate the cost of a run's store: requests, and traffic out of a region or a cloud.

Each step counts the policy's bytes as sent and as fetched by every node, the completions, and a share of a
checkpoint's bytes. Each machine that joins counts a whole policy, or a checkpoint for a trainer. Each second with
a daemon counts the reads, listings and writes of daemon, gateway and trainer, as counted in a simulated run.

Traffic within a region is free, and so are incoming bytes, but their sender may pay: the machines' cloud for
uploads to a store elsewhere, the store's cloud for downloads by machines elsewhere. List prices of 2025 for US
regions; a price that is not listed is unknown (None), never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil

from grpo_orch.policies.costs.disks import OWN
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.model.vocabulary import Role
from grpo_orch.policies.weights.disk_sizes import checkpoint_bytes_each

GB = 10**9
CHUNK_BYTES = 16 * 2**20  # an object of a policy or a checkpoint
TOKEN_BYTES = 16  # of a stored completion, with its log-probability
OBJECTS_PER_STEP = 10  # completions, rows, manifests, and what lists them
# Listings and writes a second: 0.9 by the daemon in a quiet run and up to 1.4 in a parked one, 1.5 by the
# trainer's heartbeat and the gateway's status. Reads: 4 to 6, and 1. Each machine reads the lease once a minute.
CONTROL_PUTS_PER_S, CONTROL_GETS_PER_S, LEASES_PER_S = 3.5, 6.0, 1 / 60
REPORTS_PER_S = 1.0  # how often the machines' reports are checked
LISTED = 1000  # objects in one listing
LISTING_READS = 12.5  # reads that cost as much as a listing


@dataclass(frozen=True, slots=True)
class StorePrice:
    """Prices of a store: requests that write or list, requests that read, a GB sent out of the region or of the
    cloud, and a GB stored for a month. Incoming bytes are free everywhere."""

    put_usd: float
    get_usd: float
    to_other_region_usd_per_gb: float
    to_internet_usd_per_gb: float
    usd_per_gb_month: float


# AWS S3, Google Cloud Storage, Azure's hot tier and Cloudflare's R2, each in its standard class.
_STORES: Mapping[str, StorePrice] = {
    "aws": StorePrice(5e-6, 4e-7, 0.02, 0.09, 0.023),
    "gcp": StorePrice(5e-6, 4e-7, 0.02, 0.12, 0.02),
    "azure": StorePrice(5e-6, 4e-7, 0.02, 0.087, 0.018),
    "r2": StorePrice(4.5e-6, 3.6e-7, 0.0, 0.0, 0.015),
}


def store_price(cloud: str) -> StorePrice | None:
    """Return the prices of a cloud's store and traffic; None if they are not listed."""
    return StorePrice(0.0, 0.0, 0.0, 0.0, 0.0) if cloud in OWN else _STORES.get(cloud)


@dataclass(frozen=True, slots=True)
class Location:
    """The location of a store or a machine.

    `cloud`: `r2`, one of disks.OWN, or a cloud's name; empty: unknown. `region`: empty: unknown.
    """

    cloud: str
    region: str = ""


@dataclass(frozen=True, slots=True)
class Stored:
    """The data that a run's steps stored.

    Attributes:
        steps: number of steps.
        tokens: of their completions.
        sent_bytes: of their policies.
        policy_bytes: of one whole policy; 0 before the first.
    """

    steps: int
    tokens: int
    sent_bytes: float
    policy_bytes: float


SAME_REGION = Location("local")


@dataclass(frozen=True, slots=True)
class Usage:
    """Requests to the store and their traffic."""

    puts: float = 0.0
    gets: float = 0.0
    sent_bytes: float = 0.0
    fetched_bytes: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.puts + other.puts,
            self.gets + other.gets,
            self.sent_bytes + other.sent_bytes,
            self.fetched_bytes + other.fetched_bytes,
        )


@dataclass(frozen=True, slots=True)
class Tariff:
    """USD of a request and of a GB in each direction. An unknown price is None, for the `reason`."""

    put_usd: float | None
    get_usd: float | None
    sent_usd_per_gb: float | None
    fetched_usd_per_gb: float | None
    reason: str = ""

    def usd(self, use: Usage) -> float:
        """Return the cost; unknown prices count as 0."""
        requests = use.puts * (self.put_usd or 0.0) + use.gets * (self.get_usd or 0.0)
        sent = use.sent_bytes / GB * (self.sent_usd_per_gb or 0.0)
        return requests + sent + use.fetched_bytes / GB * (self.fetched_usd_per_gb or 0.0)


def tariff_of(store: Location, machine: Location) -> Tariff:
    """Return the prices that a run on machines there pays for the store."""
    price = store_price(store.cloud)
    if store.cloud in OWN:
        return Tariff(0.0, 0.0, 0.0, 0.0)
    put_usd, get_usd = (None, None) if price is None else (price.put_usd, price.get_usd)
    if not store.cloud or not machine.cloud:
        reason = "the machines' cloud is unknown" if store.cloud else "its provider is unknown"
        return Tariff(put_usd, get_usd, None, None, reason)
    if store.cloud == machine.cloud and not (store.region and machine.region):
        return Tariff(put_usd, get_usd, None, None, "it is unknown whether it is in the machines' region")
    if store == machine:
        return Tariff(put_usd, get_usd, 0.0, 0.0)
    sent, fetched = _leaving(machine, store), _leaving(store, machine)
    unpriced = [place.cloud for place, usd in ((machine, sent), (store, fetched)) if usd is None]
    return Tariff(
        put_usd, get_usd, sent, fetched, f"the prices of {', '.join(unpriced)} are unknown" if unpriced else ""
    )


def usage_of_steps(stored: Stored, nodes: float, spec: RunSpec) -> Usage:
    """Return the use by these steps with `nodes` nodes."""
    save_steps = float(spec.grpo.get("save_steps", 500))
    kept = stored.steps / max(1.0, save_steps) * checkpoint_bytes(stored.policy_bytes, spec)
    completions = stored.tokens * TOKEN_BYTES
    puts = stored.steps * OBJECTS_PER_STEP + (stored.sent_bytes + kept) / CHUNK_BYTES
    gets = nodes * stored.sent_bytes / CHUNK_BYTES
    return Usage(puts, gets, stored.sent_bytes + kept + completions, nodes * stored.sent_bytes)


def usage_of_fetch(size_bytes: float) -> Usage:
    """Return the use by a machine that fetches `size_bytes`."""
    return Usage(gets=size_bytes / CHUNK_BYTES, fetched_bytes=size_bytes)


def are_reports_listed(machines: float) -> bool:
    """Whether to list the reports of this many machines and read only changed ones, which costs less than reading
    each."""
    return machines > LISTING_READS


def usage_of_control(seconds: float, machines: float) -> Usage:
    """Return the use by the control of `machines` machines for `seconds`."""
    are_listed = are_reports_listed(machines)
    puts = CONTROL_PUTS_PER_S + REPORTS_PER_S * (ceil(machines / LISTED) if are_listed else 0)
    gets = CONTROL_GETS_PER_S + LEASES_PER_S * machines + REPORTS_PER_S * (0 if are_listed else machines)
    return Usage(puts=puts * seconds, gets=gets * seconds)


def usage_of_run(stored: Stored, machines: Iterable[tuple[Role, float]], wall_s: float, spec: RunSpec) -> Usage:
    """Return the use by a run in `wall_s`. `machines`: the role and the hours of each."""
    machines, wall_h = list(machines), max(wall_s / 3600, 1e-9)
    nodes_h = sum(hours for role, hours in machines if role is Role.ROLLOUT)
    use = usage_of_steps(stored, nodes_h / wall_h, spec)
    use += usage_of_control(wall_s, sum(hours for _, hours in machines) / wall_h)
    for role, _ in machines:
        is_trainer = role is Role.TRAINER
        use += usage_of_fetch(checkpoint_bytes(stored.policy_bytes, spec) if is_trainer else stored.policy_bytes)
    return use


def checkpoint_bytes(policy_bytes: float, spec: RunSpec) -> float:
    """Return a checkpoint's size from that of its policy, which has 2 bytes a parameter, or 4 for adapters."""
    return policy_bytes / (4 if spec.trainer.peft is not None else 2) * checkpoint_bytes_each(spec)


def _leaving(sender: Location, to: Location) -> float | None:
    """Return the USD of a GB from one place to another."""
    price = store_price(sender.cloud)
    if price is None:
        return None
    return price.to_other_region_usd_per_gb if sender.cloud == to.cloud else price.to_internet_usd_per_gb
