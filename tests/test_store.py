"""The store, on every backend that needs no server: one suite for all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from checkpoint import documents, layout, manifest
from checkpoint.errors import AlreadyExists, Corrupt, NotFound, StoreUnavailable, StoreUnusable
from checkpoint.metrics import Row, append_metrics, read_metrics
from checkpoint.store import Store
from policies.vocabulary import PolicyVersion


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    url = f"file://{tmp_path}/run" if request.param == "file" else f"memory://{tmp_path}"
    return Store(url, patience_s=0.2)


def test_put_replaces_and_create_does_not(store: Store):
    store.put("a/b", b"1")
    store.put("a/b", b"2")
    assert store.get("a/b") == b"2"
    with pytest.raises(AlreadyExists):
        store.create("a/b", b"3")
    assert store.get("a/b") == b"2"


def test_missing_objects(store: Store):
    with pytest.raises(NotFound):
        store.get("nothing")
    assert store.get_or_none("nothing") is None
    store.delete(["nothing"])
    assert store.entries("nowhere") == []


def test_listing_is_in_name_order_and_can_start_behind_a_key(store: Store):
    for name in ("j/3", "j/1", "j/2", "k/1"):
        store.put(name, b"x")
    assert [e.key for e in store.entries("j")] == ["j/1", "j/2", "j/3"]
    assert [e.key for e in store.entries("j", after="j/1")] == ["j/2", "j/3"]
    assert store.entries("j")[0].size_bytes == 1


def test_files_go_up_and_come_back_whole(store: Store, tmp_path: Path):
    data = os.urandom(3_000_000)
    (tmp_path / "big").write_bytes(data)
    store.put_file("x/big", tmp_path / "big")
    store.get_file("x/big", tmp_path / "back" / "big")
    assert (tmp_path / "back" / "big").read_bytes() == data
    with pytest.raises(NotFound):
        store.get_file("x/none", tmp_path / "back" / "none")
    assert sorted(p.name for p in (tmp_path / "back").iterdir()) == ["big"]


@pytest.mark.parametrize("url", ["ftp://x/y", "nonsense", "file:///proc/nowhere/run"])
def test_a_url_that_is_no_store_is_one_clear_error(url: str):
    with pytest.raises(StoreUnusable, match=r"expected a URL|name a folder"):
        Store(url)


def test_a_full_disk_is_retried_for_as_long_as_patience_lasts_and_says_what_to_do():
    full = Store("file:///dev/shm/grpo-orch-test-full", patience_s=0.3)
    calls = []

    def fails() -> None:
        calls.append(1)
        raise OSError(28, "No space left on device")

    with pytest.raises(StoreUnavailable, match="free some space"):
        full._try("write x", fails)
    assert len(calls) >= 2


def folder(path: Path, **files: bytes) -> Path:
    path.mkdir(parents=True)
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path


def test_a_folder_exists_only_with_its_manifest(store: Store, tmp_path: Path):
    version = PolicyVersion(0, 7)
    prefix = layout.checkpoint(version)
    source = folder(tmp_path / "src", one=b"1" * 1000, two=b"2")
    manifest.publish(store, prefix, source, version, 5.0, {"torch": "2"})
    store.put(f"{layout.checkpoint(PolicyVersion(0, 9))}/one", b"cut off before its manifest")
    store.put(f"{layout.CHECKPOINTS}/README", b"a foreign file")
    assert manifest.committed(store, layout.CHECKPOINTS) == [version]
    fetched = manifest.fetch(store, prefix, tmp_path / "dst")
    assert fetched.meta == {"torch": "2"}
    assert fetched.size_bytes == 1001
    assert (tmp_path / "dst" / "one").read_bytes() == b"1" * 1000
    manifest.remove(store, prefix)
    assert manifest.committed(store, layout.CHECKPOINTS) == []


@pytest.mark.parametrize("damage", ["wrong byte", "truncated", "missing"])
def test_damaged_files_are_never_used(store: Store, tmp_path: Path, damage: str):
    version = PolicyVersion(0, 1)
    prefix = layout.policy(version)
    manifest.publish(store, prefix, folder(tmp_path / "src", model=b"weights"), version, 0.0)
    match damage:
        case "wrong byte":
            store.put(f"{prefix}/model", b"weightz")
        case "truncated":
            store.put(f"{prefix}/model", b"weig")
        case "missing":
            store.delete([f"{prefix}/model"])
    with pytest.raises((Corrupt, NotFound)):
        manifest.fetch(store, prefix, tmp_path / "dst")
    assert not (tmp_path / "dst").exists()
    assert sorted(p.name for p in tmp_path.iterdir() if "part" in p.name) == []


def test_a_manifest_cannot_write_outside_its_folder(store: Store, tmp_path: Path):
    evil = manifest.Manifest(1, "0-1", 0.0, [manifest.File("../evil", 1, "00")])
    store.put("p/manifest.json", documents.to_json(evil))
    with pytest.raises(Corrupt, match="leaves its folder"):
        manifest.fetch(store, "p", tmp_path / "dst")


@pytest.mark.parametrize("bad", [b"", b"{", b'{"schema": 99}', b"\xff\xfe"])
def test_unreadable_documents_are_one_clear_line(store: Store, bad: bytes):
    store.put("p/manifest.json", bad)
    with pytest.raises(Corrupt) as caught:
        manifest.load(store, "p")
    assert "\n" not in str(caught.value)
    assert "p/manifest.json" in str(caught.value)


def test_a_newer_schema_says_so(store: Store):
    newer = manifest.Manifest(2, "0-1", 0.0, [])
    store.put("p/manifest.json", documents.to_json(newer))
    with pytest.raises(Corrupt, match="use a newer one"):
        manifest.load(store, "p")


def test_metrics_rows_survive_a_restarted_writer(store: Store):
    for step in range(1, 251):
        append_metrics(store, Row(0, step, float(step), 1, {"reward": step / 10}))
    append_metrics(store, Row(0, 240, 999.0, 2, {"reward": 7.0}))  # run again after a restart
    rows = read_metrics(store, 0)
    assert [r.step for r in rows] == list(range(1, 251))
    assert rows[239] == Row(0, 240, 999.0, 2, {"reward": 7.0}, first_time_s=240.0)
    assert len(store.entries(layout.METRICS)) == 3
