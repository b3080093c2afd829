"""Optional data that cannot be read or evaluated: left out, and noted by name so that it can be reported.

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
        self._note(key, str(error).removeprefix(f"{key}: "))

    def note_failure(self, what: str, step: int, error: Exception) -> None:
        """Remember that something which only watches the run failed at a step.

        Args:
            what: for example "divergence detector".
        """
        self._note(what, f"failed at step {step}, which it leaves out: {type(error).__name__}: {error}")

    def _note(self, key: str, reason: str) -> None:
        reason = " ".join(reason.split())
        self.found[key] = reason if len(reason) <= SHOWN_CHARS else reason[: SHOWN_CHARS - 3] + "..."
