"""docs/trl_fields.py, of which docs/trl.md is made: each test that a row names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs import trl_fields
from docs.trl_fields import ARGUMENTS, FIELDS, Row, field_rows
from grpo_orch.orchestrator.config.foreign_keys import grpo_table

TESTS = Path(__file__).parents[2]


def test_every_named_test_exists() -> None:
    details = " ".join(row.details for row in (*ARGUMENTS, *FIELDS))
    named = re.findall(r"`(node/[\w/]+\.py)(?:::(\w+))?`", details)
    assert len(named) > 10
    for file, test in named:
        assert f"def {test}(" in (TESTS / file).read_text() or not test, (file, test)


def test_every_field_is_in_one_row() -> None:
    assert sorted(" ".join(row.names for row in field_rows()).split()) == sorted(grpo_table().keys)


@pytest.mark.parametrize("names", ["no_such_field", "learning_rate", "use_vllm"])
def test_unknown_second_and_refused_fields_fail(names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl_fields, "FIELDS", (*FIELDS, Row(names, "works")))
    with pytest.raises(ValueError, match=names):
        list(field_rows())
