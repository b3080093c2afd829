"""Nodes that fetch or start something before they are of use: what they are at, since when they stand still."""

from __future__ import annotations

from collections.abc import Container

from policies.model.vocabulary import machine_of
from policies.serving.joining import Coming, Stage, gets_on

COMERS_MAX = 256  # those heard last; of one that has fallen silent the controller has yet to learn how long


class Comers:
    """What they have told. `moves` counts how often any of them has got on."""

    def __init__(self) -> None:
        self.moves = 0
        # By node: its stage now, the one at which it last got on, and when that was.
        self._told: dict[str, tuple[Stage, Stage, float]] = {}

    def tell(self, node: str, stage: Stage, now_s: float) -> None:
        """A node says what it is at."""
        before = self._told.pop(node, None)
        if before is None or gets_on(before[1], stage):
            self._told[node] = stage, stage, now_s
            self.moves += 1
        else:
            self._told[node] = stage, *before[1:]
        while len(self._told) > COMERS_MAX:
            del self._told[next(iter(self._told))]

    def forget(self, node: str) -> None:
        """It is of use: should it have to come again, it begins anew."""
        self._told.pop(node, None)

    def status(self, machines: Container[str], now_s: float) -> list[Coming]:
        """Those that are not on these machines, which have members."""
        told = [(node, *told) for node, told in self._told.items() if machine_of(node) not in machines]
        return [Coming(node, stage, now_s - at_s) for node, stage, _, at_s in told]
