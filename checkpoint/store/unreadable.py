"""Optional data that cannot be read: left out, and noted by object name so that it can be reported.

Control depends on run.json, the journal, the catalog, the timelines and on who has machines (controller.json,
secret.json): if one of these is damaged, its reader stops. Everything else may be absent because nobody has
written it yet; what is damaged counts as absent.
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
