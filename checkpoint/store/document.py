"""A document: a small JSON object in the store with a value of one type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from grpo_orch.checkpoint.store.codec import from_json, to_json
from grpo_orch.checkpoint.store.errors import Corrupt
from grpo_orch.checkpoint.store.run_store import Store

# Unreadable optional data: skipped, and noted by name so that it can be reported.
#
# Control depends on run.json, the journal, the catalog, the timelines, controller.json and secret.json: if one of
# these is damaged, its reader stops. Everything else may be absent because it is not written yet; damaged data
# counts as absent.

SHOWN_CHARS = 300


class UnreadableDocuments:
    """The unreadable objects: `found` has the reason by name."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def note(self, key: str, error: Corrupt) -> None:
        """Note that an object, or a part of it, cannot be read."""
        self._note(key, str(error).removeprefix(f"{key}: "))

    def note_failure(self, what: str, step: int, error: Exception) -> None:
        """Note that an observer of the run failed at a step.

        Args:
            what: for example "divergence detector".
        """
        self._note(what, f"failed at step {step}, which it skips: {type(error).__name__}: {error}")

    def _note(self, key: str, reason: str) -> None:
        reason = " ".join(reason.split())
        self.found[key] = reason if len(reason) <= SHOWN_CHARS else reason[: SHOWN_CHARS - 3] + "..."


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Document(Generic[T]):
    """A document's key and type. `check` is that of `from_json`."""

    key: str
    cls: type[T]
    check: Callable[[T, str], object] | None = None

    def write(self, store: Store, value: T) -> None:
        store.put(self.key, to_json(value))

    def read(self, store: Store, unreadable: UnreadableDocuments | None = None) -> T | None:
        """Return the value, or None if the object does not exist.

        A damaged object, if control does not depend on it, is noted in `unreadable`; without `unreadable`, raises
        Corrupt.
        """
        data = store.get_or_none(self.key)
        try:
            return None if data is None else from_json(data, self.cls, self.key, self.check)
        except Corrupt as error:
            if unreadable is None:
                raise
            unreadable.note(self.key, error)
            return None

    def drop(self, store: Store) -> None:
        store.delete([self.key])
