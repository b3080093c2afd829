"""`grpo-orch explain`: why the fleet is what it is, and why nothing is bought."""

from __future__ import annotations

import math
from dataclasses import asdict

from rich.table import Table

from checkpoint.records import documents
from checkpoint.store.document import Unreadable
from orchestrator.cli.options import AsJson, Output, Stop, Target, console, print_json
from orchestrator.cli.target import open_run
from orchestrator.views.run_view import Looker
from orchestrator.views.words import clock, duration, plain, usd
from policies.fleet.explain import Explanation, OfferLine, Question
from policies.model import exit_codes


def explain(target: Target = None, output: AsJson = Output.TEXT) -> None:
    """Explain the fleet: what can be bought, what was compared, what was chosen, what is under way."""
    store, _ = open_run(target)
    found = documents.PLAN.read(store, Unreadable())
    if found is None:
        raise Stop("no plan is in the store yet: the daemon writes it with its first look", exit_codes.FAILED)
    if output is Output.JSON:
        print_json(asdict(found))
        return
    _print(found, Looker(store).settle())


def _print(found: Explanation, now_s: float) -> None:
    age_s = max(0.0, now_s - found.at_s)
    console.print(f"plan of {clock(found.at_s)}, {duration(age_s)} ago", style="dim", highlight=False)
    console.print(plain(found.plan) or "nothing is compared: as many nodes as run.yaml allows", highlight=False)
    if found.offers:
        console.print("\nmarket", style="bold")
        console.print(_market(found.offers, now_s))
    for question in found.questions:
        console.print(f"\n{question.name}{_horizon(question)}", style="bold", highlight=False)
        console.print(_candidates(question))
    console.print("\npending", style="bold")
    for line in found.pending or ("nothing",):
        console.print(f"  {plain(line)}", highlight=False, soft_wrap=True)


def _market(offers: tuple[OfferLine, ...], now_s: float) -> Table:
    table = _table("kind", "state", "USD/h at most", "start", "lasts", "where and why")
    for offer in offers:
        again = "" if offer.again_at_s is None else f", again in {duration(max(0.0, offer.again_at_s - now_s))}"
        price = "not known" if offer.usd_per_h is None else usd(offer.usd_per_h)
        lasts = duration(3600 * offer.lifetime_h)
        why = "; ".join(part for part in (offer.place, offer.why) if part)
        table.add_row(offer.kind, f"{offer.status}{again}", price, duration(offer.start_s), lasts, plain(why))
    return table


def _horizon(question: Question) -> str:
    step = f", a step is worth {question.worth_usd:.3f} USD" if question.worth_usd else ""
    ahead = f", chosen by {question.difference_usd:.2f} USD" if len(question.candidates) > 1 else ""
    return f", over {duration(max(0.0, question.horizon_s))}{step}{ahead}"


def _candidates(question: Question) -> Table:
    table = _table("", "candidate", "loses USD", "USD a step", "s a step", "USD/h", "USD to change", "deadline")
    for place, one in enumerate(question.candidates):
        step_usd = "none" if one.step_usd is None else f"{one.step_usd:.3f}"
        step_s = "none" if one.step_s is None else f"{one.step_s:.1f}"
        loss = f"{one.loss_usd:.2f}" if math.isfinite(one.loss_usd) else ""
        chosen, in_time = "" if place else "->", "" if one.in_time else "missed"
        figures = (loss, step_usd, step_s, f"{one.usd_per_h:.2f}", f"{one.change_usd:.2f}", in_time)
        table.add_row(chosen, one.name, *figures)
    return table


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, pad_edge=False, header_style="dim")
