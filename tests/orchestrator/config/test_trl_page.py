"""docs/trl.md against TRL's own lists: each field in one row, and each test that a row names is there."""

from __future__ import annotations

import re
from pathlib import Path

from grpo_orch.orchestrator.config.foreign_keys import grpo_table

TESTS = Path(__file__).parents[2]
PAGE = (TESTS.parent / "docs" / "trl.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.splitlines() if line.startswith("| `")
]
FIELDS = [(name, row[1]) for row in ROWS[14:] for name in re.findall(r"`(\w+)`", row[0])]


def test_every_field_is_in_one_row() -> None:
    assert sorted(name for name, _ in FIELDS) == sorted(grpo_table().keys)


def test_what_is_refused_is_said_to_be() -> None:
    assert {name for name, state in FIELDS if state == "refused"} == set(grpo_table().refused)


def test_every_test_that_is_named_is_there() -> None:
    named = re.findall(r"`(node/[\w/]+\.py)(?:::(\w+))?`", PAGE)
    assert len(named) > 10
    for file, test in named:
        assert f"def {test}(" in (TESTS / file).read_text() or not test, (file, test)
