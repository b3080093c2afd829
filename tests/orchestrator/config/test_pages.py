"""What the pages for readers of curves say is what there is: recorded figures, tests, links."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

import pytest

from grpo_orch.orchestrator.cli.prepare import recipe_lines
from grpo_orch.orchestrator.config.load import load
from grpo_orch.policies.sizing.memory import GIB
from tests.generators.recorded import recorded
from tests.orchestrator.plan.recipes import plan_of, spec_of

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = [
    "start.md",
    "tutorial.md",
    "why-not.md",
    "operations.md",
    "reading-plots.md",
    "pitfalls.md",
    *(f"recipes/{name}.md" for name in recipe_lines()),
]


def test_the_recorded_figures_are_the_recordings() -> None:
    table = [
        line.strip("| ").split(" | ")
        for line in (DOCS / "reading-plots.md").read_text().splitlines()
        if "|" in line
    ]
    head, _, *rows = table
    runs = {name: points for name, _, points in recorded("seen")}
    assert len(rows) > 5
    for name, _, *cells in rows:
        for metric, cell in zip(head[2:], cells, strict=True):
            values = [one for point in runs[name] if (one := point.get(metric)) is not None]
            assert cell == f"{median(values[:7]):.2g} to {median(values[-7:]):.2g}", (name, metric)


@pytest.mark.parametrize("recipe", [name for name in recipe_lines() if name != "tiny"])
def test_the_arithmetic_of_a_recipe_is_its_plans(recipe: str) -> None:
    """Roughly, as it is meant: a plan that is worked out more finely need not touch the page."""
    spec = spec_of(recipe)
    plan, steps = plan_of(spec), spec.grpo["max_steps"]
    assert plan.trainer is not None
    assert plan.step is not None
    sent = plan.sync
    named = {
        "trainer, GiB": sum(plan.trainer.memory.values()) / GIB,
        "of that, weights": plan.trainer.memory["weights"] / GIB,
        "a step,": plan.step.step_s,
        "of that generation": plan.step.generate_s,
        f"{steps:,} steps": plan.step.step_s * steps / 3600,
        "what a step sends": sent and sent.size_bytes / 1e6,
        "that at 10 Gb/s": sent and sent.seconds[10],
    }
    rows = re.findall(
        r"^\| ([\w, ]+) \| ([\d.]+) \|$", (DOCS / "recipes" / f"{recipe}.md").read_text(), re.MULTILINE
    )
    assert len(rows) > 3
    for what, figure in rows:
        (expected,) = [value for name, value in named.items() if what.startswith(name)]
        assert float(figure) == pytest.approx(expected, rel=0.3), what


def test_the_tutorials_files_are_valid(tmp_path: Path) -> None:
    run, spot = re.findall(r"```yaml\n(.*?)```", (DOCS / "tutorial.md").read_text(), re.DOTALL)
    (tmp_path / "run.yaml").write_text(run)
    (tmp_path / "spot.yaml").write_text(spot)
    assert load(tmp_path / "run.yaml", lambda: 1).spec.rollout.replicas.max == 0
    assert load(tmp_path / "spot.yaml", lambda: 0).spec.rollout.max_staleness == 1


@pytest.mark.parametrize("page", PAGES)
def test_named_tests_exist(page: str) -> None:
    for file, name in re.findall(r"`([\w/]+\.py)(?:::(test_\w+))?`", (DOCS / page).read_text()):
        found = [path for path in (ROOT / "tests").rglob(Path(file).name) if path.as_posix().endswith(file)]
        if file.startswith("test_") or "/test_" in file:
            assert found, file
            assert not name or f"def {name}(" in found[0].read_text(), name
