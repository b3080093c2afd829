"""Commands that write and check a run.yaml: init, validate, plan. They start no machine."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from grpo_orch import orchestrator
from grpo_orch.checkpoint.store.errors import StoreError
from grpo_orch.orchestrator.cli.options import (
    AsJson,
    Output,
    Stop,
    console,
    errors,
    print_json,
    print_line,
    print_result,
)
from grpo_orch.orchestrator.cli.target import open_store
from grpo_orch.orchestrator.clouds import list_prices
from grpo_orch.orchestrator.clouds.local import gpus_here
from grpo_orch.orchestrator.config.json_schema import TITLE, json_schema
from grpo_orch.orchestrator.config.load import ConfigError, Loaded, Problem, Storage, load, load_storage
from grpo_orch.orchestrator.config.model_size import find_size
from grpo_orch.orchestrator.config.rules import name_problem
from grpo_orch.orchestrator.plan.gather import NOWHERE, make_plan
from grpo_orch.orchestrator.plan.machines import cached_lookup
from grpo_orch.orchestrator.plan.prices import PriceBook, by_catalog, by_rehearsal, store_place
from grpo_orch.orchestrator.views import plan as views
from grpo_orch.policies.costs.store_costs import Location
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.spec import RunSpec


class Init(TyperCommand):
    """Accepts `--recipe` without a name, which lists the recipes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--recipe" in args:
            after = args.index("--recipe") + 1
            if args[after : after + 1] == [] or args[after].startswith("-"):
                args = [*args[:after], "", *args[after:]]
        return super().parse_args(ctx, args)


def init(
    path: Annotated[
        Path | None,
        typer.Argument(
            help="File or, with --recipe, folder to write. Default: run.yaml, or the recipe's name.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The run's name. Default: my-run, or the recipe's name.", show_default=False
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Write the folder of a recipe. Without NAME: list the recipes.",
            autocompletion=lambda: list(recipe_lines().items()),
        ),
    ] = None,
    output: AsJson = Output.TEXT,
) -> None:
    """Write a commented run.yaml, or the folder of a recipe.

    Editors complete and check its keys with run.schema.json, which is written next to it.
    """
    if name is not None and (problem := name_problem(name)):
        raise Stop(f"--name: {problem}")
    if recipe is not None:
        _init_recipe(recipe, path, name, output)
        return
    path = path or Path("run.yaml")
    schema = path.parent / SCHEMA_FILE
    if path.name == SCHEMA_FILE:
        raise Stop(f"{path} is the name of the schema; name another file")
    if os.path.lexists(path):
        raise Stop(f"{path} already exists; remove it or name another file")
    try:
        _refuse_other_schema(schema)
        path.parent.mkdir(parents=True, exist_ok=True)
        schema.write_text(schema_text(), "utf-8")
        with path.open("x") as out:
            out.write(init_text(name or "my-run"))
    except OSError as error:
        raise Stop(f"{error.filename or path}: {error.strerror}") from None
    message = f"Wrote {path}, and {schema} for editors. Check it with: grpo-orch validate {shlex.quote(str(path))}"
    print_result(output, {"files": [str(path), str(schema)]}, message)


def _refuse_other_schema(path: Path) -> None:
    """Raise Stop if the file exists and is not a schema that `init` has written."""
    if path.exists() and not (path.is_file() and TITLE in path.read_text("utf-8", errors="replace")):
        raise Stop(f"{path} already exists and is not grpo-orch's; rename it")


def _init_recipe(recipe: str, folder: Path | None, name: str | None, output: Output) -> None:
    lines = recipe_lines()
    if recipe not in lines:
        width = max(map(len, lines))
        listed = "\n".join(f"  {known:{width}}  {line}" for known, line in lines.items())
        if recipe:
            raise Stop(f"no recipe {recipe!r}; expected one of\n{listed}")
        print_result(output, {"recipes": lines}, listed)
        return
    folder = folder or Path(recipe)
    try:
        files = write_recipe(recipe, folder, name)
    except OSError as error:
        if os.path.lexists(folder):
            raise Stop(
                f"{folder} already exists; name a new one: grpo-orch init --recipe {recipe} FOLDER"
            ) from None
        raise Stop(f"{folder}: {error.strerror}") from None
    message = f"Wrote {folder}: {', '.join(files)}. Its README.md lists what to change. Then run:"
    command = f"  cd {shlex.quote(str(folder))} && grpo-orch up run.yaml"
    print_result(output, {"files": [str(folder / file) for file in files]}, f"{message}\n{command}")


def schema() -> None:
    """Print the JSON Schema of run.yaml, so that editors can complete and check its keys.

    `init` writes it to run.schema.json. To renew that file after an upgrade, redirect this output to it.
    """
    print(schema_text(), end="")


