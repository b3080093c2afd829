"""Folders in the store: what was published comes back whole, and what is damaged is never used."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.codec import to_json
from grpo_orch.checkpoint.store.errors import Corrupt, NotFound
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import manifest
from grpo_orch.checkpoint.stream.manifest import SCHEMA, Manifest
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.serving.wire import labelled_version

VERSION = PolicyVersion(0, 7)
PREFIX = layout.policy(VERSION, (0, 1, 1))


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    url = f"file://{tmp_path}/run" if request.param == "file" else f"memory://{tmp_path}"
    return Store(url, retry_s=0.2)


def folder(path: Path, **files: bytes) -> Path:
    path.mkdir(parents=True)
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path


def fetch(store: Store, prefix: str, target: Path) -> Manifest:
    found = manifest.load(store, prefix)
    manifest.materialize(store, found.root, found.files, target)
    return found


def test_a_folder_exists_only_with_its_manifest(store: Store, tmp_path: Path) -> None:
    source = folder(tmp_path / "src", one=b"1" * 1000, two=b"2", none=b"")
    published = manifest.publish(store, PREFIX, source, VERSION, 5.0, {"torch": "2"})
    cut_off = layout.policy(PolicyVersion(0, 9), (0, 1, 1))
    store.put(f"{cut_off}/one", b"cut off before its manifest")
    with pytest.raises(NotFound):
        fetch(store, cut_off, tmp_path / "none")
    fetched = fetch(store, PREFIX, tmp_path / "dst")
    assert fetched == published
    assert (fetched.meta, fetched.size_bytes) == ({"torch": "2"}, 1001)
    assert (tmp_path / "dst" / "one").read_bytes() == b"1" * 1000
    assert (tmp_path / "dst" / "none").read_bytes() == b""
    manifest.remove(store, PREFIX)
    assert store.entries(PREFIX) == []


@pytest.mark.parametrize("damage", ["wrong byte", "truncated", "missing"])
def test_damaged_files_are_never_used(store: Store, tmp_path: Path, damage: str) -> None:
    published = manifest.publish(store, PREFIX, folder(tmp_path / "src", model=b"weights"), VERSION, 0.0)
    chunk = f"{PREFIX}/{published.files[0].chunks[0]}"
    match damage:
        case "wrong byte":
            store.put(chunk, b"weightz")
        case "truncated":
            store.put(chunk, b"weig")
        case "missing":
            store.delete([chunk])
    with pytest.raises((Corrupt, NotFound)):
        fetch(store, PREFIX, tmp_path / "dst")
    assert not (tmp_path / "dst").exists()
    assert sorted(p.name for p in tmp_path.iterdir() if "part" in p.name) == []


def test_leftovers_of_a_fetch_are_replaced_at_once(store: Store, tmp_path: Path) -> None:
    manifest.publish(store, PREFIX, folder(tmp_path / "src", model=b"weights"), VERSION, 0.0)
    folder(tmp_path / ".dst.part", model=b"older and longer", extra=b"not in this one")
    folder(tmp_path / "dst", model=b"old", stale=b"old")
    fetch(store, PREFIX, tmp_path / "dst")
    assert {path.name: path.read_bytes() for path in (tmp_path / "dst").iterdir()} == {"model": b"weights"}


def test_the_digest_names_the_content(store: Store, tmp_path: Path) -> None:
    first = manifest.publish(store, "a", folder(tmp_path / "1", x=b"x", y=b"y"), VERSION, 0.0)
    same = manifest.publish(
        store, "b", folder(tmp_path / "2", y=b"y", x=b"x"), PolicyVersion(1, 1), 9.0, {"m": "1"}
    )
    swapped = manifest.publish(store, "c", folder(tmp_path / "3", x=b"y", y=b"x"), VERSION, 0.0)
    assert first.digest == same.digest != swapped.digest
    assert len(bytes.fromhex(first.digest)) * 8 >= 128, "nobody may be able to make two policies of one digest"


@pytest.mark.parametrize("label", ["0-12", "0-12@1f2e3d4c5b6a", f"0-12@{'1f' * 16}"])
def test_label_is_read_with_a_digest_of_any_length(label: str) -> None:
    assert labelled_version(label) == PolicyVersion(0, 12)


WHOLE = to_json(Manifest(SCHEMA, "0-1", 0.0, "p", []))
NEWER = to_json(Manifest(SCHEMA + 1, "0-1", 0.0, "p", []))


@pytest.mark.parametrize(
    "bad", [b"", b"{", b'{"schema": 99}', b"\xff\xfe", b"[]", b'{"files": 1}', NEWER, WHOLE[:-1], WHOLE[:30]]
)
def test_unreadable_manifests_are_one_clear_line(store: Store, bad: bytes) -> None:
    store.put("p/manifest.json", bad)
    with pytest.raises(Corrupt) as caught:
        manifest.load(store, "p")
    assert "\n" not in str(caught.value)
    assert "p/manifest.json" in str(caught.value)
    assert ("use a newer one" in str(caught.value)) == (bad == NEWER)
