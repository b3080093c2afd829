"""A store that fails: what the caller is told, that it is retried, and that it works once the fault is over.

"Away for five minutes" is scaled down to AWAY_S here; nothing in the store depends on which it is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_orch.checkpoint.store.errors import (
    AlreadyExists,
    NotFound,
    StoreDenied,
    StoreError,
    StoreUnavailable,
    StoreUnusable,
)
from grpo_orch.checkpoint.store.run_store import Store
from tests.budget import HANG_S
from tests.rigs.store.fault_proxy import (
    Answer,
    Away,
    CutDownload,
    CutUpload,
    Fault,
    FaultProxy,
    Hang,
    LoseAnswer,
    Slow,
)
from tests.rigs.store.server import S3Server, through

AWAY_S = 8.0
IMPATIENT = {"hang_s": 1.0, "whole_s": 4.0}
DATA = os.urandom(3 << 20)


@pytest.fixture
def open_store(moto: S3Server, proxy: FaultProxy, tmp_path: Path) -> Callable[..., Store]:
    def opens(retry_s: float = HANG_S, hang_s: float = HANG_S, whole_s: float = HANG_S) -> Store:
        return through(moto.at(proxy.endpoint), tmp_path.name, retry_s, hang_s, whole_s)

    return opens


PASSING: list[tuple[Fault, int]] = [
    (Answer(503, "SlowDown"), 2),
    (Answer(429, "TooManyRequests"), 1),
    (Answer(500, "InternalError"), 1),
    (Answer(400, "RequestTimeout"), 1),
    (Answer(403, "QuotaExceeded"), 1),
    (Answer(507, "InsufficientStorage"), 1),
    (Hang(), 1),
    (CutUpload(1 << 20), 1),
    (LoseAnswer(), 1),
]


@pytest.mark.parametrize(("fault", "times"), PASSING, ids=lambda value: str(value))
def test_a_write_outlasts_a_passing_fault(
    open_store: Callable[..., Store], proxy: FaultProxy, fault: Fault, times: int
) -> None:
    hangs = isinstance(fault, Hang)
    store = open_store(**IMPATIENT) if hangs else open_store()
    proxy.inject(fault, times)
    store.put("a/large", DATA)
    assert set(proxy.seen) == {"PUT"}
    more = len(proxy.seen) - (times + 1)
    assert more >= 0 if hangs else more == 0  # to who soon gives up, a request may seem to hang once more
    assert store.get("a/large") == DATA


READS: list[tuple[str, Fault]] = [
    ("read", Answer(503, "SlowDown")),
    ("read", Hang()),
    ("read", CutDownload(1 << 20)),
    ("read", LoseAnswer()),
    ("list", Answer(503, "SlowDown")),
    ("list", CutDownload(100)),
    ("folders", CutDownload(100)),
    ("delete", Answer(503, "SlowDown")),
    ("delete", LoseAnswer()),
]


@pytest.mark.parametrize(("call", "fault"), READS, ids=str)
def test_a_read_outlasts_a_passing_fault(
    open_store: Callable[..., Store], proxy: FaultProxy, call: str, fault: Fault
) -> None:
    store = open_store(**IMPATIENT) if isinstance(fault, Hang) else open_store()
    store.put("a/large", DATA)
    proxy.seen.clear()
    proxy.inject(fault, times=1)
    match call:
        case "read":
            assert store.get("a/large") == DATA
        case "list":
            assert [entry.key for entry in store.entries("a")] == ["a/large"]
        case "folders":
            assert store.folders("") == ["a"]
        case "delete":
            store.delete(["a/large"])
            assert store.get_or_none("a/large") is None
    assert len(proxy.seen) >= 2


def test_unreachable_store_is_awaited(moto: S3Server, proxy: FaultProxy, tmp_path: Path) -> None:
    store = through(moto.at(proxy.endpoint), tmp_path.name, HANG_S)
    store.put("a", b"1")
    proxy.inject(Away())
    began = time.monotonic()
    proxy.heal_after(AWAY_S)
    store.put("a", b"2")
    assert time.monotonic() - began >= AWAY_S
    assert store.get("a") == b"2"


@pytest.mark.parametrize(
    ("fault", "hint"),
    [
        (Away(), ""),
        (Answer(503, "SlowDown"), ""),
        (CutUpload(1), ""),
        (Answer(403, "QuotaExceeded"), "free some space"),
        (Answer(507, "InsufficientStorage"), "free some space"),
    ],
    ids=str,
)
def test_retries_end(open_store: Callable[..., Store], proxy: FaultProxy, fault: Fault, hint: str) -> None:
    store = open_store(retry_s=1.0)
    proxy.inject(fault)
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match=f"write a in {store.url}.*{hint}") as caught:
        store.put("a", b"1")
    assert 1.0 <= time.monotonic() - began < HANG_S
    assert "\n" not in str(caught.value)


def test_nothing_below_retries_on_its_own(open_store: Callable[..., Store], proxy: FaultProxy) -> None:
    store = open_store(retry_s=0.0)
    proxy.inject(Answer(503, "SlowDown"))
    for call in (lambda: store.get("a"), lambda: store.put("a", b""), lambda: store.create("a", b"")):
        proxy.seen.clear()
        with pytest.raises(StoreUnavailable):
            call()
        assert len(proxy.seen) == 1


def test_hanging_read_is_abandoned_and_slow_read_is_not(moto: S3Server, proxy: FaultProxy, tmp_path: Path) -> None:
    options = moto.at(proxy.endpoint).options(read_timeout="1s", timeout=f"{2 * HANG_S:.0f}s")
    store = Store(moto.url(tmp_path.name), retry_s=HANG_S, options=options)
    store.put("a", b"1")
    proxy.inject(Hang(), times=1)
    began = time.monotonic()
    assert store.get("a") == b"1"
    assert time.monotonic() - began < HANG_S


@pytest.mark.parametrize(
    ("answer", "error", "hint"),
    [
        (Answer(403, "AccessDenied"), StoreDenied, "permissions"),
        (Answer(403, "SignatureDoesNotMatch"), StoreDenied, "access key"),
        (Answer(403, "InvalidAccessKeyId"), StoreDenied, "access key"),
        (Answer(400, "ExpiredToken"), StoreDenied, "expired"),
        (Answer(403, "RequestTimeTooSkewed"), StoreDenied, "clock"),
        (Answer(401, "Unauthorized"), StoreDenied, "permissions"),
        (Answer(400, "AuthorizationHeaderMalformed"), StoreUnusable, "region"),
        (Answer(501, "NotImplemented"), StoreUnusable, "lacks"),
        (Answer(400, "EntityTooLarge"), StoreUnusable, "rejects such requests"),
    ],
    ids=str,
)
def test_users_mistake_is_reported_immediately_without_secrets(
    open_store: Callable[..., Store],
    proxy: FaultProxy,
    answer: Answer,
    error: type[StoreError],
    hint: str,
) -> None:
    store = open_store()
    secret = "<Token-0>FwoGZXIvYXdzEJr</Token-0><StringToSign>AWS4-HMAC-SHA256</StringToSign>"
    proxy.inject(Answer(answer.status, answer.code, f"no</Message>{secret}<Message>"))
    for call in (lambda: store.get("a"), lambda: store.put("a", b""), lambda: store.create("a", b"")):
        proxy.seen.clear()
        with pytest.raises(error, match=hint) as caught:
            call()
        assert len(proxy.seen) == 1
        assert caught.value.__cause__ is None
        for word in ("FwoGZXIvYXdzEJr", "AWS4-HMAC", "rig-secret", "\n"):
            assert word not in str(caught.value)


def test_a_large_write_is_one_put_and_never_a_multipart_upload(
    moto: S3Server, proxy: FaultProxy, tmp_path: Path
) -> None:
    store = through(moto.at(proxy.endpoint), tmp_path.name, HANG_S)
    store.put("a", DATA * 2)  # obstore itself would begin a multipart upload from 5 MiB on
    assert proxy.seen == ["PUT"]
    assert "Uploads" not in moto.client().list_multipart_uploads(Bucket=moto.bucket)


def test_store_distinguishes_two_simultaneous_creators(
    open_store: Callable[..., Store], proxy: FaultProxy
) -> None:
    """AWS answers 409 ConditionalRequestConflict until it has decided who won: nobody has lost yet."""
    store = open_store()
    proxy.inject(Answer(409, "ConditionalRequestConflict"), times=1)
    store.create("j/1", b"mine")
    assert store.get("j/1") == b"mine"


def test_slow_is_not_dead(open_store: Callable[..., Store], proxy: FaultProxy) -> None:
    for hang_s in (1.0, 10.0):  # a busy machine may need more than the first for the first byte
        store = open_store(hang_s=hang_s)
        store.put("a", DATA)
        proxy.seen.clear()
        proxy.inject(Slow(int(len(DATA) / (2 * hang_s))))
        began = time.monotonic()
        assert store.get("a") == DATA
        assert time.monotonic() - began > 1.5 * hang_s
        proxy.heal()
        if proxy.seen.count("GET") == 1:
            break
    assert set(proxy.seen) <= {"HEAD", "GET"}
    assert proxy.seen.count("GET") == 1


def test_a_missing_bucket_is_named(moto: S3Server) -> None:
    store = Store("s3://no-such-bucket/run", retry_s=5, options=moto.options())
    calls: list[Callable[[], Any]] = [
        lambda: store.get("a"),
        lambda: store.put("a", b""),
        lambda: store.create("a", b""),
        lambda: store.entries("a"),
        lambda: store.folders("a"),
        lambda: store.delete(["a"]),
    ]
    for call in calls:
        with pytest.raises((StoreUnusable, NotFound), match="create the bucket 'no-such-bucket'"):
            call()


def test_missing_folder_counts_as_outage_and_is_not_recreated(tmp_path: Path) -> None:
    """As one that is no longer mounted: a journal in its place would be another run's, and the first one's is back
    in a minute."""
    folder, elsewhere = tmp_path / "mounted" / "run", tmp_path / "elsewhere"
    store = Store(f"file://{folder}", retry_s=0.0)
    store.create("journal/1", b"first")
    (tmp_path / "mounted").rename(elsewhere)
    writes: list[Callable[[], None]] = [
        lambda: store.create("journal/2", b"second"),
        lambda: store.put("lease.json", b"{}"),
        lambda: store.put_parts("blobs/a", lambda: [b"a"]),
    ]
    for write in writes:
        with pytest.raises(StoreUnavailable, match=f"{folder} no longer exists"):
            write()
    assert not folder.exists()
    elsewhere.rename(tmp_path / "mounted")
    store.create("journal/2", b"second")
    assert [entry.key for entry in store.entries("journal")] == ["journal/1", "journal/2"]


@pytest.mark.parametrize("server_name", ["moto", pytest.param("ceph", id="ceph")])
@pytest.mark.parametrize(
    "fault", [Answer(503, "SlowDown"), CutUpload(1 << 20), LoseAnswer(), CutDownload(1 << 20)], ids=str
)
def test_a_write_and_a_create_make_one_object(
    request: pytest.FixtureRequest, tmp_path: Path, server_name: str, fault: Fault
) -> None:
    """On a real store, too, where it may differ."""
    server: S3Server = request.getfixturevalue(server_name)
    proxy: FaultProxy = request.getfixturevalue("proxy" if server_name == "moto" else "ceph_proxy")
    store = through(server.at(proxy.endpoint), tmp_path.name, HANG_S)
    for call in (lambda: store.put("a/large", DATA), lambda: store.get("a/large")):
        proxy.inject(fault, times=1)
        call()
    assert store.get("a/large") == DATA
    proxy.inject(LoseAnswer(), times=1)
    with pytest.raises(AlreadyExists):
        store.create("j/1", b"mine")
    assert [(entry.key, store.get(entry.key)) for entry in store.entries("j")] == [("j/1", b"mine")]


def test_ceph_reports_full_quota_and_denies_wrong_secret(ceph_users: tuple[S3Server, S3Server]) -> None:
    ceph, full = ceph_users
    with pytest.raises(StoreUnavailable, match=r"QuotaExceeded.*free some space"):
        Store(full.url("run"), retry_s=0.5, options=full.options()).put("a", b"too much")
    with pytest.raises(StoreDenied, match="check the access key") as caught:
        Store(ceph.url("run"), options=replace(ceph, secret_key="a-wrong-secret").options()).get("a")
    assert "a-wrong-secret" not in str(caught.value)
