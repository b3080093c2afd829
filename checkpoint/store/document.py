"""A document: one small object in the store that holds one value of one type, rewritten in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from checkpoint.store.codec import from_json, to_json
from checkpoint.store.errors import Corrupt
from checkpoint.store.run_store import Store

# Optional data that cannot be read or evaluated: left out, and noted by name so that it can be reported.
#
# Control depends on run.json, the journal, the catalog, the timelines and on who has machines (controller.json,
# secret.json): if one of these is damaged, its reader stops. Everything else may be absent because nobody has
# written it yet; what is damaged counts as absent.

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


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Document(Generic[T]):
    """Where a document is and what it holds.

    `check`: as `from_json` takes it.
    """

    key: str
    cls: type[T]
    check: Callable[[T, str], object] | None = None

    def write(self, store: Store, value: T) -> None:
        store.put(self.key, to_json(value))

    def read(self, store: Store) -> T | None:
        """The value, or None where there is no such object. Raises Corrupt."""
        data = store.get_or_none(self.key)
        return None if data is None else from_json(data, self.cls, self.key, self.check)

    def drop(self, store: Store) -> None:
        store.delete([self.key])


class OptionalDocument(Document[T]):
    """A document that control can do without: read with `unreadable`, a damaged one is noted there and counts as
    absent."""

    def read(self, store: Store, unreadable: Unreadable | None = None) -> T | None:
        """The value, or None where there is none. Raises Corrupt where there is no `unreadable` to note it."""
        try:
            return super().read(store)
        except Corrupt as error:
            if unreadable is None:
                raise
            unreadable.note(self.key, error)
            return None