def validate(
    run_yaml: Annotated[Path, typer.Argument(help="The file to check.")] = Path("run.yaml"),
    output: AsJson = Output.TEXT,
) -> None:
    """Check a run.yaml without starting anything."""
    try:
        loaded = load(run_yaml, count_gpus, find_size)
    except ConfigError as error:
        if output is Output.TEXT:
            raise
        print_json(_checked(run_yaml, None, error.problems, ()))
        raise typer.Exit(exit_codes.USAGE) from None
    document = _checked(run_yaml, loaded.spec.name, (), loaded.notices)
    print_result(output, document, f"{run_yaml}: {loaded.spec.name} is valid")
    if output is Output.TEXT:
        print_notices(loaded)


def count_gpus() -> int:
    """Return the number of GPUs on this machine for a run's nodes. Raises CloudUnavailable, DriverFailed."""
    return len(gpus_here())


def print_notices(loaded: Loaded, terminal: Console = console) -> None:
    """Print a line for each notice about a valid file."""
    for notice in loaded.notices:
        print_line(f"notice: {notice}", terminal)


def _checked(
    run_yaml: Path, name: str | None, problems: Sequence[Problem], notices: Sequence[Problem]
) -> dict[str, Any]:
    """Return the JSON document with every key; for an invalid file `name` is null and `problems` is not empty."""
    return {
        "file": str(run_yaml),
        "name": name,
        "valid": not problems,
        "problems": [_plain(problem) for problem in problems],
        "notices": [_plain(notice) for notice in notices],
    }


def _plain(problem: Problem) -> dict[str, Any]:
    return {"file": problem.file, "line": problem.line or None, "key": problem.key, "message": problem.message}


# The files that `grpo-orch init` writes.

SCHEMA_FILE = "run.schema.json"
SCHEMA_LINE = f"# yaml-language-server: $schema={SCHEMA_FILE}\n"  # understood by most editors


def schema_text() -> str:
    """Return the JSON Schema of run.yaml, on one line: it is long, and for programs."""
    return json.dumps(json_schema(), separators=(",", ":")) + "\n"


def init_text(name: str) -> str:
    """Return the commented template for a run of that name."""
    text = resources.files("grpo_orch.orchestrator.config").joinpath("template.yaml").read_text("utf-8")
    return SCHEMA_LINE + text.replace("name: my-run", f"name: {name}", 1)


# Recipes: complete example folders, each with a README.md. They are part of the installed package.
RECIPES = Path(orchestrator.__file__).parent / "recipes"


def recipe_lines() -> dict[str, str]:
    """Return a description of each recipe by its name, from the heading of its README.md."""
    headings = (path.read_text("utf-8").partition("\n")[0] for path in sorted(RECIPES.glob("*/README.md")))
    parts = (heading.removeprefix("# ").partition(": ") for heading in headings)
    return {name: line for name, _, line in parts}


def write_recipe(recipe: str, target: Path, name: str | None) -> list[str]:
    """Write a recipe's folder and the schema as `target` atomically; return the names of its files.

    Args:
        recipe: one of `recipe_lines`.
        target: the folder to create.
        name: the run's name; None for the recipe's own.

    Raises:
        OSError: `target` exists or cannot be written.
    """
    files = [path for path in sorted((RECIPES / recipe).iterdir()) if path.is_file()]
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as part:
        folder = Path(part, "recipe")
        folder.mkdir()
        for path in files:
            text = path.read_text("utf-8")
            if name is not None and path.name == "run.yaml":
                text = text.replace(f"\nname: {recipe}\n", f"\nname: {name}\n", 1)
            (folder / path.name).write_text(SCHEMA_LINE * (path.suffix == ".yaml") + text, "utf-8")
        (folder / SCHEMA_FILE).write_text(schema_text(), "utf-8")
        folder.rename(target)  # replaces an empty folder, fails for anything else
    return sorted([SCHEMA_FILE, *(path.name for path in files)])


# plan: memory, time and cost of a run.


def plan(
    run_yaml: Annotated[Path, typer.Argument(help="The run's specification.")] = Path("run.yaml"),
    output: AsJson = Output.TEXT,
) -> None:
    """Estimate a run's memory, time and cost. Starts no machine."""
    sizes = cached_lookup(find_size)
    with errors.status("looking up the model and the prices"):
        spec = load(run_yaml, find_size=sizes).spec
        run_plan = make_plan(spec, sizes, _prices(spec), _place_of(load_storage(run_yaml)))
    print_result(output, asdict(run_plan), views.render(run_plan))


def _prices(spec: RunSpec) -> PriceBook:
    return by_catalog(spec, list_prices) if spec.cloud == "sky" else by_rehearsal(spec)


def _place_of(storage: Storage) -> Location:
    """Return the store's place; unknown for a store that cannot be opened, which `up` reports."""
    try:
        return store_place(open_store(storage))
    except StoreError:
        return NOWHERE
