"""`grpo-orch doctor`: what is there for a run and what is missing, each with its remedy; no machine is bought."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Protocol
from urllib.parse import urlsplit

import typer
from rich.table import Table
from rich.text import Text

from checkpoint.store.bucket import BucketRules, rules_of
from checkpoint.store.errors import StoreError
from checkpoint.store.probe import probe
from checkpoint.store.run_store import Store
from checkpoint.stream.catalog import Catalog
from checkpoint.stream.upkeep import missing_objects
from orchestrator.cli.options import AsJson, Output, Stop, console, errors, print_json
from orchestrator.cli.target import open_store
from orchestrator.clouds.local import node_python
from orchestrator.clouds.protocol import CloudRefused, CloudUnavailable
from orchestrator.clouds.sky.cloud import zero_quota
from orchestrator.clouds.sky.records import ApiServer, CloudCheck, SkyOffer
from orchestrator.config.load import load_spec, load_storage
from orchestrator.config.shorthand import Storage
from policies.fleet.market import market_of
from policies.model import exit_codes
from policies.model.spec import RunSpec
from policies.model.vocabulary import Market, Role


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


INSTALL = "pip install 'grpo-orch[sky]' 'skypilot[aws]==0.14.1' (or gcp, azure, kubernetes for aws)"


class SkyPilotLike(Protocol):
    """What is asked of SkyPilot; see `orchestrator.clouds.sky.skypilot`."""

    def server(self) -> ApiServer: ...
    def clouds(self) -> list[CloudCheck]: ...
    def offers(self, resources: dict[str, Any], *, spot: bool) -> list[SkyOffer]: ...
    def has_quota(self, offer: SkyOffer) -> bool: ...


def doctor(
    run_yaml: Annotated[Path | None, typer.Argument(help="Look at what this run needs, too.")] = None,
    output: AsJson = Output.TEXT,
) -> None:
    """Say which clouds, machines, rights and environments are there, and how to get what is missing."""
    spec = load_spec(run_yaml) if run_yaml else None
    with errors.status("asking SkyPilot and its clouds"):
        findings = list(examine(spec, skypilot_version(), _open_skypilot))
        if run_yaml:
            findings.extend(examine_store(load_storage(run_yaml)))
    if output is Output.JSON:
        print_json({"usable": is_usable(findings), "findings": [asdict(finding) for finding in findings]})
    else:
        console.print(_table(findings))
    if not is_usable(findings):
        missing = [finding.what for finding in findings if finding.needed and not finding.ok]
        raise Stop(f"missing: {', '.join(missing) or 'a cloud or a node environment'}", exit_codes.FAILED)


def examine(
    spec: RunSpec | None, version: str | None, open_skypilot: Callable[[], SkyPilotLike]
) -> Iterator[Finding]:
    """Look at SkyPilot, its clouds and their offers, and at the node environment of this machine.

    What the run does not use is not needed; without a run nothing is.
    """
    needs_sky, needs_local = (spec is not None and spec.cloud == name for name in ("sky", "local"))
    yield _node_environment(needs_local)
    if version is None:
        yield Finding("SkyPilot", False, needs_sky, INSTALL)
        return
    yield Finding("SkyPilot", True, needs_sky, version)
    if needs_local:
        return  # asking clouds takes long, and may start an API server, for nothing
    skypilot = open_skypilot()
    try:
        server = skypilot.server()
        yield Finding("API server", True, needs_sky, f"{server.endpoint}, version {server.version}")
        checks = skypilot.clouds()
    except CloudUnavailable as error:
        yield Finding("API server", False, needs_sky, str(error))
        return
    yield from (
        Finding(f"cloud {one.name}", one.enabled, False, one.reason or "enabled", machines=True) for one in checks
    )
    if spec is not None:
        for role, resources in ((Role.TRAINER, spec.trainer.resources), (Role.ROLLOUT, spec.rollout.resources)):
            yield from (_machine(skypilot, role, resources, market, market_of(role, spec)) for market in Market)


def is_usable(findings: list[Finding]) -> bool:
    """Whether the run can start; without one, whether some run could: here or on a cloud."""
    if any(finding.needed for finding in findings):
        return all(finding.ok for finding in findings if finding.needed)
    return any(finding.ok for finding in findings if finding.machines)


def skypilot_version() -> str | None:
    """The installed SkyPilot's version. It is not imported: that takes seconds."""
    try:
        return metadata.version("skypilot")
    except metadata.PackageNotFoundError:
        return None


