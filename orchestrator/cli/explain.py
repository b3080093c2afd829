"""`grpo-orch explain`: why the fleet is what it is, and why nothing is bought."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from checkpoint.records import documents
from checkpoint.store.document import Unreadable
from orchestrator.cli.options import AsJson, Output, Stop, Target, console, print_json
from orchestrator.cli.target import open_run
from orchestrator.views.run_view import Looker
from orchestrator.views.words import clock, duration, plain, usd
from policies.fleet.explain import Explanation
from policies.fleet.market import Offer
from policies.fleet.objective import Candidate, Comparison
from policies.model import exit_codes
from policies.model.vocabulary import kind_of


def explain(target: Target = None, output: AsJson = Output.TEXT) -> None:
    """Explain the fleet: what can be bought, what was compared, what was chosen, what is under way."""
    store, _ = open_run(target)
    found = documents.PLAN.read(store, Unreadable())
    if found is None:
        raise Stop("no plan is in the store yet: the daemon writes it with its first look", exit_codes.FAILED)
    if output is Output.JSON:
        print_json(_plain(found))
        return
    _print(found, Looker(store).settle())


def _print(found: Explanation, now_s: float) -> None:
    age_s = max(0.0, now_s - found.at_s)
    console.print(f"plan of {clock(found.at_s)}, {duration(age_s)} ago", style="dim", highlight=False)
    console.print(plain(found.plan) or "nothing is compared: as many nodes as run.yaml allows", highlight=False)
    if found.offers:
        console.print("\nmarket", style="bold")
        console.print(_market(found.offers, now_s))
    for compared in found.comparisons:
        console.print(f"\n{compared.question}{_horizon(compared)}", style="bold", highlight=False)
        console.print(_candidates(compared))
    console.print("\npending", style="bold")
    for line in found.pending or ("nothing",):
        console.print(f"  {plain(line)}", highlight=False, soft_wrap=True)


def _plain(found: Explanation) -> dict[str, Any]:
    """The explanation as JSON, each candidate with what it loses."""
    plain_found = asdict(found)
    for document, compared in zip(plain_found["comparisons"], found.comparisons, strict=True):
        for line, candidate in zip(document["candidates"], compared.candidates, strict=True):
            line["loss_usd"] = candidate.loss_usd(compared.worth_usd, compared.horizon_s)
    return plain_found


def _market(offers: tuple[Offer, ...], now_s: float) -> Table:
    table = _table("kind", "state", "USD/h at most", "start", "lasts", "where and why")
    for offer in offers:
        again = "" if offer.until_s is None else f", again in {duration(max(0.0, offer.until_s - now_s))}"
        price = "not known" if offer.usd_per_h is None else usd(offer.usd_per_h)
        why = plain("; ".join(part for part in (offer.place, offer.why) if part))
        times = duration(offer.start_s), duration(offer.lifetime_s)
        table.add_row(kind_of(offer.role, offer.market), f"{offer.status}{again}", price, *times, why)
    return table


def _horizon(compared: Comparison) -> str:
    step = f", a step is worth {compared.worth_usd:.3f} USD" if compared.worth_usd else ""
    ahead = f", chosen by {compared.difference_usd:.2f} USD" if compared.runner_up is not None else ""
    if compared.lacks:
        return f", over {duration(max(0.0, compared.horizon_s))}: {compared.lacks}"
    return f", over {duration(max(0.0, compared.horizon_s))}{step}{ahead}"


def _candidates(compared: Comparison) -> Table:
    table = _table("", "candidate", "loses USD", "USD a step", "s a step", "USD/h", "USD to change", "deadline")
    for place, candidate in enumerate(compared.candidates):
        loss = f"{candidate.loss_usd(compared.worth_usd, compared.horizon_s):.2f}"
        figures = ("",) * 4 if compared.lacks else _figures(candidate)
        table.add_row(
            "" if place else "->", candidate.name, "" if compared.lacks else loss, *figures, _late(candidate)
        )
    if compared.reference is not None:
        table.add_row("", f"{compared.reference.name}, in a shortage", "", *_figures(compared.reference), "")
    return table


def _figures(candidate: Candidate) -> tuple[str, ...]:
    step_usd = "none" if candidate.step_s is None else f"{candidate.step_usd:.3f}"
    step_s = "none" if candidate.step_s is None else f"{candidate.step_s:.1f}"
    return step_usd, step_s, f"{candidate.usd_per_h:.2f}", f"{candidate.change_usd:.2f}"


def _late(candidate: Candidate) -> str:
    return "" if candidate.in_time else "missed"


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, pad_edge=False, header_style="dim")
