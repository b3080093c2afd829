"""A store between whose operations anything can happen, and threads that run one operation at a time.

Each operation of an actor waits for its turn; the test says whose turn it is and what becomes of the operation. So
a run is a list of choices, and the same choices make the same run. What an actor's own reading threads fetch
belongs to the turn before: these objects never change.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TypeVar

from grpo_orch.checkpoint.store.backends import BytesLike
from grpo_orch.checkpoint.store.errors import AlreadyExists, StoreUnavailable
from grpo_orch.checkpoint.store.run_store import Entry, Store

T = TypeVar("T")


class Fate(Enum):
    """What becomes of one operation."""

    DONE = "done"
    LOST = "done, its answer lost; the retry meets what it made"
    AWAY = "not done, and the writer is told that the store is away"
    DONE_AWAY = "done, and the writer is told that the store is away"
    LATE = "the writer is told that the store is away; it is done some time later"
    DIES_BEFORE = "the writer dies before it"
    DIES_AFTER = "done, and the writer dies before it hears of it"


class Died(BaseException):
    """Ends an actor's thread, past every `except Exception`."""


class Actor(threading.Thread):
    """One process: `body` runs until it ends or dies, held before each operation on its store."""

    def __init__(self, name: str, store: Store, body: Callable[[Store], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._body = body
        self._store = ScriptedStore(store, self)
        self._go = threading.Semaphore(0)
        self._held = threading.Semaphore(0)
        self._fate = Fate.DONE
        self.over = False
        self.late: list[Callable[[], None]] = []  # operations that are still to arrive
        self.error: Exception | None = None
        self.start()
        self._held.acquire()

    def run(self) -> None:
        try:
            self._body(self._store)
        except Died:
            pass
        except Exception as error:  # noqa: BLE001  # the test raises it where it is seen
            self.error = error
        finally:
            self.over = True
            self._held.release()

    def turn(self, fate: Fate) -> None:
        """Let the held operation happen; return when the next one is held or the actor is over."""
        self._fate = fate
        self._go.release()
        self._held.acquire()
        if self.error is not None:
            raise self.error

    def held(self) -> Fate:
        """Wait for this actor's turn. Called by its own thread."""
        self._held.release()
        self._go.acquire()
        return self._fate


class ScriptedStore(Store):
    """`store`, as one actor reaches it."""

    def __init__(self, store: Store, actor: Actor) -> None:
        self.url = store.url
        self._inner = store
        self._actor = actor

    def get(self, key: str) -> bytes:
        return self._read(lambda: self._inner.get(key))

    def entries(self, prefix: str, *, after: str | None = None) -> list[Entry]:
        return self._read(lambda: self._inner.entries(prefix, after=after))

    def get_buffer(self, key: str) -> memoryview:
        return self._read(lambda: self._inner.get_buffer(key))

    def secure(self, keys: Sequence[str]) -> None:
        self._read(lambda: self._inner.secure(keys))

    def put(self, key: str, data: BytesLike) -> None:
        kept = bytes(data)  # a late one arrives when the writer's memory is gone
        self._write(lambda: self._inner.put(key, kept))

    def delete(self, keys: Sequence[str]) -> None:
        self._write(lambda: self._inner.delete(keys))

    def create(self, key: str, data: BytesLike) -> None:
        self._write(lambda: self._inner.create(key, data))

    def _read(self, read: Callable[[], T]) -> T:
        if threading.current_thread() is not self._actor:
            return read()
        match self._actor.held():
            case Fate.DONE | Fate.LOST:
                return read()
            case Fate.DIES_BEFORE | Fate.DIES_AFTER:
                raise Died
            case _:
                raise StoreUnavailable("read")

    def _write(self, write: Callable[[], None]) -> None:
        fate = self._actor.held()
        if fate in (Fate.DONE, Fate.LOST, Fate.DONE_AWAY, Fate.DIES_AFTER):
            write()
        match fate:
            case Fate.LOST:
                write()
            case Fate.LATE:
                self._actor.late.append(write)
                raise StoreUnavailable("write")
            case Fate.AWAY | Fate.DONE_AWAY:
                raise StoreUnavailable("write")
            case Fate.DIES_BEFORE | Fate.DIES_AFTER:
                raise Died
            case _:
                pass


def arrive(write: Callable[[], None]) -> None:
    """Do a late write. Nobody hears any more that a create came too late."""
    with contextlib.suppress(AlreadyExists):
        write()