def _open_skypilot() -> SkyPilotLike:
    from orchestrator.clouds.sky.skypilot import SkyPilot  # seconds, and only where it is installed

    return SkyPilot()


def _node_environment(needed: bool) -> Finding:
    try:
        return Finding("node environment", True, needed, node_python(), machines=True)
    except CloudRefused as error:
        return Finding("node environment", False, needed, str(error), machines=True)


def _machine(
    skypilot: SkyPilotLike, role: Role, resources: dict[str, Any], market: Market, wanted: Market
) -> Finding:
    what = f"{role} {market.replace('_', ' ')}"
    needed = market is wanted
    try:
        offers = skypilot.offers(resources, spot=market is Market.SPOT)
        with_quota = next((offer for offer in offers if skypilot.has_quota(offer)), None)
    except (CloudRefused, CloudUnavailable) as error:
        return Finding(what, False, needed, str(error))
    if with_quota is None:
        places = ", ".join(sorted({_region(offer) for offer in offers}))
        told = zero_quota(offers[0].instance_type, market.replace("_", " "), places)
        return Finding(what, False, needed, told)
    return Finding(what, True, needed, _offer_words(with_quota, offers))


def _offer_words(best: SkyOffer, offers: list[SkyOffer]) -> str:
    machine = " ".join(word for word in (best.instance_type, best.accelerators) if word)
    words = f"{best.infra} {machine} at {best.price_usd_per_h:.2f} $/h"
    dearest = max(offer.price_usd_per_h for offer in offers)
    return words if len(offers) == 1 else f"{words}; {len(offers)} places, up to {dearest:.2f} $/h"


def _region(offer: SkyOffer) -> str:
    return "/".join(offer.infra.split("/")[:2])


