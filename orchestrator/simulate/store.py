"""A run's store in memory. Each party may reach it, reach it read-only, or not at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from random import Random

from grpo_orch.checkpoint.store.backends import BytesLike
from grpo_orch.checkpoint.store.errors import AlreadyExists, NotFound, StoreUnavailable
from grpo_orch.checkpoint.store.run_store import Entry, Store


class Trouble(Enum):
    """State of a store or of one connection to it."""

    NONE = "available"
    NO_WRITES = "writes fail: a full disk, a quota, 503 for PUT"
    AWAY = "unavailable"


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object and its modification time by the store's clock."""

    data: bytes
    modified_at: datetime


class Objects:
    """The objects, and trouble that affects all parties. Some failed writes succeed anyway, at once or later.

    Args:
        random: selects these writes.
        clock: the store's clock, seconds since the epoch; objects are dated in whole seconds.
    """

    def __init__(self, random: Random, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.random = random
        self.clock = clock
        self.folders: dict[str, dict[str, StoredObject]] = {}  # by the first part of the key, for fast listings
        self.trouble = Trouble.NONE
        self.late: list[Callable[[], object]] = []

    def folder(self, key: str) -> dict[str, StoredObject]:
        return self.folders.setdefault(key.partition("/")[0], {})

    def write(self, key: str, data: bytes) -> None:
        """Write an object, dated by the store's clock."""
        self.folder(key)[key] = StoredObject(data, datetime.fromtimestamp(math.floor(self.clock()), UTC))

    def create(self, key: str, data: bytes) -> None:
        """Write an object unless it exists."""
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
                case 0:  # written, but the answer is lost
                    self._objects.create(key, kept)
                case 1:  # written when the trouble ends
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
