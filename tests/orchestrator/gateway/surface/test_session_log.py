"""The records of sessions: what is left of them in the file and in the store, whatever fails when."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.errors import StoreUnavailable
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.gateway.surface.session_log import (
    COMPACT_SIZE,
    Record,
    SessionClosed,
    SessionLog,
    SessionOpened,
    TurnGenerated,
    TurnPart,
)
from grpo_orch.policies.serving.wire import OpenSession, PolicyRef


def opened(name: str = "s", seed: int = 5) -> SessionOpened:
    return SessionOpened(name, OpenSession(PolicyRef("0-0", "policies/0-0"), seed))


def made(number: int = 0, tokens: int = 3, name: str = "s") -> TurnGenerated:
    return TurnGenerated(name, (b"k", number), [1, 2], [3] * tokens, [0.0] * tokens, "stop", None, "node", [])


def part(start: int, end: int, number: int = 0, name: str = "s") -> TurnPart:
    tokens = list(range(start, end))
    return TurnPart(name, (b"k", number), start, tokens, [0.0] * len(tokens))


def begun(
    path: Path | None, store: Store | None = None, timeline: int = 0, compact_size: int = COMPACT_SIZE
) -> tuple[SessionLog, list[Record]]:
    log = SessionLog(path, store, timeline, compact_size)
    return log, log.load()


def left(path: Path | None, store: Store | None = None) -> list[Record]:
    log, found = begun(path, store)
    log.close()
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "turns"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store((tmp_path / "store").as_uri(), retry_s=0.0)


def test_session_opened_again_after_its_end_is_kept(path: Path) -> None:
    log, _ = begun(path)
    again: list[Record] = [opened(seed=6), made()]
    before: list[Record] = [opened(), made(), part(0, 2, 1), SessionClosed("s")]
    for record in before + again:
        log.append(record)
    assert left(path) == again
    assert left(path) == again


def test_turns_of_ended_session_are_not_kept(path: Path) -> None:
    log, _ = begun(path)
    records: list[Record] = [opened(), SessionClosed("s"), made(), part(0, 2)]
    for record in records:
        log.append(record)
    assert left(path) == []
    assert path.stat().st_size == 0


def test_compaction_keeps_unfinished_turns_whole(path: Path) -> None:
    log, _ = begun(path, compact_size=2000)
    parts = [part(start, start + 2, 7) for start in range(0, 8, 2)]
    log.append(opened())
    log.append(opened("other"))
    for number, record in enumerate(parts):
        log.append(record)
        log.append(made(number, 300, name="other"))
    log.append(SessionClosed("other"))
    for number in range(30):
        log.append(part(0, 40, number, "other"))
        log.append(part(8 + number, 9 + number, 7))
    assert path.stat().st_size < 10_000
    tokens = [token for record in left(path) if isinstance(record, TurnPart) for token in record.token_ids]
    assert tokens == list(range(38))


def test_file_larger_than_compaction_size_is_rewritten_rarely(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, _ = begun(path, compact_size=1000)
    log.append(opened())
    replaced: list[Path] = []

    def replace(new: Path, old: Path) -> None:
        replaced.append(new.rename(old))

    monkeypatch.setattr(os, "replace", replace)
    for number in range(200):
        log.append(made(number, 20))
    assert len(replaced) < 10
    assert len(left(path)) == 201


def test_part_of_finished_turn_is_not_kept(path: Path) -> None:
    log, _ = begun(path)
    records: list[Record] = [opened(), part(0, 2), made()]
    for record in records:
        log.append(record)
    assert left(path) == [opened(), made()]


@pytest.mark.parametrize("is_short", [True, False])
def test_full_disk_leaves_no_file_that_hides_the_store(
    path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, is_short: bool
) -> None:
    log, _ = begun(path, store)
    log.append(opened())
    real = os.write

    def full(file: int, data: bytes) -> int:
        if not is_short:
            raise OSError(errno.ENOSPC, "no space left")
        return real(file, data[: len(data) // 2])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        log.append(made())
    log.append(made(1))
    asyncio.run(log.flush())
    assert left(path, store) == [opened(), made(), made(1)]


class Faulty:
    """A store that does something else first, or instead."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.before: Any = lambda: None
        self.after: Any = lambda: None

    def put(self, key: str, data: bytes) -> None:
        self.before()
        self.store.put(key, data)
        self.after()

    def delete(self, keys: Sequence[str]) -> None:
        self.store.delete(keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def unavailable() -> None:
    raise StoreUnavailable("it is away")


async def test_session_closed_during_upload_leaves_no_object(store: Store) -> None:
    faulty = Faulty(store)
    log, _ = begun(None, faulty)  # type: ignore[arg-type]
    log.append(opened())
    loop = asyncio.get_running_loop()

    async def close() -> None:
        log.append(SessionClosed("s"))

    faulty.after = lambda: asyncio.run_coroutine_threadsafe(close(), loop).result()
    await log.flush()
    await log.flush()
    assert store.entries(layout.SESSIONS) == []


async def test_upload_that_failed_after_arriving_is_deleted(store: Store) -> None:
    faulty = Faulty(store)
    log, _ = begun(None, faulty)  # type: ignore[arg-type]
    log.append(opened())
    faulty.after = unavailable
    await log.flush()
    faulty.after = lambda: None
    log.append(made())
    await log.flush()
    assert len(store.entries(layout.SESSIONS)) == 1
    assert left(None, store) == [opened(), made()]


async def test_failed_uploads_lose_nothing_and_keep_order(store: Store) -> None:
    faulty = Faulty(store)
    log, _ = begun(None, faulty)  # type: ignore[arg-type]
    faulty.before = unavailable
    records: list[Record] = [opened(), made(), made(1)]
    for record in records:
        log.append(record)
        await log.flush()
    faulty.before = lambda: None
    await log.flush()
    assert left(None, store) == records


async def test_gateway_of_older_timeline_leaves_newer_records(store: Store) -> None:
    log, _ = begun(None, store, 2)
    log.append(opened())
    await log.flush()
    old, found = begun(None, store, 1)
    assert found == []
    await old.flush()
    assert len(store.entries(layout.SESSIONS)) == 1
    newer, _ = begun(None, store, 3)
    await newer.flush()
    assert store.entries(layout.SESSIONS) == []
