"""Announcements that are held open until there is something to answer: that is how nodes hear of it at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from policies.serving.wire import HOLD_S


class Announcements:
    """Those that are held now, at most one for each node."""

    def __init__(self) -> None:
        self._held: dict[str, asyncio.Future[None]] = {}

    async def hold(self, node: str, lost: Callable[[], None]) -> None:
        """Return when the announcement is to be answered, after HOLD_S at the latest.

        Args:
            node: that announced itself; what is held of it already must have been answered.
            lost: called when the node's connection breaks meanwhile, which cancels this.
        """
        held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._held[node] = held
        try:
            await asyncio.wait({held}, timeout=HOLD_S)
        except asyncio.CancelledError:
            if self._held.get(node) is held:
                lost()
            raise
        finally:
            if self._held.get(node) is held:
                del self._held[node]

    def answer(self, node: str) -> None:
        """Answer the node's announcement now, if one is held."""
        held = self._held.pop(node, None)
        if held is not None and not held.done():
            held.set_result(None)

    def answer_all(self) -> None:
        """Answer every announcement that is held."""
        for node in list(self._held):
            self.answer(node)
