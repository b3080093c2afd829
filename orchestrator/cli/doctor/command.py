"""`grpo-orch doctor`: what is there for a run and what is missing, each with its remedy; no machine is bought."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from rich.table import Table
from rich.text import Text

from orchestrator.cli.console import Stop, console, errors
from orchestrator.cli.doctor.finding import Finding
from orchestrator.cli.doctor.store import examine_store
from orchestrator.cli.options import AsJson, Output, print_json
from orchestrator.clouds.local.cloud import node_python
from orchestrator.clouds.protocol import CloudRefused, CloudUnavailable
from orchestrator.clouds.sky.quotas import zero_quota
from orchestrator.clouds.sky.sdk.types import ApiServer, CloudCheck, SkyOffer
from orchestrator.config.load import load_spec, load_storage
from policies.control.fleet.markets import market_of
from policies.model import exit_codes
from policies.model.spec import RunSpec
from policies.model.vocabulary import Market, Role

INSTALL = "pip install 'grpo-orch[sky]' 'skypilot[aws]==0.14.1' (or gcp, azure, kubernetes for aws)"


class SkyPilotLike(Protocol):
    """What is asked of SkyPilot; see `orchestrator.clouds.sky.sdk.skypilot`."""

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
    from orchestrator.clouds.sky.sdk.skypilot import SkyPilot  # seconds, and only where it is installed

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
