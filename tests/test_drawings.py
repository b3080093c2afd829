"""docs/phases.md shows the phase tables as they are."""

from __future__ import annotations

import pytest

from docs.draw import PAGE, page
from policies.model.phases import NODE_EDGES, ROLLBACK_EDGES, RUN_EDGES
from policies.model.vocabulary import NodePhase, RollbackStage, RunPhase


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "make drawings"


@pytest.mark.parametrize(
    ("edges", "edge"),
    [
        (NODE_EDGES, (NodePhase.GONE, NodePhase.BOOTING)),
        (RUN_EDGES, (RunPhase.FINISHED, RunPhase.STARTING)),
        (ROLLBACK_EDGES, (RollbackStage.FORKED, RollbackStage.RESUMED)),
    ],
    ids=["node", "run", "rollback"],
)
def test_an_edge_that_is_added_is_missed_in_it(
    edges: dict[tuple[object, object], str], edge: tuple[object, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(edges, edge, "a new reason")
    assert f"    {edge[0]} --> {edge[1]}\n" in page()
    assert f"| {edge[0]} | {edge[1]} | a new reason |\n" in page()
    assert PAGE.read_text() != page()
