"""What is recorded of sessions: a file of the machine at once, and the run's store soon after.

The file is written before an agent gets its answer, so that a gateway that is killed loses no finished turn, and
of unfinished ones what came since they were looked at. The store gets the finished turns every UPLOAD_S: that is
what is lost with the machine. Objects and lines are needed until their sessions are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import structlog

from checkpoint.store import layout
from checkpoint.store.errors import StoreError
from checkpoint.store.run_store import Store
from orchestrator.gateway.surface.chat import Answer
from policies.serving.sessions import OpenSession
from policies.serving.wire import HandOver

log = structlog.get_logger()

UPLOAD_S = 2.0
HEAD_SIZE = 4  # before each record: its size
COMPACT_SIZE = 256 * 1024 * 1024  # of the file, which is then written anew, or twice what it had then


class Made(msgspec.Struct, tag=True):
    """A finished turn, as `orchestrator.gateway.surface.sessions` has it."""

    session: str
    opening: bytes
    key: bytes
    number: int
    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    stop_reason: int | str | None
    node: str
    handed_over: list[HandOver]


class Part(msgspec.Struct, tag=True):
    """Tokens of an unfinished turn, from the place `start` on."""

    session: str
    opening: bytes
    key: bytes
    number: int
    start: int
    token_ids: list[int]
    logprobs: list[float]


class Opened(msgspec.Struct, tag=True):
    """A session was opened, or opened again: no turn is told yet."""

    session: str
    opening: bytes
    said: OpenSession


class Answered(msgspec.Struct, tag="Told"):
    """A turn's agent gets its answer. What is told of `parent` is the key and number of another turn."""

    session: str
    key: bytes
    number: int
    request: str
    parent: tuple[bytes, int] | None
    continues: bool
    messages: list[dict[str, Any]]
    rendered: int
    history: bytes
    answer: Answer


class Closed(msgspec.Struct, tag=True):
    """A session is over. One that is opened later under its name has nothing of it."""

    session: str


Record: TypeAlias = Opened | Made | Answered | Part | Closed
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


