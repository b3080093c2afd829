"""The recipes that come with grpo-orch: folders that run, with what there is to change in them.

They lie in `orchestrator/recipes`, so that an installed package has them as a checkout does.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import orchestrator

FOLDER = Path(orchestrator.__file__).parent / "recipes"


def recipe_lines() -> dict[str, str]:
    """What each recipe trains, by its name: the heading of its README.md."""
    headings = (path.read_text("utf-8").partition("\n")[0] for path in sorted(FOLDER.glob("*/README.md")))
    named = (heading.removeprefix("# ").partition(": ") for heading in headings)
    return {name: line for name, _, line in named}


def write_recipe(recipe: str, target: Path, name: str | None) -> list[str]:
    """Write a recipe's folder as `target`, whole or not at all; return the names of its files.

    Args:
        recipe: one of `recipe_lines`.
        name: the run's, in the place of the recipe's own.

    Raises:
        OSError: there is something of that name already, or it cannot be written.
    """
    files = [path for path in sorted((FOLDER / recipe).iterdir()) if path.is_file()]
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as part:
        folder = Path(part, "recipe")
        folder.mkdir()
        for path in files:
            text = path.read_text("utf-8")
            if name is not None and path.name == "run.yaml":
                text = text.replace(f"\nname: {recipe}\n", f"\nname: {name}\n", 1)
            (folder / path.name).write_text(text, "utf-8")
        folder.rename(target)  # which takes the place of an empty folder and of nothing else
    return [path.name for path in files]
