"""How a run goes on that has ended before its last step, in the same words everywhere."""

from __future__ import annotations

from shlex import quote

from policies.control.rollback.begin import NAME_A_TARGET
from policies.model.vocabulary import RunPhase


def going_on(phase: RunPhase, reason: str, store: str) -> str:
    """What its user can do; empty where there is nothing to go on with."""
    match phase:
        case RunPhase.FAILED:
            return f"once the cause is repaired, continue with: grpo-orch resume {quote(store)}"
        case RunPhase.PAUSED if "`budget.usd" in reason:
            return f"go on with: grpo-orch resume --budget-usd NUMBER {quote(store)}"
        case RunPhase.PAUSED if NAME_A_TARGET in reason:
            return f"see: grpo-orch checkpoints ls {quote(store)}"
        case RunPhase.PAUSED:
            return f"go on with: grpo-orch rollback {quote(store)}"
        case RunPhase.GAVE_UP:
            return f"go on by hand, with something changed: grpo-orch rollback {quote(store)}"
        case _:
            return ""
