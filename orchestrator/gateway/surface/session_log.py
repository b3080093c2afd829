"""The record of sessions: a file on the machine, written immediately, and objects in the run's store.

The file is written before an agent gets its answer, so a killed gateway loses no finished turn, and of unfinished
ones only the tokens since their last record. Finished turns go to the store every UPLOAD_S; losing the machine
loses the turns since then. Records are kept until their session is closed.
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

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.errors import StoreError
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.gateway.surface.chat import Answer
from grpo_orch.policies.serving.wire import Handover, OpenSession

log = structlog.get_logger()

UPLOAD_S = 2.0
HEAD_SIZE = 4  # before each record: its size
COMPACT_SIZE = 256 * 1024 * 1024


TurnId: TypeAlias = tuple[bytes, int]  # identifies prompt and sampling; counts the turns with the same ones


class TurnGenerated(msgspec.Struct, tag=True):
    """A finished turn of `orchestrator.gateway.surface.sessions`."""

    session: str
    turn: TurnId
    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    stop_reason: int | str | None
    node: str
    handed_over: list[Handover]


class TurnPart(msgspec.Struct, tag=True):
    """Tokens of an unfinished turn, from index `start` on."""

    session: str
    turn: TurnId
    start: int
    token_ids: list[int]
    logprobs: list[float]


class SessionOpened(msgspec.Struct, tag=True):
    """A session was opened, or opened again, which voids the TurnAnswered records so far."""

    session: str
    parameters: OpenSession


class TurnAnswered(msgspec.Struct, tag=True):
    """A turn's agent gets its answer."""

    session: str
    turn: TurnId
    request: str
    parent: TurnId | None
    continues: bool
    messages: list[dict[str, Any]]
    rendered: int
    history: bytes
    answer: Answer


class SessionClosed(msgspec.Struct, tag=True):
    """A session has ended. A later session of the same name shares nothing with it."""

    session: str


Record: TypeAlias = SessionOpened | TurnGenerated | TurnAnswered | TurnPart | SessionClosed
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


class SessionLog:
    """The records of one gateway and of those before it.

    Args:
        path: the file on this machine; None: keep records in the store only.
        store: the run's, without retries; None: keep records on this machine only.
        timeline: the trainer's; sessions of earlier timelines are over.
        compact_size: the file is rewritten above this size, or above twice its size after the last rewrite.
    """

    def __init__(
        self, path: Path | None, store: Store | None, timeline: int = 0, compact_size: int = COMPACT_SIZE
    ) -> None:
        self._min_compact_size = compact_size
        self._path, self._store, self._timeline = path, store, timeline
        self._file: int | None = None
        self._size = self._compact_size = 0
        # Encoded records of each open session: those of a turn's tokens by turn, each other one by a number.
        self.records: dict[str, dict[TurnId | int, list[bytes]]] = {}
        self._pending: list[tuple[str, bytes]] = []  # session and record, not in the store yet
        self._objects: dict[str, set[str]] = {}  # the sessions in each object of the store
        self._number = 0
        self._is_failing = False

    def load(self) -> list[Record]:
        """Return the records that earlier gateways made of open sessions, and continue with them."""
        try:
            data = self._path.read_bytes() if self._path is not None else None
        except FileNotFoundError:
            data = None
        except OSError as error:
            log.warning("session_file_read_failed", error=str(error))
            data = None
        records = list(_records(data)) if data is not None else []
        records += self._stored(is_needed=data is None)
        for record, encoded in records:
            self._note(record, encoded)
        needed = set(map(id, self._needed()))
        self._rewrite()
        records = [(record, encoded) for record, encoded in records if id(encoded) in needed]
        self._pending = [(one.session, encoded) for one, encoded in records if not isinstance(one, TurnPart)]
        return [record for record, _ in records]

    def append(self, record: Record) -> None:
        """Write a record to the file, and to the store later."""
        data = _encode(record)
        self._note(record, data)
        if not isinstance(record, TurnPart | SessionClosed):
            self._pending.append((record.session, data))
        self._write(data)
        if self._size > self._compact_size:
            self._rewrite()

    async def run(self) -> None:
        """Flush every UPLOAD_S, forever."""
        while True:
            await asyncio.sleep(UPLOAD_S)
            await self.flush()

    async def flush(self) -> None:
        """Upload new records of open sessions, and delete objects that are not needed any more."""
        if self._store is None:
            return
        pending = [(session, record) for session, record in self._pending if session in self.records]
        self._pending = []
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
                for object_key in unneeded:
                    self._objects.pop(object_key, None)
        except StoreError as error:
            if pending:
                self._objects[key] = set()  # the failed upload may have written it, so delete it later
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
        """Add a record to those that are needed, and drop those that it makes obsolete."""
        name = record.session
        if isinstance(record, SessionOpened):
            self.records.setdefault(name, {})
        elif isinstance(record, SessionClosed):
            self.records.pop(name, None)
            for sessions in self._objects.values():
                sessions.discard(name)
        if (session := self.records.get(name)) is None:
            return
        if isinstance(record, TurnPart) and record.start:
            session.setdefault(record.turn, []).append(data)
        elif isinstance(record, TurnPart | TurnGenerated):
            session[record.turn] = [data]
        else:
            session[len(session)] = [data]

    def _needed(self) -> Iterator[bytes]:
        for session in self.records.values():
            for records in session.values():
                yield from records

    def _stored(self, *, is_needed: bool) -> list[tuple[Record, bytes]]:
        """Return the records in the store, if they are needed. Their objects are deleted after the next upload."""
        records: list[tuple[Record, bytes]] = []
        if self._store is None:
            return records
        prefix = layout.sessions(self._timeline, 0, 0).rpartition("/")[0]
        try:
            for entry in self._store.entries(layout.SESSIONS):
                if entry.key[: len(prefix)] > prefix:  # of a newer timeline
                    continue
                if is_needed and entry.key.startswith(prefix):
                    records += _records(self._store.get_or_none(entry.key) or b"")
                self._objects[entry.key] = set()
        except StoreError as error:
            log.warning("stored_sessions_read_failed", error=str(error))
        return records

    def _rewrite(self) -> None:
        """Rewrite the file with only the needed records."""
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
            self._compact_size = max(self._min_compact_size, 2 * self._size)
        except OSError as error:
            self._disable_file(error)

    def _write(self, data: bytes) -> None:
        if self._file is None:
            return
        framed = _framed(data)
        try:
            if os.write(self._file, framed) < len(framed):
                raise OSError(errno.ENOSPC, "the disk is full")
        except OSError as error:
            self._disable_file(error)
        else:
            self._size += len(framed)

    def _disable_file(self, error: OSError) -> None:
        """Delete the file and continue without it, as on a full disk.

        An incomplete file would hide records in the store, which are only read without a file.
        """
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
    """Yield the records in a file, decoded and encoded, up to an incomplete one."""
    offset = 0
    while offset + HEAD_SIZE <= len(data):
        end = offset + HEAD_SIZE + int.from_bytes(data[offset : offset + HEAD_SIZE], "big")
        if end > len(data):
            return
        encoded = data[offset + HEAD_SIZE : end]
        try:
            record = _decode(encoded)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            log.warning("session_record_invalid", error=str(error))
        else:
            yield record, encoded
        offset = end
