"""Optional data that cannot be read: noted by its object's name, so that it can be told, and left out.

Control stands on run.json, the journal, the catalog, the timelines, and on who has machines (controller.json,
secret.json): where one of these is damaged, whoever reads it stops. All else that is looked at has a meaning also
while it is not there, for nobody has said it yet; what is damaged counts as not there.
"""

from __future__ import annotations

from checkpoint.store.errors import Corrupt

SHOWN_CHARS = 300


class Unreadable:
    """`found` is why, by object name."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def note(self, key: str, error: Corrupt) -> None:
        """Remember that an object, or a part of it, cannot be read."""
        why = " ".join(str(error).removeprefix(f"{key}: ").split())
        self.found[key] = why if len(why) <= SHOWN_CHARS else why[: SHOWN_CHARS - 3] + "..."
