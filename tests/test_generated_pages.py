"""The pages of docs/ that `make pages` writes show the code as it is, and all of it."""

from __future__ import annotations

import inspect
import re
from typing import Any
from xml.etree import ElementTree

import pytest

from docs.generate import DOCS, MADE, pages, phases_drawing, phases_page
from grpo_orch.orchestrator.control import exporter
from grpo_orch.orchestrator.gateway.surface import metrics
from grpo_orch.policies.model import events
from grpo_orch.policies.model.phases import NODE_EDGES
from grpo_orch.policies.model.vocabulary import NodePhase
from grpo_orch.tasks.rollout.vllm.guard import Guard


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return pages()


def rows(page: str) -> list[list[str]]:
    """The cells of every table's rows, heads included."""
    return [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]


def test_pages_are_current(made: dict[str, str]) -> None:
    assert [name for name, text in made.items() if (DOCS / name).read_text() != text] == [], "make pages"


def test_added_edge_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    edges: dict[Any, str] = NODE_EDGES
    before = ElementTree.fromstring(phases_drawing(edges))  # our own
    monkeypatch.setitem(edges, (NodePhase.GONE, NodePhase.BOOTING), "a new reason")
    after = ElementTree.fromstring(phases_drawing(edges))  # our own
    titles = [[title.text for title in drawing.findall(".//{*}title")] for drawing in (before, after)]
    assert titles[1] == [*titles[0], f"{NodePhase.GONE} to {NodePhase.BOOTING}"]
    assert len(titles[0]) == len(edges) - 1
    assert f"| {NodePhase.GONE} | {NodePhase.BOOTING} | a new reason |\n" in phases_page()


def test_hand_written_pages_stay_short() -> None:
    """A reader's time is the limit: what is added takes the place of something."""
    pages = [*DOCS.rglob("*.md"), *(DOCS.parent / name for name in ("README.md", "CONTRIBUTING.md"))]
    by_hand = [page.read_text() for page in pages if MADE not in page.read_text()]
    tables = re.compile(r"<!-- \w+ ?\S* -->\n.*?<!-- end -->", re.DOTALL)
    assert sum(len(tables.sub("", text).split()) for text in by_hand) <= 45_000


def test_site_loads_nothing_from_other_hosts() -> None:
    """MkDocs' theme would load Mermaid for a drawing in its language."""
    loads = re.compile(r"```mermaid|!\[[^]]*\]\(http|<(script|img|link|iframe)\b")
    assert [path.name for path in DOCS.rglob("*.md") if loads.search(path.read_text())] == []


def test_every_metric_is_listed(made: dict[str, str]) -> None:
    """Also those that are exported only while they have a value."""
    source = inspect.getsource(exporter) + inspect.getsource(metrics)
    calls = r'(?:(?:_gauges?|_counter|_Histogram|MetricFamily)\(\s*|yield )f?"([a-z_{}]+)'
    found = [name.removeprefix("grpo_").removeprefix("gateway_") for name in re.findall(calls, source)]
    named = [
        name.replace("{name}", "kl") for name in found if not name.startswith("{")
    ]  # without the helpers' own
    listed = [re.sub(r"^`grpo_(gateway_)?|(_total)?`$", "", row[0]) for row in rows(made["metrics.md"])]
    assert len(named) > 30
    assert set(named) - set(listed) == set()


def test_every_event_is_listed(made: dict[str, str]) -> None:
    assert {f"`{name}`" for name in events.EVENT_TYPES} <= {row[0] for row in rows(made["events.md"])}


def test_every_request_is_listed_with_its_meaning(made: dict[str, str]) -> None:
    cases = re.findall(r'case \("[A-Z]+"', inspect.getsource(Guard))
    gateway, _, node = made["http.md"].partition("## Rollout node")
    assert len(rows(node)) == 1 + len(cases)
    assert len(rows(gateway)) > 15
    assert [row for row in rows(made["http.md"]) if not row[-1] or row[-1].startswith("`")] == []
