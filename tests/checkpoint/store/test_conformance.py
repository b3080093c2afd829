"""What every store does, whatever its library and server: one suite for all of them."""

from __future__ import annotations

import mmap
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from grpo_orch.checkpoint.journal import seconds_since
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.errors import AlreadyExists, NotFound
from grpo_orch.checkpoint.store.probe import probe
from grpo_orch.checkpoint.store.run_store import Store
from tests.budget import examples, until
from tests.rigs.store.server import S3Server

BACKENDS = ("memory", "file", "moto", "ceph")
_numbers = count(1)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path, backend: str) -> Store:
    return fresh_store(request, tmp_path, backend)


def fresh_store(request: pytest.FixtureRequest, tmp_path: Path, backend: str) -> Store:
    """An empty store. A blank in its name, because a user may have one."""
    number = next(_numbers)
    match backend:
        case "memory":
            return Store(f"memory://store-{number}", retry_s=0.2, options={})
        case "file":
            return Store(f"file://{tmp_path}/the run {number}", retry_s=0.2, options={})
        case _:
            server: S3Server = request.getfixturevalue(backend)
            return Store(server.url(f"the run {number}"), retry_s=5, options=server.options())


def fill(store: Store, keys: list[str]) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, key.encode()), keys))


def test_missing_objects(store: Store) -> None:
    with pytest.raises(NotFound, match=re.escape(f"read nothing in {store.url}")):
        store.get("nothing")
    assert store.get_or_none("nothing") is None
    store.delete(["nothing", "nothing/either"])
    assert store.entries("nowhere") == []
    assert store.folders("nowhere") == []


def test_any_bytes_can_be_written_and_nothing_keeps_hold_of_them(store: Store) -> None:
    with mmap.mmap(-1, 3 << 20) as mapped:
        mapped[:] = os.urandom(len(mapped))
        part = memoryview(mapped)[1 << 19 : 3 << 20]
        piece = part[:9]
        for key, data in (("map", part), ("array", bytearray(b"abc")), ("empty", b""), ("slice", piece)):
            store.put(f"put/{key}", data)
            store.create(f"create/{key}", data)
            assert store.get_buffer(f"put/{key}") == store.get_buffer(f"create/{key}") == data
        for view in (part, piece):
            view.release()  # closing the map fails while anyone holds a part of it


def test_large_object_is_read_back_whole(store: Store) -> None:
    data = os.urandom(40_000_000)
    store.put("large", data)
    buffer = store.get_buffer("large")
    assert (buffer.format, buffer.nbytes) == ("B", len(data))
    assert buffer == data


def test_object_of_many_parts_is_whole_after_a_retry(store: Store) -> None:
    parts = [bytes([number]) * (3 << 20) for number in range(12)]  # more than twice what one request takes
    store.put_parts("folder/parts", lambda: iter(parts))
    assert store.get("folder/parts") == b"".join(parts)
    store.put_parts("folder/parts", lambda: [memoryview(b"a"), b"b"])
    assert store.get("folder/parts") == b"ab"
    store.put_parts("folder/none", lambda: iter(()))
    assert store.get("folder/none") == b""


def test_a_listing_is_of_whole_names_in_order(store: Store) -> None:
    before = datetime.now(UTC) - timedelta(seconds=5)
    fill(store, ["j/3", "j/1", "j/20/a", "j/2", "j-x/1", "jj/1", "k/1"])
    listed = store.entries("j")
    assert [entry.key for entry in listed] == ["j/1", "j/2", "j/20/a", "j/3"]
    assert [entry.size_bytes for entry in listed] == [3, 3, 6, 3]
    after = datetime.now(UTC) + timedelta(seconds=5)
    assert all(before < entry.modified_at < after for entry in listed)
    assert [entry.key for entry in store.entries("j", after="j/1")] == ["j/2", "j/20/a", "j/3"]
    assert store.entries("j", after="j/3") == []


def test_age_of_an_object_is_by_the_stores_dates(store: Store) -> None:
    began_s = time.monotonic()
    store.create(layout.journal_entry(1), b"{}")
    told_s = until("a second by the store's clock", lambda: seconds_since(store, 1))
    assert 1.0 <= told_s <= time.monotonic() - began_s + 1.0  # some date by whole seconds


