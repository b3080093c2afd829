"""Each rollback with its evidence: what was seen, where it went back to, what it changed, how it went."""

from __future__ import annotations

from typing import Any

from orchestrator.views.words.lineage import (
    change_words,
    changes_of,
    skipped_of,
    skipped_words,
    stage_words,
    start_words,
)
from orchestrator.web.page import Asked, Page
from orchestrator.web.watch import Look
from policies.ledger.abandoned import abandoned
from policies.model.events import Diverged


def _data(look: Look, _: Asked) -> dict[str, Any]:
    return {"rollbacks": look.once("rollbacks", lambda: _rollbacks(look))}


def _rollbacks(look: Look) -> list[dict[str, Any]]:
    state = look.state
    seen = [event for _, _, events in look.history for event in events if isinstance(event, Diverged)]
    befores = [None, *(one.fork for one in state.rollbacks)]
    found = []
    for one, before, lost in zip(state.rollbacks, befores, abandoned(look.rows, state.rollbacks), strict=False):
        trips = [event for event in seen if event.timeline == (0 if before is None else before.timeline)]
        changed = [
            change_words(changes_of(one.fork, before, look.record.spec.grpo)),
            skipped_words(skipped_of(one.fork, before)),
        ]
        found.append(
            {
                "timeline": one.fork.timeline,
                "cause": one.cause,
                "reason": one.fork.reason,
                "from_step": one.from_step,
                "start": start_words(one.fork.start),
                "changed": "; ".join(part for part in changed if part) or "the sampling seeds alone",
                "evidence": list(trips[-1].evidence) if trips else [],
                "onset_step": trips[-1].onset_step if trips else None,
                "steps_abandoned": lost.steps,
                "tokens_abandoned": lost.tokens,
                "outcome": stage_words(one)
                if one.passed or one is state.rollbacks[-1]
                else "was left by the next",
            }
        )
    return found[::-1]


PAGE = Page("/rollbacks", _data, "rollbacks.html", "Rollbacks")
