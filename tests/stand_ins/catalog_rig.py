"""Stores in a dictionary for the tests of the catalog, and what must hold in them at any moment."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from blake3 import blake3

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.backends import BytesLike, Entry
from grpo_orch.checkpoint.store.codec import from_json
from grpo_orch.checkpoint.store.errors import AlreadyExists, NotFound
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import manifest
from grpo_orch.checkpoint.stream.catalog import Checkpoint, Revision
from grpo_orch.checkpoint.stream.manifest import Manifest
from grpo_orch.policies.model.vocabulary import PolicyVersion

CHUNK = 4096
NOW_S = 1e6  # later than any object's time
CONTENTS = ("ab", "ba", "abc", "bca", "aab", "c")  # each letter a chunk; the last one is cut in half


class DictStore(Store):
    """A store in a dictionary that counts its writes."""

    def __init__(self) -> None:
        self.url = "dict://"
        self.objects: dict[str, bytes] = {}
        self.writes = 0

    def get(self, key: str) -> bytes:
        if key not in self.objects:
            raise NotFound(key)
        return self.objects[key]

    def get_buffer(self, key: str) -> memoryview:
        return memoryview(self.get(key))

    def put(self, key: str, data: BytesLike) -> None:
        self.objects[key] = bytes(data)
        self.writes += 1

    def create(self, key: str, data: BytesLike) -> None:
        if key in self.objects:
            raise AlreadyExists(key)
        self.put(key, data)

    def secure(self, keys: Sequence[str]) -> None:
        """Nothing to do but to find what is missing."""
        for key in keys:
            self.get(key)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)
        self.writes += 1

    def sweep(self, prefix: str, older_than_s: float) -> None:
        """Nothing: a dictionary holds whole objects."""

    def entries(self, prefix: str, *, after: str | None = None) -> list[Entry]:
        keys = sorted(key for key in self.objects if key.startswith(f"{prefix}/") and key > (after or ""))
        return [Entry(key, len(self.objects[key]), datetime.fromtimestamp(0, UTC)) for key in keys]


class InTurn:
    """Stands in for the thread pool: runs each call at once, so that one list of choices is one order of
    operations."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> InTurn:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, call: Callable[..., Any], *args: Any, **more: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*args, **more))
        except Exception as error:  # noqa: BLE001  # as the pool does
            future.set_exception(error)
        return future

    def shutdown(self, **_: Any) -> None:
        pass


def bytes_of(content: str) -> bytes:
    return b"".join(letter.encode() * CHUNK for letter in content)[: -CHUNK // 2]


def going(keep_last: int, listed: Sequence[Checkpoint]) -> Sequence[PolicyVersion]:
    """All but the newest and the pinned: stricter than the real retention, so that there is more to collect."""
    older = sorted(listed, key=lambda one: one.at)[:-keep_last]
    return [one.at for one in older if not one.pinned]


@functools.lru_cache(maxsize=100_000)
def decoded(data: bytes) -> Revision:
    return from_json(data, Revision, "revision")


@functools.lru_cache(maxsize=100_000)
def digest(data: bytes) -> str:
    return blake3(data).hexdigest()


def revisions(store: DictStore) -> list[Revision]:
    keys = sorted(key for key in store.objects if key.startswith(f"{layout.CATALOG}/"))
    found = [decoded(store.objects[key]) for key in keys]
    assert [one.number for one in found] == list(range(1, len(found) + 1))
    return found


def needed(store: DictStore, listed: list[Checkpoint]) -> set[str]:
    """The objects of listed checkpoints; all of them are there and hold what was uploaded."""
    keys = set()
    for one in listed:
        assert one.manifest in store.objects, f"{one.version}: its manifest is gone"
        data = store.objects[one.manifest]
        assert digest(data) == one.digest
        found = manifest.decode(data, one.manifest)
        weights = next(file for file in found.files if file.name == "weights")
        for name in found.chunks:
            assert f"{layout.BLOBS}/{name}" in store.objects, f"{one.version}: {name} is gone"
        held = b"".join(store.objects[f"{layout.BLOBS}/{name}"] for name in weights.chunks)
        assert held == bytes_of(found.meta["content"])
        keys |= {one.manifest, *(f"{layout.BLOBS}/{name}" for name in found.chunks)}
    return keys


def fetch(store: Store, prefix: str, folder: Path) -> Manifest:
    """Download a published folder."""
    found = manifest.load(store, prefix)
    manifest.materialize(store, found.root, found.files, folder)
    return found
