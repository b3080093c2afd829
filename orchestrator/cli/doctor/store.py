"""What `doctor` finds in a run's store: whether a run can live on it, and whether what is there is whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from checkpoint.store.bucket import BucketRules, rules_of
from checkpoint.store.errors import StoreError
from checkpoint.store.probe import probe
from checkpoint.store.run_store import Store
from checkpoint.stream.catalog import Catalog
from checkpoint.stream.upkeep import missing_objects
from orchestrator.cli.doctor.finding import Finding
from orchestrator.cli.target import open_store
from orchestrator.config.rules.storage import Storage

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
