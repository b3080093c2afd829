"""`grpo-orch plan`: what a run takes of memory, time and money, before anything is bought."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from checkpoint.store.errors import StoreError
from orchestrator.cli.options import AsJson, Output, console, errors, print_json
from orchestrator.cli.target import open_store
from orchestrator.clouds import list_prices
from orchestrator.config.load import Storage, load, load_storage
from orchestrator.config.model_size import find_size
from orchestrator.plan.gather import NOWHERE, make_plan
from orchestrator.plan.machines import asked_once
from orchestrator.plan.model import to_json
from orchestrator.plan.prices import PriceBook, by_catalog, by_rehearsal, store_place
from orchestrator.plan.steps import Measured, measure
from orchestrator.views import plan as views
from policies.fleet.store_costs import Place
from policies.model.spec import RunSpec


def plan(
    run_yaml: Annotated[Path, typer.Argument(help="The run's specification.")] = Path("run.yaml"),
    output: AsJson = Output.TEXT,
) -> None:
    """Say whether a run fits its GPUs, how long a step takes and what it costs; nothing is started or bought."""
    sizes = asked_once(find_size)
    with errors.status("looking up the model, the prices and the store"):
        spec = load(run_yaml, find_size=sizes).spec
        measured, why, place = _in_store(load_storage(run_yaml))
        made = make_plan(spec, sizes, _prices(spec), measured, why, place)
    if output is Output.JSON:
        print_json(to_json(made))
    else:
        console.print(views.render(made), highlight=False)


def _prices(spec: RunSpec) -> PriceBook:
    return by_catalog(spec, list_prices) if spec.cloud == "sky" else by_rehearsal(spec)


def _in_store(storage: Storage) -> tuple[Measured | None, str, Place]:
    """What the run in the store has logged, if there is one, and where that is; a plan needs no store that can be
    reached."""
    place = NOWHERE
    try:
        store = open_store(storage)
        place = store_place(store)
        return measure(store), "", place
    except StoreError as error:
        return None, f"whether the store holds a run: {error}", place
