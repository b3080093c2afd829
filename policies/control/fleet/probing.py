"""What a parked run asks for: one rollout node, on spot and, where that may be, on demand in turn."""

from __future__ import annotations

from policies.model.state import RunState
from policies.model.vocabulary import Role


def may_probe(state: RunState) -> bool:
    """Whether a parked run asks for its one rollout node now: while its trainer drains it could not be used."""
    return not any(node.role is Role.TRAINER for node in state.nodes.values()) and not state.live(Role.ROLLOUT)
