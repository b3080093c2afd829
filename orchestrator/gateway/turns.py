"""Long work cut into pieces: between two of them the event loop hears everybody else.

Reading a step of thousands of long prompts and sending it on is seconds of work for this process. Announcements
and the trainer's own connection wait for no more than a piece of it.
"""

from __future__ import annotations

import asyncio

PIECE_S = 0.01


class TimeSlices:
    """Shared by all long work on one event loop."""

    def __init__(self) -> None:
        self._began_s: float | None = None  # the piece of this round of the loop

    async def take(self) -> None:
        """Return at once while this round of the event loop has time left for such work, else in a later round."""
        loop = asyncio.get_running_loop()
        while True:
            if self._began_s is None:
                self._began_s = loop.time()
                loop.call_soon(self._over)
                return
            if loop.time() - self._began_s < PIECE_S:
                return
            await asyncio.sleep(0)

    def _over(self) -> None:
        self._began_s = None
