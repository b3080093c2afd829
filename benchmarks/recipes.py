"""Whether the recipes' tiny twins learn what the rewards ask for, and which losses: `make bench-recipes`.

Each twin over three seeds, its base model's and its run's, through the command line, and without nodes: the
trainer generates. Then three losses on the twin of the mathematics recipe, where each batch makes two steps, for
where it makes one nothing is ever clipped.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.rig import recipe_plot
from benchmarks.rig.local_run import NODE_PYTHON, ROOT, run_file
from grpo_orch.checkpoint.records.metrics import MetricsRow
from grpo_orch.orchestrator.config.load import load_spec
from grpo_orch.policies.model.spec import RunSpec

RECIPES = ("qwen-32b", "math-two-gpus", "gsm8k-zero2", "llama-one-card")
LOSSES = {"grpo": "", "dr_grpo": "dr-grpo.yaml", "unclipped": "unclipped.yaml"}
SEEDS = (1, 2, 3)
AT_ONCE = 2  # no time is measured
ENDS = 5  # batches that the beginning and the end of a curve are the mean of
MAKE = ROOT / "examples" / "twins" / "make.py"
PICTURE = ROOT / "benchmarks" / "results" / "recipes.svg"

console = Console()


@dataclass(frozen=True, slots=True)
class Curve:
    """One run's reward for each batch of completions, as the share of the largest that there is."""

    seed: int
    rewards: list[float]
    rollbacks: int

    @property
    def start(self) -> float:
        return sum(self.rewards[:ENDS]) / ENDS

    @property
    def end(self) -> float:
        return sum(self.rewards[-ENDS:]) / ENDS


@dataclass(frozen=True, slots=True)
class Job:
    """A run: of a recipe's twin, with what lies over its alone.yaml."""

    title: str
    recipe: str
    seed: int
    loss_file: str = ""  # the recipe's own
    more: str = ""

    def prepare(self, base: Path) -> Path:
        """Make the twin below `base`; return the file to run."""
        folder = base / f"{self.title}-{self.seed}"
        command = [str(one) for one in (NODE_PYTHON, MAKE, self.recipe, "--out", folder, "--seed", self.seed)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"no twin was made:\n{done.stdout}\n{done.stderr}")
        if self.loss_file:
            loss = folder / self.loss_file
            loss.write_text(loss.read_text().replace("extends: run.yaml", "extends: alone.yaml"))
        head = f"extends: {self.loss_file or 'alone.yaml'}\nstorage: ./store\n"
        (folder / "over.yaml").write_text(f"{head}grpo:\n  seed: {self.seed}\n{self.more}")
        return folder / "over.yaml"


TWO_STEPS = "  num_iterations: 2\n"
JOBS = [
    job
    for seed in SEEDS
    for job in (
        *(Job(recipe, recipe, seed) for recipe in RECIPES),
        *(Job(loss, "math-two-gpus", seed, file, TWO_STEPS) for loss, file in LOSSES.items()),
    )
]


def measure(job: Job, base: Path) -> Curve:
    """Run a job to its end."""
    over = job.prepare(base)
    rows, report = run_file(over)
    largest = reward_max(load_spec(over))
    last = {row.step: row.values["reward"] / largest for row in kept(rows)}
    return Curve(job.seed, [last[step] for step in sorted(last)], len(report["rollbacks"]))


def kept(rows: list[MetricsRow]) -> list[MetricsRow]:
    """Of steps that a rollback abandoned the ones that were made in their place."""
    return sorted((row for row in rows if "reward" in row.values), key=lambda row: (row.timeline, row.step))


def reward_max(spec: RunSpec) -> float:
    """Each function gives 1 at most; where several datasets are one, a row has a score of one of them."""
    if isinstance(spec.trainer.dataset, tuple):
        return 1.0
    weights = spec.grpo.get("reward_weights") or [1.0] * len(spec.trainer.reward_funcs)
    return float(sum(weights))


def main() -> None:
    found: dict[str, list[Curve]] = {title: [] for title in (*RECIPES, *LOSSES)}
    with (
        tempfile.TemporaryDirectory() as name,
        ThreadPoolExecutor(AT_ONCE) as pool,
        console.status(f"{len(JOBS)} runs, {AT_ONCE} at a time") as status,
    ):
        curves = pool.map(lambda job: measure(job, Path(name)), JOBS)
        for number, (job, curve) in enumerate(zip(JOBS, curves, strict=True), start=1):
            found[job.title].append(curve)
            said = f"{job.title}, seed {job.seed}: {curve.start:.2f} to {curve.end:.2f}"
            status.update(f"{number} of {len(JOBS)} runs; {said}")
            console.print(said, highlight=False)
    show(found)


def show(found: dict[str, list[Curve]]) -> None:
    """Print the tables and write figures and picture."""
    for title, names in (("The recipes' tiny twins", RECIPES), ("Losses, two steps a batch", tuple(LOSSES))):
        table = Table("", "batches", "start", "end", "each seed's", "rollbacks", title=title)
        for name in names:
            curves = found[name]
            start, end = median(one.start for one in curves), median(one.end for one in curves)
            each = ", ".join(f"{one.start:.2f} to {one.end:.2f}" for one in curves)
            rollbacks = str(sum(one.rollbacks for one in curves))
            table.add_row(name, str(len(curves[0].rewards)), f"{start:.2f}", f"{end:.2f}", each, rollbacks)
        console.print(table)
    console.print(
        f"Reward as the share of the largest that there is; start and end: means of {ENDS} batches, medians of "
        f"{len(SEEDS)} seeds.",
        highlight=False,
        soft_wrap=True,
    )
    figures: dict[str, Any] = {
        name: [{"seed": one.seed, "reward": one.rewards, "rollbacks": one.rollbacks} for one in curves]
        for name, curves in found.items()
    }
    out = ROOT / "benchmarks" / "results" / "recipes.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(figures, indent=2) + "\n")
    panels = {name: [one.rewards for one in curves] for name, curves in found.items()}
    recipe_plot.draw(
        [{name: panels[name]} for name in RECIPES] + [{name: panels[name] for name in LOSSES}], PICTURE
    )
    console.print(f"Wrote {out.relative_to(ROOT)} and {PICTURE.relative_to(ROOT)}", highlight=False)


if __name__ == "__main__":
    main()
