"""docs/phases.md shows the phase tables as they are."""

from __future__ import annotations

from typing import Any

import pytest

from docs.draw import PAGE, page
from grpo_orch.policies.model.phases import NODE_EDGES
from grpo_orch.policies.model.vocabulary import NodePhase


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "make drawings"


def test_added_edge_is_missed_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    edges: dict[Any, str] = NODE_EDGES
    monkeypatch.setitem(edges, (NodePhase.GONE, NodePhase.BOOTING), "a new reason")
    assert f"    {NodePhase.GONE} --> {NodePhase.BOOTING}\n" in page()
    assert f"| {NodePhase.GONE} | {NodePhase.BOOTING} | a new reason |\n" in page()
    assert PAGE.read_text() != page()
