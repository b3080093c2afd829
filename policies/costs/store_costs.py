"""An estimate of what a run pays for its store: requests, and bytes that leave a region or a cloud.

Of each step: the policy's bytes as they were sent, fetched by every node; the completions; and a checkpoint's
bytes, divided over the steps between two. Of each machine that joins: the whole policy, of a trainer a checkpoint.
Of each second in which a daemon steers: what daemon, gateway and trainer read, list and write, as counted on a run
in the simulator.

Traffic within a region is free. Bytes that come in are, too, but who sends them may pay: the machines' cloud for
what goes into a store elsewhere, the store's cloud for what machines elsewhere fetch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from policies.costs.list_prices import OWN, store_price
from policies.model.spec import RunSpec
from policies.model.vocabulary import Role
from policies.weights.disks import checkpoint_bytes_each

GB = 10**9
CHUNK_BYTES = 16 * 2**20  # an object of a policy or a checkpoint
TOKEN_BYTES = 16  # of a stored completion, with its log-probability
OBJECTS_A_STEP = 10  # completions, rows, manifests, and what lists them
# Of listings and writes the daemon makes 0.9 a second in a quiet run and up to 1.4 in a parked one, the trainer's
# heartbeat and the gateway's status 1.5; reads are 4 to 6, and 1. Each machine reads the lease once a minute.
CONTROL_PUTS_A_S, CONTROL_GETS_A_S, LEASES_A_S = 3.5, 6.0, 1 / 60
REPORTS_A_S = 1.0  # what the machines say of themselves is looked at so often
LISTED = 1000  # objects of which one request tells
LISTING_READS = 12.5  # that cost what a listing does


@dataclass(frozen=True, slots=True)
class Place:
    """Where a store or a machine is. `cloud`: `r2`, one of list_prices.OWN, a cloud's name, empty where it is not
    known; `region`: empty where it is not."""

    cloud: str
    region: str = ""


@dataclass(frozen=True, slots=True)
class Stored:
    """What a run's steps stored.

    Attributes:
        steps: their number.
        tokens: of their completions.
        sent_bytes: of their policies.
        policy_bytes: of one whole policy; 0 before the first.
    """

    steps: int
    tokens: int
    sent_bytes: float
    policy_bytes: float


AT_HOME = Place("local")


@dataclass(frozen=True, slots=True)
class Use:
    """What was asked of the store."""

    puts: float = 0.0
    gets: float = 0.0
    sent_bytes: float = 0.0
    fetched_bytes: float = 0.0

    def __add__(self, other: Use) -> Use:
        return Use(
            self.puts + other.puts,
            self.gets + other.gets,
            self.sent_bytes + other.sent_bytes,
            self.fetched_bytes + other.fetched_bytes,
        )


@dataclass(frozen=True, slots=True)
class Tariff:
    """USD of a request and of a GB either way; a price that is not known is None, and `why` says why."""

    put_usd: float | None
    get_usd: float | None
    sent_usd_per_gb: float | None
    fetched_usd_per_gb: float | None
    why: str = ""

    def usd(self, use: Use) -> float:
        """Return what it cost; what has no price counts as nothing."""
        requests = use.puts * (self.put_usd or 0.0) + use.gets * (self.get_usd or 0.0)
        sent = use.sent_bytes / GB * (self.sent_usd_per_gb or 0.0)
        return requests + sent + use.fetched_bytes / GB * (self.fetched_usd_per_gb or 0.0)


def tariff_of(store: Place, machine: Place) -> Tariff:
    """Return what a run on such machines pays for such a store."""
    price = store_price(store.cloud)
    if store.cloud in OWN:
        return Tariff(0.0, 0.0, 0.0, 0.0)
    put_usd, get_usd = (None, None) if price is None else (price.put_usd, price.get_usd)
    if not store.cloud or not machine.cloud:
        what = "the machines' cloud is not known" if store.cloud else "its provider is not known"
        return Tariff(put_usd, get_usd, None, None, what)
    if store.cloud == machine.cloud and not (store.region and machine.region):
        return Tariff(put_usd, get_usd, None, None, "whether it is in the machines' region is not known")
    if store == machine:
        return Tariff(put_usd, get_usd, 0.0, 0.0)
    sent, fetched = _leaving(machine, store), _leaving(store, machine)
    unpriced = [one.cloud for one, usd in ((machine, sent), (store, fetched)) if usd is None]
    return Tariff(
        put_usd, get_usd, sent, fetched, f"no price is known of {', '.join(unpriced)}" if unpriced else ""
    )


def of_steps(stored: Stored, nodes: float, spec: RunSpec) -> Use:
    """Return what such steps asked of the store, with so many nodes."""
    save_steps = float(spec.grpo.get("save_steps", 500))
    kept = stored.steps / max(1.0, save_steps) * checkpoint_bytes(stored.policy_bytes, spec)
    completions = stored.tokens * TOKEN_BYTES
    puts = stored.steps * OBJECTS_A_STEP + (stored.sent_bytes + kept) / CHUNK_BYTES
    gets = nodes * stored.sent_bytes / CHUNK_BYTES
    return Use(puts, gets, stored.sent_bytes + kept + completions, nodes * stored.sent_bytes)


def of_fetch(size_bytes: float) -> Use:
    """Return what a machine asks of the store that fetches so much."""
    return Use(gets=size_bytes / CHUNK_BYTES, fetched_bytes=size_bytes)


def are_reports_listed(machines: float) -> bool:
    """Whether what so many machines say of themselves is listed, and read where it has changed: to read each
    report each time would cost more."""
    return machines > LISTING_READS


def of_control(seconds: float, machines: float) -> Use:
    """Return what steering so many machines asks of the store in so many seconds."""
    listed = are_reports_listed(machines)
    puts = CONTROL_PUTS_A_S + REPORTS_A_S * (ceil(machines / LISTED) if listed else 0)
    gets = CONTROL_GETS_A_S + LEASES_A_S * machines + REPORTS_A_S * (0 if listed else machines)
    return Use(puts=puts * seconds, gets=gets * seconds)


def of_run(stored: Stored, machines: Iterable[tuple[Role, float]], wall_s: float, spec: RunSpec) -> Use:
    """Return what a run asked of its store in `wall_s`. `machines`: the role and the hours of each."""
    machines, wall_h = list(machines), max(wall_s / 3600, 1e-9)
    nodes_h = sum(hours for role, hours in machines if role is Role.ROLLOUT)
    use = of_steps(stored, nodes_h / wall_h, spec)
    use += of_control(wall_s, sum(hours for _, hours in machines) / wall_h)
    for role, _ in machines:
        is_trainer = role is Role.TRAINER
        use += of_fetch(checkpoint_bytes(stored.policy_bytes, spec) if is_trainer else stored.policy_bytes)
    return use


def checkpoint_bytes(policy_bytes: float, spec: RunSpec) -> float:
    """Return how large a checkpoint is, from its policy: that has 2 bytes a parameter, of adapters 4."""
    return policy_bytes / (4 if spec.trainer.peft is not None else 2) * checkpoint_bytes_each(spec)


def _leaving(sender: Place, to: Place) -> float | None:
    """USD of a GB from one place to another one."""
    price = store_price(sender.cloud)
    if price is None:
        return None
    return price.to_other_region_usd_per_gb if sender.cloud == to.cloud else price.to_internet_usd_per_gb
