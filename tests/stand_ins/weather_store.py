"""A run's store in memory, as each party reaches it: without trouble, without writes, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from enum import Enum
from random import Random

from checkpoint.store.backends import BytesLike
from checkpoint.store.errors import AlreadyExists, NotFound, StoreUnavailable
from checkpoint.store.run_store import Entry, Store

_DATE = datetime(2026, 1, 1, tzinfo=UTC)


class Weather(Enum):
    """What a store does."""

    FAIR = "fair"
    NO_WRITES = "it takes no writes: a full disk, a quota, 503 for PUT"
    AWAY = "it answers nothing"


class Sky:
    """The objects, and the weather for all parties. Some writes that failed were done, or are late."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.objects: dict[str, bytes] = {}
        self.weather = Weather.FAIR
        self.late: list[Callable[[], object]] = []

    def clear(self) -> None:
        self.weather = Weather.FAIR
        for write in self.late:
            write()
        self.late.clear()


class WeatherStore(Store):
    """One party's connection to the store, with its own `weather`. `before` is called before each operation."""

    def __init__(self, sky: Sky) -> None:
        self.url = "sim://run"
        self.retry_s = 0.0
        self.weather = Weather.FAIR
        self.before: Callable[[], None] | None = None
        self._sky = sky

    @property
    def writes(self) -> bool:
        return self._sky.weather is Weather.FAIR is self.weather

    def get_buffer(self, key: str) -> memoryview:
        self._read(key)
        if key not in self._sky.objects:
            raise NotFound(key)
        return memoryview(self._sky.objects[key])

    def put(self, key: str, data: BytesLike) -> None:
        self._write(key)
        self._sky.objects[key] = bytes(data)

    def create(self, key: str, data: BytesLike) -> None:
        kept = bytes(data)
        try:
            self._write(key)
        except StoreUnavailable:
            match self._sky.random.randrange(8):
                case 0:  # done, and nobody hears of it
                    self._sky.objects.setdefault(key, kept)
                case 1:  # on its way for as long as the trouble lasts
                    self._sky.late.append(lambda: self._sky.objects.setdefault(key, kept))
            raise
        if key in self._sky.objects:
            raise AlreadyExists(key)
        self._sky.objects[key] = kept

    def put_parts(self, key: str, parts: Callable[[], Iterable[BytesLike]]) -> None:
        self.put(key, b"".join(bytes(part) for part in parts()))

    def entries(self, prefix: str, *, after: str | None = None) -> list[Entry]:
        self._read(prefix)
        found = (
            key for key in self._sky.objects if key.startswith(f"{prefix}/") and (after is None or key > after)
        )
        return [Entry(key, len(self._sky.objects[key]), _DATE) for key in sorted(found)]

    def folders(self, prefix: str) -> list[str]:
        depth = prefix.count("/") + 2
        keys = (entry.key.split("/") for entry in self.entries(prefix))
        return sorted({"/".join(parts[:depth]) for parts in keys if len(parts) > depth})

    def delete(self, keys: Sequence[str]) -> None:
        self._write(str(keys))
        for key in keys:
            self._sky.objects.pop(key, None)

    def sweep(self, prefix: str, older_than_s: float) -> None: ...

    def _read(self, what: str) -> None:
        if self.before is not None:
            self.before()
        if Weather.AWAY in (self._sky.weather, self.weather):
            raise StoreUnavailable(f"read {what}")

    def _write(self, what: str) -> None:
        if self.before is not None:
            self.before()
        if not self.writes:
            raise StoreUnavailable(f"write {what}")
