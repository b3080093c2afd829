"""How the last policies came to the members: how long after it was wanted, and what it took each of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from policies.serving.gateway_status import VersionSpread
from policies.serving.member import Row
from policies.serving.wire import Announce, PolicyStages

KEPT = 8


@dataclass(slots=True)
class _Version:
    spread: VersionSpread
    wanted_at_s: float
    waited_for: set[str]  # nodes


class Spreads:
    """Those of one gateway. `now_s` is any clock that does not go back.

    Who comes later is not waited for: how long that takes is told by the node itself, as `join_s`.
    """

    def __init__(self) -> None:
        self._last: deque[_Version] = deque(maxlen=KEPT)

    @property
    def last(self) -> list[VersionSpread]:
        """The last policies that were wanted, the oldest first."""
        return [one.spread for one in self._last]

    def want(self, label: str, rows: Iterable[Row], now_s: float) -> None:
        """A policy is wanted, of members that may hold it already."""
        if all(one.spread.policy != label for one in self._last):
            nodes = {row.node for row in rows if row.policy != label}
            self._last.append(_Version(VersionSpread(label, len(nodes)), now_s, nodes))

    def hear(self, node: str, said: Announce, now_s: float) -> None:
        """A member says what it holds."""
        for one in self._last:
            if one.spread.policy == said.policy and node in one.waited_for:
                one.waited_for.remove(node)
                one.spread = _with(one.spread, said.stages or PolicyStages(""), now_s - one.wanted_at_s)


def _with(spread: VersionSpread, took: PolicyStages, ready_s: float) -> VersionSpread:
    return replace(
        spread,
        ready=spread.ready + 1,
        first_ready_s=spread.first_ready_s if spread.ready else ready_s,
        last_ready_s=ready_s,
        fetch_s=max(spread.fetch_s, took.fetch_s),
        fetched_bytes=max(spread.fetched_bytes, took.fetched_bytes),
        load_s=max(spread.load_s, took.load_s),
    )
