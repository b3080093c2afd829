"""`grpo-orch doctor`: report what a run needs and what is missing, with remedies. Starts no machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Protocol
from urllib.parse import urlsplit

import typer
from rich.text import Text

from grpo_orch.checkpoint.store.backends.aws import BucketRules, rules_of
from grpo_orch.checkpoint.store.errors import StoreError
from grpo_orch.checkpoint.store.probe import probe
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.cli.options import AsJson, Output, Stop, console, errors, print_json
from grpo_orch.orchestrator.cli.target import open_store
from grpo_orch.orchestrator.clouds.local import node_python
from grpo_orch.orchestrator.clouds.protocol import CloudRefused, CloudUnavailable
from grpo_orch.orchestrator.clouds.sky.records import ApiServer, CloudCheck, SkyOffer
from grpo_orch.orchestrator.config.load import load_spec, load_storage
from grpo_orch.orchestrator.config.shorthand import Storage
from grpo_orch.orchestrator.node_installer import LOCKS
from grpo_orch.policies.fleet.market import market_of
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.model.vocabulary import Market, Role


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        details: of the result if `ok`, else the remedy.
        needed: whether the run cannot start while this is missing.
        warning: the run can start, but may cost or lose more than its user expects.
        machines: whether this check decides if machines can be started somewhere.
    """

    check: str
    ok: bool
    needed: bool
    details: str
    warning: bool = False
    machines: bool = False


QUOTA_HELP = "https://docs.skypilot.co/en/latest/cloud-setup/quota.html"

# With the lock, because without one pip takes minutes to find versions that go together.
INSTALL = (
    f"pip install 'skypilot[aws]==0.14.1' -c {LOCKS / 'controller.txt'} "
    "(or gcp, kubernetes, slurm for aws; azure without -c)"
)


class SkyPilotLike(Protocol):
    """The parts of SkyPilot that doctor uses; see `orchestrator.clouds.sky.skypilot`."""

    def server(self) -> ApiServer: ...
    def clouds(self) -> list[CloudCheck]: ...
    def offers(self, resources: dict[str, Any], *, spot: bool) -> list[SkyOffer]: ...
    def has_quota(self, offer: SkyOffer) -> bool: ...


def doctor(
    run_yaml: Annotated[
        Path | None, typer.Argument(help="Also check what this run needs. Default: ./run.yaml, if it exists.")
    ] = None,
    output: AsJson = Output.TEXT,
) -> None:
    """Check clouds, quotas, the store and the node environment, and print remedies. Starts no machine."""
    if run_yaml is None and Path("run.yaml").exists():
        run_yaml = Path("run.yaml")
    spec = load_spec(run_yaml) if run_yaml else None
    with errors.status("querying SkyPilot and its clouds"):
        findings = list(examine(spec, skypilot_version(), open_skypilot))
        if run_yaml:
            findings.extend(examine_store(load_storage(run_yaml)))
    if output is Output.JSON:
        print_json({"usable": is_usable(findings), "findings": [asdict(finding) for finding in findings]})
    else:
        print_findings(findings)
    if not is_usable(findings):
        missing = [finding.check for finding in findings if finding.needed and not finding.ok]
        raise Stop(f"missing: {', '.join(missing) or 'a cloud or a node environment'}", exit_codes.FAILED)


def examine(
    spec: RunSpec | None, version: str | None, open_skypilot: Callable[[], SkyPilotLike]
) -> Iterator[Finding]:
    """Check SkyPilot, its clouds and their offers, and the node environment of this machine.

    A finding is `needed` only if the run uses it; without a run none is.
    """
    needs_sky, needs_local = (spec is not None and spec.cloud == name for name in ("sky", "local"))
    yield _node_environment(needs_local)
    if version is None:
        yield Finding("SkyPilot", False, needs_sky, INSTALL)
        return
    yield Finding("SkyPilot", True, needs_sky, version)
    if needs_local:
        return  # querying clouds is slow and may start an API server
    skypilot = open_skypilot()
    try:
        server = skypilot.server()
        yield Finding("API server", True, needs_sky, f"{server.endpoint}, version {server.version}")
        checks = skypilot.clouds()
    except CloudUnavailable as error:
        yield Finding("API server", False, needs_sky, str(error))
        return
    yield from (
        Finding(f"cloud {check.name}", check.enabled, False, check.reason or "enabled", machines=True)
        for check in checks
    )
    if spec is not None:
        for role, resources in ((Role.TRAINER, spec.trainer.resources), (Role.ROLLOUT, spec.rollout.resources)):
            yield from (_machine(skypilot, role, resources, market, market_of(role, spec)) for market in Market)


def is_usable(findings: list[Finding]) -> bool:
    """Return whether the run can start; without a run, whether any run could, here or on a cloud."""
    if any(finding.needed for finding in findings):
        return all(finding.ok for finding in findings if finding.needed)
    return any(finding.ok for finding in findings if finding.machines)


def skypilot_version() -> str | None:
    """Return the installed SkyPilot's version without importing it, which takes seconds."""
    try:
        return metadata.version("skypilot")
    except metadata.PackageNotFoundError:
        return None


def open_skypilot() -> SkyPilotLike:
    from grpo_orch.orchestrator.clouds.sky.skypilot import SkyPilot  # optional, and takes seconds to import

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
        regions = ", ".join(sorted({_region(offer) for offer in offers}))
        kind = f"{offers[0].instance_type} {market.replace('_', ' ')}"
        remedy = f"the account's quota for {kind} is zero in {regions}; request more: {QUOTA_HELP}"
        return Finding(what, False, needed, remedy)
    return Finding(what, True, needed, _describe(with_quota, offers))