def _table(findings: list[Finding]) -> Table:
    """What is there or needed first; of the rest a line each, cut where the terminal ends."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        if finding.ok or finding.needed or finding.warning:
            kind = ("OK", "green") if finding.ok else ("missing", "red") if finding.needed else ("note", "yellow")
            word = Text(kind[0], style=kind[1])
            table.add_row(word, finding.what, Text(finding.told))
    for finding in findings:
        if not (finding.ok or finding.needed or finding.warning):
            told = Text(finding.told, style="dim", no_wrap=True, overflow="ellipsis")
            table.add_row(Text("no", style="dim"), Text(finding.what, style="dim"), told)
    return table


# What `doctor` finds in a run's store: whether a run can live on it, and whether what is there is whole.

# Weights of 32 billion parameters in bfloat16, published whole for each of ten steps an hour, and deleted when the
# next are there: 64 GB x 10 x 24. Deltas are a fraction of it. S3 Standard in us-east-1, list price.
DELETED_TB_A_DAY = 15.4
USD_PER_GB_MONTH = 0.023
EXAMPLE = "for a 32B model at ten steps an hour"
COSTS = (
    f"{EXAMPLE}, each day that is kept is {DELETED_TB_A_DAY:.0f} TB, "
    f"about {DELETED_TB_A_DAY * 1000 * USD_PER_GB_MONTH:.0f} $ a month"
)
NEEDED = (
    "also what a run needs: its journal, and the base model that all its checkpoints share; "
    "leave the run's prefix out of that rule"
)
HELP = {
    "gs": (
        "a bucket keeps what is deleted for 7 days unless that was turned off: `gcloud storage buckets describe "
        "gs://{bucket} --format='default(soft_delete_policy,versioning,retention_policy,lifecycle_config)'` "
        "tells, `gcloud storage buckets update gs://{bucket} --clear-soft-delete` turns it off"
    ),
    "az": (
        "an account may keep what is deleted for days: `az storage account blob-service-properties show` tells "
        "its deleteRetentionPolicy and isVersioningEnabled"
    ),
}


def examine_store(storage: Storage) -> Iterator[Finding]:
    """Try the store for real, and look at the run that is there already."""
    try:
        store = open_store(storage)
        yield _tried(store)
        yield from passing_credentials(store)
        yield from lifecycle(store)
        yield from _checkpoints(store)
    except StoreError as error:
        yield Finding("store", False, True, str(error))


def _tried(store: Store) -> Finding:
    """Whether it does what a run needs; of a folder that is not there, where it is to be. Raises StoreError."""
    if store.folder is not None and not os.path.lexists(store.folder):
        return _to_be_made(store.url, store.folder)
    probe(store)
    return Finding("store", True, True, f"{store.url} can be written, read, listed and deleted from")


def _to_be_made(url: str, folder: Path) -> Finding:
    there = next(above for above in folder.parents if os.path.exists(above))  # also where one may not look further
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return Finding("store", True, True, f"{url} is not there: `up` makes it, in {there}, and tries it")
    told = f"{url} is not there, and nothing can be made in {there}: name a folder that can be written"
    return Finding("store", False, True, told)


def passing_credentials(store: Store) -> Iterator[Finding]:
    """Whether what the options name ends by itself: each machine is given it once."""
    for key in store.options:
        if key.lower().removeprefix("aws_") in ("token", "session_token"):
            ends = (
                "credentials with a session token end by themselves, on all machines at once, on AWS in 36 hours"
            )
            renewed = "name a key that does not, or none where the machines have a role of their own"
            yield Finding("store", False, False, f"storage.options.{key}: {ends}; {renewed}", warning=True)


def lifecycle(store: Store) -> Iterator[Finding]:
    """What the bucket does by itself, and what it would cost: a finding for each rule that harms, else one."""
    scheme, bucket = urlsplit(store.url).scheme, urlsplit(store.url).netloc
    if scheme in ("file", "memory"):
        return
    try:
        rules = rules_of(store.url, store.options)
    except StoreError as error:
        hint = HELP.get(scheme, f"look for versioning, soft delete, object lock and lifecycle rules of {bucket!r}")
        yield Finding("lifecycle", False, False, f"{error}; {hint.format(bucket=bucket)}; {COSTS}", warning=True)
        return
    traps = list(_traps(rules, bucket))
    yield from (Finding("lifecycle", False, False, told, warning=True) for told in traps)
    if not traps:
        told = f"{bucket!r} keeps nothing that is deleted, and deletes nothing itself"
        yield Finding("lifecycle", True, False, told)


def _traps(rules: BucketRules, bucket: str) -> Iterator[str]:
    kept_days = max(rules.locked_days, rules.versions_days or 0)
    if rules.locked_days:
        locks = f"{bucket!r} locks each object for {rules.locked_days} days"
        yield f"{locks}: {_at_rest(kept_days)}; use a bucket without object lock"
    if rules.versioned and rules.versions_days is None:
        yield (
            f"{bucket!r} is versioned, and keeps for ever what a run deletes or writes over: {COSTS}; "
            "use a bucket without versions, or add a lifecycle rule with NoncurrentVersionExpiration"
        )
    elif rules.versioned and not rules.locked_days:
        yield f"{bucket!r} is versioned, and keeps what a run deletes for {kept_days} days: {_at_rest(kept_days)}"
    if rules.expires_days is not None:
        yield f"{bucket!r} deletes objects that are {rules.expires_days} days old, {NEEDED}"
    if rules.expires_on is not None:
        yield f"{bucket!r} deletes all objects from {rules.expires_on} on, {NEEDED}"
    if rules.archived_days is not None:
        yield f"{bucket!r} archives objects that are {rules.archived_days} days old, {NEEDED}"


def _at_rest(days: int) -> str:
    stored_tb = DELETED_TB_A_DAY * days
    return f"{EXAMPLE} that is {stored_tb:.0f} TB at rest, {stored_tb * 1000 * USD_PER_GB_MONTH:,.0f} $ a month"


def _checkpoints(store: Store) -> Iterator[Finding]:
    """Whether the checkpoints are whole, as far as a listing tells. Raises StoreError."""
    listed = Catalog(store, "doctor").newest().checkpoints
    found = missing_objects(store, listed)
    damaged = [version for version, lines in found.items() if lines]
    if damaged:
        newest = f"{damaged[-1]}: {found[damaged[-1]][0]}"
        told = f"damaged: {', '.join(damaged)}; of {newest}; see `grpo-orch checkpoints verify`"
        # A restart takes the newest that is whole: without one it ends.
        yield Finding("checkpoints", False, len(damaged) == len(listed), told, warning=True)
    elif listed:
        told = f"{len(listed)}, with no object missing; `grpo-orch checkpoints verify` reads every byte"
        yield Finding("checkpoints", True, False, told)
