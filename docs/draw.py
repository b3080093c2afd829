"""Writes docs/phases.md from the tables in policies/model/phases.py: `make drawings`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from grpo_orch.policies.model.phases import NODE_EDGES, ROLLBACK_EDGES, RUN_EDGES, Phase

PAGE = Path(__file__).parent / "phases.md"
INTRODUCTION = """# Phases

Every move that a node, a run and a rollback can make; any other raises `IllegalMove`. `make drawings` writes this
page from the tables in `policies/model/phases.py`. The dot is the beginning, the ringed dot the end.
"""


def page() -> str:
    """Return the page: a drawing and a table of edges for each phase table."""
    sections = [
        _section("Node", NODE_EDGES),
        _section("Run", RUN_EDGES),
        _section("Rollback", ROLLBACK_EDGES),
    ]
    return "\n".join([INTRODUCTION, *sections])


def _section(title: str, edges: Mapping[tuple[Phase, Phase], str]) -> str:
    rows: list[str] = [f"| {old or 'none'} | {new or 'none'} | {reason} |" for (old, new), reason in edges.items()]
    lines: list[str] = [
        "```mermaid",
        "stateDiagram-v2",
        *_arrows(edges),
        "```",
        "",
        "| from | to | why |",
        "|---|---|---|",
        *rows,
    ]
    return "\n".join([f"## {title}", "", *lines, ""])


def _arrows(edges: Mapping[tuple[Phase, Phase], str]) -> list[str]:
    """The edges, and where there is no phase before the first or after the last, `[*]` for it."""
    first: Phase = next(iter(edges))[0]
    left = {old for old, _ in edges}
    last: dict[Phase, None] = dict.fromkeys(new for _, new in edges if new not in left)
    pairs = [*([] if first is None else [(None, first)]), *edges, *((phase, None) for phase in last)]
    return [f"    {old or '[*]'} --> {new or '[*]'}" for old, new in pairs]


if __name__ == "__main__":
    PAGE.write_text(page())