def _describe(best: SkyOffer, offers: list[SkyOffer]) -> str:
    machine = " ".join(part for part in (best.instance_type, best.accelerators) if part)
    text = f"{best.infra} {machine} at {best.price_usd_per_h:.2f} $/h"
    highest = max(offer.price_usd_per_h for offer in offers)
    return text if len(offers) == 1 else f"{text}; {len(offers)} offers, up to {highest:.2f} $/h"


def _region(offer: SkyOffer) -> str:
    return "/".join(offer.infra.split("/")[:2])


def print_findings(findings: list[Finding]) -> None:
    """Print what is present or needed, then the rest, dimmed.

    Remedies are not wrapped, so that commands can be copied. The reasons of unused clouds are cut.
    """
    width = max(len(finding.check) for finding in findings)
    shown = [finding for finding in findings if finding.ok or finding.needed or finding.warning]
    for finding in shown:
        kind = ("OK", "green") if finding.ok else ("missing", "red") if finding.needed else ("note", "yellow")
        console.print(
            Text.assemble((f"{kind[0]:9}", kind[1]), f"{finding.check:{width}}  {finding.details}"), soft_wrap=True
        )
    for finding in (finding for finding in findings if finding not in shown):
        text = Text(f"{'no':9}{finding.check:{width}}  {finding.details}", style="dim")
        if finding.check.startswith("cloud "):
            text.truncate(console.width, overflow="ellipsis")
        console.print(text, soft_wrap=True)


# Checks of the run's store: access, rules of the bucket, and completeness of the checkpoints.

# Full weights of 32 billion parameters in bfloat16, published in each of ten steps an hour and deleted after the
# next: 64 GB x 10 x 24. Deltas are a fraction of it. S3 Standard in us-east-1, list price: 0.023 $/GB.
COSTS = "for a 32B model at ten steps an hour, each day of retention keeps 15 TB, about 354 $ a month"
NEEDED = (
    "including those that a run needs: its journal, and the base model that all its checkpoints share; "
    "exclude the run's prefix from that rule"
)
HELP = {
    "gs": (
        "a bucket keeps deleted objects for 7 days by default. `gcloud storage buckets describe gs://{bucket} "
        "--format='default(soft_delete_policy,versioning,retention_policy,lifecycle_config)'` shows the setting, "
        "`gcloud storage buckets update gs://{bucket} --clear-soft-delete` turns it off"
    ),
    "az": (
        "an account may keep deleted objects for days; `az storage account blob-service-properties show` prints "
        "its deleteRetentionPolicy and isVersioningEnabled"
    ),
}


def examine_store(storage: Storage) -> Iterator[Finding]:
    """Test the store with real requests."""
    try:
        store = open_store(storage)
        yield _probe(store)
        yield from temporary_credentials(store)
        yield from lifecycle(store)
    except StoreError as error:
        yield Finding("store", False, True, str(error))


def _probe(store: Store) -> Finding:
    """Check that the store works. A missing folder is not created: it may be misspelt. Raises StoreError."""
    if store.folder is not None and not os.path.lexists(store.folder):
        return Finding("store", True, True, f"{store.url} does not exist yet; `up` creates and tests it")
    probe(store)
    return Finding("store", True, True, f"{store.url} can be read, written, listed and deleted from")


def temporary_credentials(store: Store) -> Iterator[Finding]:
    """Warn about store credentials that expire: each machine receives them only once."""
    for key in store.options:
        if key.lower().removeprefix("aws_") in ("token", "session_token"):
            problem = "credentials with a session token expire on all machines together, on AWS after 36 hours"
            remedy = "use a permanent key, or none if the machines have a role of their own"
            yield Finding("store", False, False, f"storage.options.{key}: {problem}; {remedy}", warning=True)


def lifecycle(store: Store) -> Iterator[Finding]:
    """Warn about each rule of the bucket that harms a run, with what it would cost; else report that none does."""
    scheme, bucket = urlsplit(store.url).scheme, urlsplit(store.url).netloc
    if scheme in ("file", "memory"):
        return
    try:
        rules = rules_of(store.url, store.options)
    except StoreError as error:
        hint = HELP.get(scheme, f"check versioning, soft delete, object lock and lifecycle rules of {bucket!r}")
        yield Finding("lifecycle", False, False, f"{error}; {hint.format(bucket=bucket)}; {COSTS}", warning=True)
        return
    problems = list(_harmful_rules(rules, bucket))
    yield from (Finding("lifecycle", False, False, problem, warning=True) for problem in problems)
    if not problems:
        details = f"{bucket!r} keeps no deleted objects and deletes none automatically"
        yield Finding("lifecycle", True, False, details)


def _harmful_rules(rules: BucketRules, bucket: str) -> Iterator[str]:
    if rules.versioned:
        how_long = "forever" if rules.versions_days is None else f"for {rules.versions_days} days"
        yield (
            f"{bucket!r} is versioned and keeps deleted and overwritten objects {how_long}: {COSTS}; "
            "use a bucket without versions, or a lifecycle rule with NoncurrentVersionExpiration of one day"
        )
    for name in rules.removing:
        yield f"the lifecycle rule {name!r} of {bucket!r} deletes or archives objects, {NEEDED}"
