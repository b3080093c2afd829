"""Files as chunks: any size comes back, nothing is moved twice, and wrong bytes are never used."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from blake3 import blake3

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.errors import Corrupt, NotFound
from grpo_orch.checkpoint.stream import chunks, manifest, transfer
from grpo_orch.checkpoint.stream.catalog import Catalog
from grpo_orch.checkpoint.stream.chunks import DamagedChunk, File, send
from grpo_orch.checkpoint.stream.manifest import receive
from grpo_orch.policies.model.vocabulary import PolicyVersion
from tests.budget import HANG_S
from tests.stand_ins.catalog_rig import CHUNK, DictStore

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


def test_what_is_stored_is_not_sent_again(wire: Wire, source: Path) -> None:
    stored: dict[str, str] = {}
    first = send(wire, "root", manifest.files_below(source), stored=stored, suffix=".1")
    assert len(wire.puts) == 10
    (source / "again").write_bytes((source / "deep" / "more").read_bytes())
    second = send(wire, "root", manifest.files_below(source), stored=stored, suffix=".2")
    assert len(wire.puts) == 10
    assert {chunk for file in second for chunk in file.chunks} == {c for file in first for c in file.chunks}


def test_a_download_goes_on_where_an_earlier_one_ended(wire: Wire, source: Path, tmp_path: Path) -> None:
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


def test_a_damaged_chunk_is_named_and_nothing_of_it_is_used(wire: Wire, source: Path, tmp_path: Path) -> None:
    files = sent(wire, source)
    chunk = files[0].chunks[3]
    wire.objects[f"root/{chunk}"] = wire.objects[f"root/{chunk}"][:-1]
    with pytest.raises(DamagedChunk) as caught:
        manifest.materialize(wire, "root", files, tmp_path / "target")
    assert caught.value.chunk == chunk
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    names = [c for file in files for c in file.chunks]
    assert chunks.check(wire, "root", names) == {chunk: str(caught.value)}
    del wire.objects[f"root/{chunk}"]
    assert len(chunks.check(wire, "root", names)) == 1


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


def test_the_first_error_ends_a_transfer(wire: Wire, source: Path, tmp_path: Path) -> None:
    files = sent(wire, source)
    wire.objects.clear()
    with pytest.raises(NotFound):
        receive(wire, "root", files, tmp_path / "target")


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
