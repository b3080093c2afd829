"""How many processes a file starts. What is said of it, and refused: `validated.txt`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_orch.orchestrator.config.load import load_spec
from grpo_orch.policies.model.spec import gpu_counts, processes_of
from tests.generators.config_world import NO_REHEARSAL, SKY, changed, furnish


@pytest.mark.parametrize(
    ("resources", "counts"),
    [
        ({}, {None}),
        ({"accelerators": "H100"}, {1}),
        ({"accelerators": "A100-80GB:8"}, {8}),
        ({"accelerators": {"H100": 8}}, {8}),
        ({"accelerators": {"H100": 8, "A100": 4}}, {8, 4}),
        ({"accelerators": ["H100:2", "A100:2"]}, {2}),
        ({"accelerators": "L4:0.5"}, {None}),
        ({"accelerators": ["H100:many", "H100:2"]}, {None, 2}),
        ({"accelerators": "H100:8", "any_of": [{"infra": "aws"}, {"accelerators": "A100:4"}]}, {8, 4}),
        ({"ordered": [{"accelerators": "H100:8"}, {"accelerators": {"B200": 8}}]}, {8}),
    ],
)
def test_the_gpus_of_a_machine(resources: dict[str, Any], counts: set[int | None]) -> None:
    assert gpu_counts(resources) == counts


@pytest.mark.parametrize(
    ("lines", "processes"),
    [
        ("resources: {accelerators: H100:8}", 8),
        ("resources: {accelerators: 'H100:8'}\n  accelerate: {num_processes: 7}", 7),
        ("resources: {accelerators: 'H100:8'}\n  accelerate: {num_processes: -1}", 8),
        ("resources: {accelerators: H100}", 1),
        ("resources: {cpus: 4}", 1),
    ],
)
def test_the_accelerate_config_goes_before_the_gpus(lines: str, processes: int, tmp_path: Path) -> None:
    run_yaml = furnish(tmp_path)
    run_yaml.write_text(changed(NO_REHEARSAL, SKY, ("  reward_funcs", f"  {lines}\n  reward_funcs")))
    assert processes_of(load_spec(run_yaml)) == processes