class SessionLog:
    """The records of one gateway and of those before it.

    Args:
        path: the file of this machine; None: nothing is kept but in the store.
        store: the run's, without retries; None: nothing is kept beyond this machine.
        timeline: the trainer's: sessions of earlier ones are over.
    """

    def __init__(self, path: Path | None, store: Store | None, timeline: int = 0) -> None:
        self._path, self._store, self._timeline = path, store, timeline
        self._file: int | None = None
        self._size = self._compact_size = 0
        self._open: dict[str, list[bytes]] = {}  # what is stored of each session, encoded
        self._parts: dict[str, dict[tuple[bytes, int], list[bytes]]] = {}  # of each session's unfinished turns
        self._pending: list[tuple[str, bytes]] = []
        self._objects: dict[str, set[str]] = {}  # the sessions in each
        self._number = 0
        self._is_failing = False

    def load(self) -> list[Record]:
        """Return what gateways before this one have recorded of open sessions, and go on from there."""
        try:
            data = self._path.read_bytes() if self._path is not None else None
        except FileNotFoundError:
            data = None
        except OSError as error:
            log.warning("session_file_read_failed", error=str(error))
            data = None
        found = list(_records(data)) if data is not None else []
        found += self._stored(is_needed=data is None)
        for record, encoded in found:
            self._note(record, encoded)
        kept = set(map(id, self._needed()))
        self._rewrite()
        self._pending = [(name, one) for name, every in self._open.items() for one in every]
        return [record for record, encoded in found if id(encoded) in kept]

    def append(self, record: Record) -> None:
        """Write a record down before this returns; the store gets it later."""
        data = _encode(record)
        self._note(record, data)
        if not isinstance(record, Part | Closed):
            self._pending.append((record.session, data))
        self._write(data)
        if self._size > self._compact_size:
            self._rewrite()

    async def run(self) -> None:
        """Store what is new, and delete what is not needed, for ever."""
        while True:
            await asyncio.sleep(UPLOAD_S)
            await self.flush()

    async def flush(self) -> None:
        """Do so once."""
        if self._store is None:
            return
        pending, self._pending = [one for one in self._pending if one[0] in self._open], []
        unneeded = [key for key, sessions in self._objects.items() if not sessions]
        if not pending and not unneeded:
            return
        self._number += 1
        key = layout.sessions(self._timeline, int(time.time() * 1000), self._number)
        try:
            if pending:
                self._objects[key] = {session for session, _ in pending}
                await asyncio.to_thread(self._store.put, key, b"".join(_framed(data) for _, data in pending))
                pending = []
            if unneeded:
                await asyncio.to_thread(self._store.delete, unneeded)
                for one in unneeded:
                    self._objects.pop(one, None)
        except StoreError as error:
            if pending:
                self._objects[key] = set()  # it may have come there
                self._pending = [*pending, *self._pending]
            if not self._is_failing:
                log.warning("session_upload_failed", error=str(error))
            self._is_failing = True
        else:
            self._is_failing = False

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _note(self, record: Record, data: bytes) -> None:
        """Know what is needed after this record."""
        name = record.session
        if isinstance(record, Opened):
            self._open.setdefault(name, []).append(data)
        elif isinstance(record, Closed):
            self._open.pop(name, None)
            self._parts.pop(name, None)
            for sessions in self._objects.values():
                sessions.discard(name)
        elif name not in self._open:
            return
        elif isinstance(record, Part):
            parts = self._parts.setdefault(name, {}).setdefault((record.key, record.number), [])
            if record.start == 0:
                parts.clear()
            parts.append(data)
        else:
            self._open[name].append(data)
            if isinstance(record, Made):
                self._parts.get(name, {}).pop((record.key, record.number), None)

    def _needed(self) -> Iterator[bytes]:
        for name, every in self._open.items():
            yield from every
            for parts in self._parts.get(name, {}).values():
                yield from parts

    def _stored(self, *, is_needed: bool) -> list[tuple[Record, bytes]]:
        """What the store has, which is deleted once this gateway has stored it anew."""
        found: list[tuple[Record, bytes]] = []
        if self._store is None:
            return found
        mine = layout.sessions(self._timeline, 0, 0).rpartition("/")[0]
        try:
            for entry in self._store.entries(layout.SESSIONS):
                if entry.key[: len(mine)] > mine:  # of a newer trainer than this gateway's
                    continue
                if is_needed and entry.key.startswith(mine):
                    found += _records(self._store.get_or_none(entry.key) or b"")
                self._objects[entry.key] = set()
        except StoreError as error:
            log.warning("stored_sessions_read_failed", error=str(error))
        return found

    def _rewrite(self) -> None:
        """Begin the file anew, with what is needed alone."""
        self.close()
        if self._path is None:
            return
        new = self._path.with_suffix(".new")
        try:
            with new.open("wb") as out:
                out.writelines(map(_framed, self._needed()))
            os.replace(new, self._path)
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            self._size = os.fstat(self._file).st_size
            self._compact_size = max(COMPACT_SIZE, 2 * self._size)
        except OSError as error:
            self._give_up(error)

    def _write(self, data: bytes) -> None:
        if self._file is None:
            return
        framed = _framed(data)
        try:
            if os.write(self._file, framed) < len(framed):
                raise OSError(errno.ENOSPC, "the disk is full")
        except OSError as error:
            self._give_up(error)
        else:
            self._size += len(framed)

    def _give_up(self, error: OSError) -> None:
        """Do without a file, as on a full disk. One that lacks something would hide what the store has."""
        log.warning("session_file_disabled", error=str(error))
        self.close()
        self._size = 0
        assert self._path is not None
        for path in (self._path.with_suffix(".new"), self._path):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(HEAD_SIZE, "big") + data


def _records(data: bytes) -> Iterator[tuple[Record, bytes]]:
    """The records in a file, decoded and as they are there, up to one that was cut off."""
    place = 0
    while place + HEAD_SIZE <= len(data):
        end = place + HEAD_SIZE + int.from_bytes(data[place : place + HEAD_SIZE], "big")
        if end > len(data):
            return
        encoded = data[place + HEAD_SIZE : end]
        try:
            record = _decode(encoded)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            log.warning("session_record_invalid", error=str(error))
        else:
            yield record, encoded
        place = end