@pytest.mark.slow
def test_thousands_are_listed_whole_and_deleted_at_once(store: Store) -> None:
    keys = [f"t/{number:06d}" for number in range(2500)]  # a page has 1,000
    fill(store, keys)
    store.put("u/stays", b"")
    assert [entry.key for entry in store.entries("t")] == keys
    assert [entry.key for entry in store.entries("t", after=keys[999])] == keys[1000:]
    store.delete(["t/missing", *keys[:-1]])
    assert [entry.key for entry in store.entries("t")] == keys[-1:]
    assert store.get("u/stays") == b""


def test_the_probe_passes_and_leaves_nothing(store: Store) -> None:
    for _ in range(2):
        probe(store)
    assert store.entries("") == []


def test_one_of_many_creators_wins(store: Store) -> None:
    def creates(number: int) -> int | None:
        try:
            store.create("contested", b"%d" % number)
        except AlreadyExists:
            return None
        return number

    with ThreadPoolExecutor(16) as pool:
        winners = [number for number in pool.map(creates, range(16)) if number is not None]
    assert len(winners) == 1
    assert store.get("contested") == b"%d" % winners[0]


ODD = ["a b", "a%20b", "a+b", "über/größe", "a&b<c>", "a'\"b", "a*b?c[d]", "a:b=c,d", "~a", "a..b", "é", "x" * 200]


def test_odd_names_are_kept_as_they_are(store: Store) -> None:
    keys = [f"odd/{name}" for name in ODD]
    fill(store, keys)
    assert [entry.key for entry in store.entries("odd")] == sorted(keys)
    assert [store.get(key) for key in keys] == [key.encode() for key in keys]
    store.delete(keys)
    assert store.entries("odd") == []


# In a file system, no name can be an object and a folder at once: a run has no such names.
KEYS = st.sampled_from(["a/1", "a/2", "a/sub/x", "a/sub/y", "a/10", "b/1", "ab/1"])
DATA = st.binary(max_size=20)


class StoreAgainstDict(RuleBasedStateMachine):
    """Store and dict get the same operations and must then hold the same."""

    open_store: Any  # set by the test: returns an empty store

    @initialize()
    def start(self) -> None:
        self.store: Store = self.open_store()
        self.model: dict[str, bytes] = {}

    @rule(key=KEYS, data=DATA)
    def put(self, key: str, data: bytes) -> None:
        self.store.put(key, data)
        self.model[key] = data

    @rule(key=KEYS, data=DATA)
    def create(self, key: str, data: bytes) -> None:
        try:
            self.store.create(key, data)
            assert key not in self.model
            self.model[key] = data
        except AlreadyExists:
            assert key in self.model

    @rule(keys=st.lists(KEYS, max_size=3))
    def delete(self, keys: list[str]) -> None:
        self.store.delete(keys)
        for key in keys:
            self.model.pop(key, None)

    @rule(prefix=st.sampled_from(["a", "b", "ab", "a/sub"]), after=st.none() | KEYS)
    def list(self, prefix: str, after: str | None) -> None:
        expected = sorted(k for k in self.model if k.startswith(f"{prefix}/") and (after is None or k > after))
        assert [entry.key for entry in self.store.entries(prefix, after=after)] == expected

    @rule(start=st.sampled_from(["a/", ""]))
    def folders(self, start: str) -> None:
        below = [key.removeprefix(start) for key in self.model if key.startswith(start)]
        expected = sorted({start + rest.partition("/")[0] for rest in below if "/" in rest})
        assert self.store.folders(start.rstrip("/")) == expected

    @invariant()
    def holds_the_same(self) -> None:
        for key in ("a/1", "a/2", "a/sub/x"):
            assert self.store.get_or_none(key) == self.model.get(key)


def test_the_store_is_a_dict(request: pytest.FixtureRequest, tmp_path: Path, backend: str) -> None:
    most = {"memory": 100, "file": 50}.get(backend, 5)

    class Machine(StoreAgainstDict):
        def open_store(self) -> Store:
            return fresh_store(request, tmp_path, backend)

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples(most),
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
