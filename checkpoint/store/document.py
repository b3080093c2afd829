"""A document: one small object in the store that holds one value of one type, rewritten in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from checkpoint.store.codec import from_json, to_json
from checkpoint.store.errors import Corrupt
from checkpoint.store.run_store import Store
from checkpoint.store.unreadable import Unreadable

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
