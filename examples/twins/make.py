"""Write a recipe's tiny twin as a folder that runs: `python make.py math-two-gpus --out build/math-two-gpus`.

In it are the recipe's own files, unchanged; `tiny.yaml`, which extends its run.yaml, and `alone.yaml`, which takes
the nodes away; rows in the columns of its datasets; and a tiny base model, trained on the spot. Then
`grpo-orch up build/math-two-gpus/tiny.yaml`.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import base_model
from rows import TWINS, Answer, Row

from grpo_orch.orchestrator.config.load import load_spec
from grpo_orch.policies.model.spec import datasets_of
from grpo_orch.tasks.trainer.user_data import load_data

HERE = Path(__file__).resolve().parent
RECIPES = HERE.parents[1] / "orchestrator" / "recipes"
RIGHT, FORMED = 0.5, 0.5  # of the answers that the base model learns from


def write_files(recipe: str, folder: Path) -> None:
    shutil.copytree(RECIPES / recipe, folder, ignore=shutil.ignore_patterns("__pycache__", "README.md"))
    shutil.copyfile(HERE / f"{recipe}.yaml", folder / "tiny.yaml")
    shutil.copyfile(HERE / "alone.yaml", folder / "alone.yaml")
    (folder / "model").mkdir()
    for name, (rows, _) in TWINS[recipe].items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def tasks_of(recipe: str, folder: Path) -> list[base_model.Task]:
    """Each row with the prompt that the trainer makes of it."""
    tasks = []
    for one in datasets_of(load_spec(folder / "tiny.yaml").trainer.dataset):
        rows, answer = TWINS[recipe][Path(one.path).name]
        made = load_data("trainer.dataset", one, folder, len(rows))
        tasks += [base_model.Task(row["prompt"], drawing(row, answer)) for row in made.rows]
    return tasks


def drawing(row: Row, answer: Answer) -> Callable[[], str]:
    return lambda: answer(row, random.random() < RIGHT, random.random() < FORMED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", choices=sorted(TWINS))
    parser.add_argument("--out", type=Path, help="folder to write, which must not exist (default: build/RECIPE)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the base model")
    arguments = parser.parse_args()
    folder = (arguments.out or Path("build", arguments.recipe)).absolute()
    if folder.exists():
        sys.exit(f"{folder} exists already; remove it or name another as --out")
    began_s = time.monotonic()
    write_files(arguments.recipe, folder)
    base_model.make(tasks_of(arguments.recipe, folder), folder / "model", arguments.seed)
    print(f"wrote {folder} in {time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    main()
