"""Long work cut into slices, so that the event loop serves other connections in between.

Reading a step of thousands of long prompts and sending it on takes this process seconds. Announcements and the
trainer's own connection wait for one slice at most.
"""

from __future__ import annotations

import asyncio

SLICE_S = 0.01


class TimeSlices:
    """Limits long work on one event loop to SLICE_S per round of the loop."""

    def __init__(self) -> None:
        self._started_s: float | None = None  # when this round's slice began

    async def take(self) -> None:
        """Return while this round of the event loop has time left for long work, else wait for a later round."""
        loop = asyncio.get_running_loop()
        while True:
            if self._started_s is None:
                self._started_s = loop.time()
                loop.call_soon(self._end)
                return
            if loop.time() - self._started_s < SLICE_S:
                return
            await asyncio.sleep(0)

    def _end(self) -> None:
        self._started_s = None
