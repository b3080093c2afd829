"""The stored checkpoints, and why each of them stays."""

from __future__ import annotations

from typing import Any

from orchestrator.views.words.kept import kept_as
from orchestrator.web.page import Asked, Page
from orchestrator.web.watch import Look


def _data(look: Look, _: Asked) -> dict[str, Any]:
    reasons = kept_as(look.checkpoints, look.record.spec, look.state.forks, look.trainer)
    listed = [
        {
            "version": one.version,
            "created_at_s": one.created_at_s,
            "size_bytes": one.size_bytes,
            "pinned": one.pinned,
            "kept_as": list(reasons[one.at]),
        }
        for one in reversed(look.checkpoints)
    ]
    return {"checkpoints": listed}


PAGE = Page("/checkpoints", _data, "checkpoints.html", "Checkpoints")
