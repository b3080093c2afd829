"""Files as chunks, and folders of them: any size comes back, nothing moves twice, wrong bytes are never used."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from blake3 import blake3

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.codec import to_json
from grpo_orch.checkpoint.store.errors import Corrupt, NotFound
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import chunks, manifest, transfer
from grpo_orch.checkpoint.stream.catalog import Catalog
from grpo_orch.checkpoint.stream.chunks import DamagedChunk, File, send
from grpo_orch.checkpoint.stream.manifest import SCHEMA, Manifest, receive
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.serving.wire import labelled_version
from tests.budget import HANG_S
from tests.stand_ins.catalog_rig import CHUNK, DictStore, fetch

SIZES = {"none": 0, "one": 1, "whole": CHUNK, "more": CHUNK + 1, "many": 5 * CHUNK + 7}


class Wire(DictStore):
    """Counts what is moved; the next `spoil` answers for a chunk are wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.gets: list[str] = []
        self.puts: list[str] = []
        self.spoil: dict[str, int] = {}

    def get_buffer(self, key: str) -> memoryview:
        self.gets.append(key)
        data = bytearray(self.get(key))
        if self.spoil.get(key, 0) > 0:
            self.spoil[key] -= 1
            data[0] ^= 1
        return memoryview(data)

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        self.puts.append(key)
        super().put(key, data)


@pytest.fixture(autouse=True)
def small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", CHUNK)
        yield


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "deep").mkdir(parents=True)
    for number, (name, size_bytes) in enumerate(SIZES.items()):
        (folder / "deep" / name).write_bytes(content(number, size_bytes))
    return folder


def content(number: int, size_bytes: int) -> bytes:
    """Bytes without two equal chunks."""
    return blake3(bytes([number])).digest(length=size_bytes) if size_bytes else b""


def sent(wire: Wire, source: Path) -> list[File]:
    return send(wire, "root", manifest.files_below(source), stored={})


def test_files_of_any_size_come_back(wire: Wire, source: Path, tmp_path: Path) -> None:
    told: list[int] = []
    files = send(wire, "root", manifest.files_below(source), stored={}, progress=told.append)
    assert sum(told) == sum(SIZES.values())
    assert {file.name.partition("/")[2]: (file.size_bytes, len(file.chunks)) for file in files} == {
        "none": (0, 0),
        "one": (1, 1),
        "whole": (CHUNK, 1),
        "more": (CHUNK + 1, 2),
        "many": (5 * CHUNK + 7, 6),
    }
    receive(wire, "root", files, tmp_path / "target", progress=told.append)
    assert sum(told) == 2 * sum(SIZES.values())
    for number, (name, size_bytes) in enumerate(SIZES.items()):
        assert (tmp_path / "target" / "deep" / name).read_bytes() == content(number, size_bytes)
    assert all(chunks.same(file, source / file.name) for file in files)
    assert not chunks.same(files[0], source / files[1].name)


def test_stored_chunks_are_not_sent_again(wire: Wire, source: Path) -> None:
    stored: dict[str, str] = {}
    first = send(wire, "root", manifest.files_below(source), stored=stored, suffix=".1")
    assert len(wire.puts) == 10
    (source / "again").write_bytes((source / "deep" / "more").read_bytes())
    second = send(wire, "root", manifest.files_below(source), stored=stored, suffix=".2")
    assert len(wire.puts) == 10
    assert {chunk for file in second for chunk in file.chunks} == {c for file in first for c in file.chunks}


def test_download_resumes_where_an_earlier_one_ended(wire: Wire, source: Path, tmp_path: Path) -> None:
    files = sent(wire, source)
    target = tmp_path / "target"
    receive(wire, "root", files, target)
    assert len(wire.gets) == 10
    wire.gets.clear()
    data = bytearray((target / "deep" / "many").read_bytes())
    data[2 * CHUNK] ^= 1  # wrong in the third chunk, cut off in the last, and longer than it should be elsewhere
    (target / "deep" / "many").write_bytes(data[:-3])
    (target / "deep" / "more").write_bytes((target / "deep" / "more").read_bytes() + b"longer")
    (target / "deep" / "one").unlink()
    receive(wire, "root", files, target)
    many, one = (next(f for f in files if f.name == f"deep/{name}") for name in ("many", "one"))
    assert sorted(wire.gets) == sorted(f"root/{c}" for c in (many.chunks[2], many.chunks[5], one.chunks[0]))
    assert all(chunks.same(file, target / file.name) for file in files)


