"""`policies.fleet.deadline` is stored in UTC. What is said of it, and refused: `validated.txt`."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_orch.orchestrator.config.load import load
from tests.generators.config_world import changed, furnish

NOW_S = 1764000000.0  # 2025-11-24 16:00 UTC


@pytest.mark.parametrize(
    ("written", "stored"),
    [
        ("2025-11-30T18:00+01:00", "2025-11-30T17:00:00Z"),
        ("2025-11-30T18:00:30Z", "2025-11-30T18:00:30Z"),
        ("'2025-11-30 18:00-05:00'", "2025-11-30T23:00:00Z"),
        ("2025-11-30 18:00", "2025-11-30T18:00:00Z"),
    ],
)
def test_a_time_is_stored_in_utc(tmp_path: Path, written: str, stored: str) -> None:
    run_yaml = furnish(tmp_path)
    run_yaml.write_text(changed(("policies:\n", f"policies:\n  fleet: {{deadline: {written}}}\n")))
    found = load(run_yaml, now=lambda: NOW_S)
    assert found.spec.policies.fleet.deadline == stored
    assert bool(found.notices) == (written == "2025-11-30 18:00")  # which names no zone
