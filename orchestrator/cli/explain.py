"""`grpo-orch explain`: show the latest fleet plan, and why nodes are or are not bought."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.store.document import UnreadableDocuments
from grpo_orch.orchestrator.cli.options import AsJson, Output, Stop, Target, print_result
from grpo_orch.orchestrator.cli.target import open_run
from grpo_orch.orchestrator.views.formatting import clock, duration, plain, plain_table, usd
from grpo_orch.orchestrator.views.run_view import RunObserver
from grpo_orch.policies.fleet.explain import Explanation
from grpo_orch.policies.fleet.market import Offer
from grpo_orch.policies.fleet.objective import Candidate, Comparison
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.vocabulary import kind_of


def explain(target: Target = None, output: AsJson = Output.TEXT) -> None:
    """Explain the fleet: the market, the candidates, the chosen plan, and pending changes."""
    store, _ = open_run(target)
    explanation = documents.PLAN.read(store, UnreadableDocuments())
    if explanation is None:
        raise Stop("the store has no plan yet; the daemon writes it in its first tick", exit_codes.FAILED)
    print_result(output, _plain(explanation), lambda: _drawn(explanation, RunObserver(store).settle()))


def _drawn(explanation: Explanation, now_s: float) -> Group:
    age_s = max(0.0, now_s - explanation.at_s)
    plan = plain(explanation.plan) or "no comparison: the fleet has as many nodes as run.yaml allows"
    parts: list[RenderableType] = [
        Text(f"plan of {clock(explanation.at_s)}, {duration(age_s)} ago", "dim"),
        Text(plan),
    ]
    if explanation.offers:
        parts += [Text("\nmarket", "bold"), _market(explanation.offers, now_s)]
    for comparison in explanation.comparisons:
        parts += [Text(f"\n{comparison.question}{_horizon(comparison)}", "bold"), _candidates(comparison)]
    parts.append(Text("\npending", "bold"))
    return Group(*parts, *(Text(f"  {plain(line)}") for line in explanation.pending or ("nothing",)))


def _plain(explanation: Explanation) -> dict[str, Any]:
    """Return the explanation as JSON data, with each candidate's `loss_usd`."""
    document = asdict(explanation)
    for table, comparison in zip(document["comparisons"], explanation.comparisons, strict=True):
        for line, candidate in zip(table["candidates"], comparison.candidates, strict=True):
            line["loss_usd"] = candidate.loss_usd(comparison.worth_usd, comparison.horizon_s)
    return document


def _market(offers: tuple[Offer, ...], now_s: float) -> Table:
    table = plain_table("kind", "state", "max USD/h", "start", "lifetime", "pool and reason")
    for offer in offers:
        retry = "" if offer.until_s is None else f", again in {duration(max(0.0, offer.until_s - now_s))}"
        price = "unknown" if offer.usd_per_h is None else usd(offer.usd_per_h)
        why = plain("; ".join(part for part in (offer.place, offer.reason) if part))
        times = duration(offer.start_s), duration(offer.lifetime_s)
        table.add_row(kind_of(offer.role, offer.market), f"{offer.status}{retry}", price, *times, why)
    return table


def _horizon(comparison: Comparison) -> str:
    step = f", a step is worth {comparison.worth_usd:.3f} USD" if comparison.worth_usd else ""
    ahead = f", chosen by {comparison.difference_usd:.2f} USD" if comparison.runner_up is not None else ""
    if comparison.unknown:
        return f", over {duration(max(0.0, comparison.horizon_s))}: {comparison.unknown}"
    return f", over {duration(max(0.0, comparison.horizon_s))}{step}{ahead}"


def _candidates(comparison: Comparison) -> Table:
    table = plain_table("", "candidate", "loss USD", "USD/step", "s/step", "USD/h", "USD to change")
    for rank, candidate in enumerate(comparison.candidates):
        loss = f"{candidate.loss_usd(comparison.worth_usd, comparison.horizon_s):.2f}"
        figures = ("",) * 4 if comparison.unknown else _figures(candidate)
        table.add_row("" if rank else "->", candidate.name, "" if comparison.unknown else loss, *figures)
    return table


def _figures(candidate: Candidate) -> tuple[str, ...]:
    step_usd = "none" if candidate.step_s is None else f"{candidate.step_usd:.3f}"
    step_s = "none" if candidate.step_s is None else f"{candidate.step_s:.1f}"
    return step_usd, step_s, f"{candidate.usd_per_h:.2f}", f"{candidate.change_usd:.2f}"
