"""The first page: how the run goes, on one axis, and what happened last."""

from __future__ import annotations

from typing import Any

from orchestrator.views.model import to_json
from orchestrator.web.page import Asked, Page
from orchestrator.web.watch import Look


def _data(look: Look, _: Asked) -> dict[str, Any]:
    return {"run": to_json(look.view)}


PAGE = Page("/", _data, "run.html", "Run")
