"""A plan on a terminal of 80 columns."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from grpo_orch.orchestrator.clouds.sky.records import PriceList
from grpo_orch.orchestrator.views.plan import render, render_short
from tests.orchestrator.plan.recipes import plan_of, price, spec_of


def drawn(part: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=80, color_system=None).print(part)
    return out.getvalue()


def lines(text: str) -> list[str]:
    """Without the spaces that only align."""
    return [" ".join(line.split()) for line in text.splitlines()]


@pytest.mark.parametrize("recipe", ["qwen-32b", "math-two-gpus", "gsm8k-zero2", "llama-one-card"])
def test_no_line_is_longer_than_the_screen_and_no_table_is_cut(recipe: str) -> None:
    text = drawn(render(plan_of(spec_of(recipe)))) + drawn(render_short(plan_of(spec_of(recipe))))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


def test_question_before_a_run_has_cost_space_and_warnings() -> None:
    spec = spec_of("qwen-32b")
    told = drawn(render_short(plan_of(spec)))
    assert "USD 6.06 an hour, 145.44 a day, about " in told
    assert "with 1 of 2 rollout nodes, the cheapest fleet size; all on demand 7.92 an hour" in " ".join(
        lines(told)
    )
    small = replace(spec, trainer=replace(spec.trainer, resources={"accelerators": "L4:1"}))
    told = " ".join(lines(drawn(render_short(plan_of(small)))))
    assert "DOES NOT FIT" in told
    assert "warning: trainer.resources.accelerators: training needs" in told


def test_page_shows_the_printed_plan() -> None:
    page = (Path(__file__).parents[3] / "docs" / "plan.md").read_text()
    example = page.split("```")[1].strip().splitlines()
    prices = PriceList((price("H200", 1, 3.96, 2.38),), {"aws": "2026-11-23"}, {})
    printed = drawn(render(plan_of(spec_of("qwen-32b"), prices=prices))).splitlines()
    assert example == [line.rstrip() for line in printed][: len(example)]
    assert "H200 140 1 x 3.96 aws 1 x 2.38 aws spot" in [" ".join(line.split()) for line in printed]


def test_run_with_little_known_is_planned() -> None:
    spec = spec_of("math-two-gpus")
    strange = replace(spec, trainer=replace(spec.trainer, model="nobody/nothing"))
    told = lines(drawn(render(plan_of(strange))))
    assert told[0] == "math-two-gpus: nobody/nothing, all weights"
    assert "not known: nobody/nothing: its size is unknown (it is nobody's)" in told
    assert "cost" not in drawn(render_short(plan_of(strange)))
