"""The run.yaml that `grpo-orch init` writes."""

from __future__ import annotations

from importlib import resources


def init_text(name: str) -> str:
    """The commented template, for a run of that name."""
    text = resources.files(__package__).joinpath("template.yaml").read_text("utf-8")
    return text.replace("name: my-run", f"name: {name}", 1)
