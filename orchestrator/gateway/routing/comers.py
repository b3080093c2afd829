"""Nodes that are no members yet: what they say they are at, and since when they have not got on."""

from __future__ import annotations

from collections.abc import Container

from policies.serving.joining import Coming, Stage, gets_on

COMERS_MAX = 256  # those heard last; of one that has fallen silent the controller has yet to learn how long


class Comers:
    """What they have told."""

    def __init__(self) -> None:
        # By node: its stage now, the one at which it last got on, and when that was.
        self._told: dict[str, tuple[Stage, Stage, float]] = {}

    def tell(self, node: str, stage: Stage, now_s: float) -> None:
        """A node says what it is at."""
        before = self._told.pop(node, None)
        moved = before is None or gets_on(before[1], stage)
        self._told[node] = (stage, stage, now_s) if before is None or moved else (stage, *before[1:])
        while len(self._told) > COMERS_MAX:
            del self._told[next(iter(self._told))]

    def status(self, members: Container[str], now_s: float) -> list[Coming]:
        """Those that are not members; who has become one begins anew should it have to come again."""
        self._told = {node: told for node, told in self._told.items() if node not in members}
        return [Coming(node, stage, now_s - at_s) for node, (stage, _, at_s) in self._told.items()]