def test_bytes_that_were_wrong_on_the_wire_are_read_again(wire: Wire, source: Path, tmp_path: Path) -> None:
    files = sent(wire, source)
    key = f"root/{files[0].chunks[3]}"
    wire.spoil = {key: 2}
    receive(wire, "root", files, tmp_path / "target")
    assert wire.gets.count(key) == 3
    assert all(chunks.same(file, tmp_path / "target" / file.name) for file in files)


@pytest.mark.parametrize("damage", [lambda good: good[:-1], lambda good: good[:-1] + bytes([good[-1] ^ 1])])
def test_a_damaged_chunk_is_named_and_nothing_of_it_is_used(
    wire: Wire, source: Path, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    files = sent(wire, source)
    chunk = files[0].chunks[3]
    wire.objects[f"root/{chunk}"] = damage(wire.objects[f"root/{chunk}"])
    with pytest.raises(DamagedChunk) as caught:
        manifest.materialize(wire, "root", files, tmp_path / "target")
    assert caught.value.chunk == chunk
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    names = [c for file in files for c in file.chunks]
    assert chunks.check(wire, "root", names) == {chunk: str(caught.value)}
    del wire.objects[f"root/{chunk}"]
    assert len(chunks.check(wire, "root", names)) == 1
    with pytest.raises(NotFound):
        manifest.materialize(wire, "root", files, tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_suspect_chunk_is_stored_again_under_another_name(wire: Wire, source: Path) -> None:
    catalog = Catalog(wire, "t")
    files = manifest.files_below(source)
    first = transfer.upload(wire, catalog, files, PolicyVersion(0, 1), 1.0, {})
    damaged = transfer.read_manifest(wire, first).files[0].chunks[0]
    wire.objects[f"{layout.BLOBS}/{damaged}"] = b"damaged"
    assert len(transfer.verify(wire, first)) == 1
    catalog.suspect(2.0, damaged)
    wire.puts.clear()
    second = transfer.upload(wire, catalog, files, PolicyVersion(0, 2), 3.0, {})
    assert [key for key in wire.puts if key.startswith(layout.BLOBS)] == [
        f"{layout.BLOBS}/{chunks.digest_of(damaged)}.2"
    ]
    assert transfer.verify(wire, second) == []


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "a/../../evil", "", ".", "a\0b"])
def test_a_file_cannot_leave_its_folder(wire: Wire, tmp_path: Path, name: str) -> None:
    with pytest.raises(Corrupt, match="is outside the folder"):
        receive(wire, "root", [File(name, 0, "00", [])], tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size_bytes", [-1, 2 * CHUNK + 1, 1 << 62])
def test_a_size_must_fit_its_chunks(wire: Wire, tmp_path: Path, size_bytes: int) -> None:
    with pytest.raises(Corrupt, match=f"{size_bytes} bytes in 2 chunks"):
        receive(wire, "root", [File("a", size_bytes, "00", ["x", "y"])], tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


def test_download_holds_at_most_one_chunk_per_transfer(wire: Wire, source: Path, tmp_path: Path) -> None:
    """Each answer waits until as many chunks are in memory as transfers are allowed."""
    files, peak, full = sent(wire, source), [0], threading.Barrier(2, timeout=HANG_S)
    in_memory, lock = [0], threading.Lock()

    class Crowded(Wire):
        def get_buffer(self, key: str) -> memoryview:
            with lock:
                in_memory[0] += 1
                peak[0] = max(peak[0], in_memory[0])
            full.wait()
            return memoryview(wire.get(key))

    def written(_: int) -> None:
        with lock:
            in_memory[0] -= 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "TRANSFERS", 2)
        receive(Crowded(), "root", files, tmp_path / "target", written)
    assert peak == [2]


# Folders in the store: what was published comes back whole, and what is damaged is never used.

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
