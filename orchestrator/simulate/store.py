"""A run's store in memory, as each party reaches it: without trouble, without writes, or not at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from random import Random

from checkpoint.store.backends import BytesLike
from checkpoint.store.errors import AlreadyExists, NotFound, StoreUnavailable
from checkpoint.store.run_store import Entry, Store


class Trouble(Enum):
    """What a store does."""

    NONE = "it answers"
    NO_WRITES = "it takes no writes: a full disk, a quota, 503 for PUT"
    AWAY = "it answers nothing"


@dataclass(frozen=True, slots=True)
class Kept:
    """An object, and when the store says that it was written."""

    data: bytes
    modified_at: datetime


class Objects:
    """The objects, and the trouble that all parties have. Some writes that failed were done, or are late.

    Args:
        random: draws which of them.
        clock: seconds since the epoch, as the store's own clock tells them; it dates in whole ones.
    """

    def __init__(self, random: Random, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.random = random
        self.clock = clock
        self.folders: dict[str, dict[str, Kept]] = {}  # by the first part of their names: listings are many
        self.trouble = Trouble.NONE
        self.late: list[Callable[[], object]] = []

    def folder(self, key: str) -> dict[str, Kept]:
        return self.folders.setdefault(key.partition("/")[0], {})

    def write(self, key: str, data: bytes) -> None:
        """Write it, dated by the store's clock."""
        self.folder(key)[key] = Kept(data, datetime.fromtimestamp(math.floor(self.clock()), UTC))

    def create(self, key: str, data: bytes) -> None:
        """Write it now, unless there is one."""
        if key not in self.folder(key):
            self.write(key, data)

    def clear(self) -> None:
        self.trouble = Trouble.NONE
        for write in self.late:
            write()
        self.late.clear()


class SimulatedStore(Store):
    """One party's connection to the store, with its own `trouble`. `before` is called before each operation."""

    def __init__(self, objects: Objects) -> None:
        self.url = "sim://run"
        self.retry_s = 0.0
        self.trouble = Trouble.NONE
        self.before: Callable[[], None] | None = None
        self._objects = objects

    @property
    def writes(self) -> bool:
        return self._objects.trouble is Trouble.NONE is self.trouble

    def get_buffer(self, key: str) -> memoryview:
        self._read(key)
        folder = self._objects.folder(key)
        if key not in folder:
            raise NotFound(key)
        return memoryview(folder[key].data)

    def put(self, key: str, data: BytesLike) -> None:
        self._write(key)
        self._objects.write(key, bytes(data))

    def create(self, key: str, data: BytesLike) -> None:
        kept = bytes(data)
        try:
            self._write(key)
        except StoreUnavailable:
            match self._objects.random.randrange(8):
                case 0:  # done, and nobody hears of it
                    self._objects.create(key, kept)
                case 1:  # on its way for as long as the trouble lasts
                    self._objects.late.append(lambda: self._objects.create(key, kept))
            raise
        if key in self._objects.folder(key):
            raise AlreadyExists(key)
        self._objects.write(key, kept)

    def put_parts(self, key: str, parts: Callable[[], Iterable[BytesLike]]) -> None:
        self.put(key, b"".join(bytes(part) for part in parts()))

    def entries(self, prefix: str, *, after: str | None = None) -> list[Entry]:
        self._read(prefix)
        folder = self._objects.folder(prefix)
        found = (key for key in folder if key.startswith(f"{prefix}/") and (after is None or key > after))
        return [Entry(key, len(folder[key].data), folder[key].modified_at) for key in sorted(found)]

    def folders(self, prefix: str) -> list[str]:
        depth = prefix.count("/") + 2
        keys = (entry.key.split("/") for entry in self.entries(prefix))
        return sorted({"/".join(parts[:depth]) for parts in keys if len(parts) > depth})

    def delete(self, keys: Sequence[str]) -> None:
        self._write(str(keys))
        for key in keys:
            self._objects.folder(key).pop(key, None)

    def sweep(self, prefix: str, older_than_s: float) -> None: ...

    def _read(self, what: str) -> None:
        if self.before is not None:
            self.before()
        if Trouble.AWAY in (self._objects.trouble, self.trouble):
            raise StoreUnavailable(f"read {what}")

    def _write(self, what: str) -> None:
        if self.before is not None:
            self.before()
        if not self.writes:
            raise StoreUnavailable(f"write {what}")
