"""What a folder holds after a power cut: whatever was acknowledged is there, whole, and the run goes on.

The disk of these tests keeps only what was synced: a file's bytes at its last fsync, under the names at its
folder's last.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_orch.checkpoint import journal
from grpo_orch.checkpoint.journal import Fenced, Journal
from grpo_orch.checkpoint.records import documents, rollouts
from grpo_orch.checkpoint.records.documents import RunRecord
from grpo_orch.checkpoint.records.rollouts import Rollout
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.errors import Corrupt
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import transfer
from grpo_orch.checkpoint.stream.catalog import Catalog
from grpo_orch.policies.model.events import ControllerTookOver, RunCreated
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.serving.wire import Completion
from tests.stand_ins.world import spec

LARGE = 3 << 20


class Disk:
    """Watches fsync, and copies what a power cut would leave of a folder."""

    def __init__(self, folder: Path) -> None:
        self._root = folder
        folder.mkdir()
        self._bytes: dict[int, bytes] = {}  # of files, by inode
        self._names: dict[int, dict[str, int]] = {}  # of folders, by inode: an inode by name

    def synced(self, handle: int) -> None:
        path, told = Path(os.readlink(f"/proc/self/fd/{handle}")), os.fstat(handle)
        if stat.S_ISDIR(told.st_mode):
            self._names[told.st_ino] = {one.name: one.stat(follow_symlinks=False).st_ino for one in path.iterdir()}
        else:
            self._bytes[told.st_ino] = path.read_bytes()

    def after_a_power_cut(self, target: Path) -> Path:
        self._copy(self._root.stat().st_ino, target)
        return target

    def _copy(self, folder: int, target: Path) -> None:
        target.mkdir()
        for name, inode in self._names.get(folder, {}).items():
            if inode in self._names:
                self._copy(inode, target / name)
            else:
                (target / name).write_bytes(self._bytes.get(inode, b""))


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk, fsync = Disk(tmp_path / "disk"), os.fsync

    def watched(handle: int) -> None:
        fsync(handle)
        disk.synced(handle)

    monkeypatch.setattr(os, "fsync", watched)
    return disk


@pytest.fixture
def store(disk: Disk, tmp_path: Path) -> Store:  # noqa: ARG001  # it is to watch
    return Store(f"file://{tmp_path}/disk/runs/one", options={})


@pytest.fixture
def cut(disk: Disk, tmp_path: Path) -> Callable[[], Store]:
    """Cuts the power and opens the store on what is left."""
    return lambda: Store(f"file://{disk.after_a_power_cut(tmp_path / 'left')}/runs/one", retry_s=0.0)


def test_acknowledged_entries_and_revisions_outlive_a_power_cut(
    store: Store, cut: Callable[[], Store], tmp_path: Path
) -> None:
    documents.create_run(store, RunRecord(documents.SCHEMA, "id", 1.0, spec()))
    writer = Journal(store, "a/1")
    writer.take_over(1.0, "h", 1, "up")
    written = [writer.append(float(number), (RunCreated("r", "id"),)) for number in range(2, 6)]
    weights = os.urandom(LARGE)
    (tmp_path / "weights").write_bytes(weights)
    files = [("model.safetensors", tmp_path / "weights")]
    transfer.upload(store, Catalog(store, "a"), files, PolicyVersion(0, 10), 1.0, {})
    completions = [Completion(0, list(range(10**5)), [0.5] * 10**5, "stop", "0-10", "n") for _ in range(3)]
    rollout = Rollout(rollouts.SCHEMA, "0-10", "0-10", 0, "digest", completions)
    rollouts.write_rollout(store, rollout, (0, 1, 1))
    left = cut()
    assert documents.read_run(left).run_id == "id"
    assert journal.read(left)[1:] == written
    listed = Catalog(left, "b").newest().checkpoints
    assert [one.version for one in listed] == ["0-10"]
    assert transfer.verify(left, listed[0]) == []
    assert rollouts.read_rollout(left, left.entries(layout.ROLLOUTS)[0].key) == rollout


def test_overwritten_document_is_the_old_or_the_new_one(store: Store, cut: Callable[[], Store]) -> None:
    for number in range(3):
        store.put("lease.json", b"%d" % number)
    assert cut().get("lease.json") == b"2"


TORN = [b"", b"\0" * 300, b'{"schema":1,"number":4,"epo']


@pytest.mark.parametrize("left", TORN)
@pytest.mark.parametrize("torn", [1, 3])
def test_torn_entries_are_set_aside_by_the_next_take_over(left: bytes, torn: int) -> None:
    store = Store(f"memory://torn-entries-{torn}-{len(left)}", retry_s=0.0)
    writer = Journal(store, "a/1")
    writer.take_over(1.0, "h", 1, "up")
    for number in range(2, 7):
        writer.append(float(number), (RunCreated(f"r{number}", "id"),))
    for number in range(7 - torn, 7):
        store.put(layout.journal_entry(number), left)
    assert journal.recover(store).state.name == f"r{6 - torn}", "what was lost is lost, and the rest is there"
    successor = Journal(store, "b/2")
    assert successor.take_over(7.0, "h", 2, "resume").name == f"r{6 - torn}"
    assert successor.epoch == 7
    successor.append(8.0, (RunCreated("s", "id"),))
    with pytest.raises(Fenced):
        writer.append(8.0, (RunCreated("r", "id"),))
    told = [event for record in journal.read(store) for event in record.decoded()]
    assert told[-2:] == [ControllerTookOver("h", 2, "resume"), RunCreated("s", "id")]
    assert journal.recover(store).number == 8


def test_torn_entry_that_reappears_stays_set_aside() -> None:
    """For instance from a copy of the store. Whoever has read the run without it must not find another past."""
    store = Store("memory://torn-alive", retry_s=0.0)
    writer = Journal(store, "a/1")
    writer.take_over(1.0, "h", 1, "up")
    key = layout.journal_entry(writer.append(2.0, (RunCreated("lost", "id"),)).number)
    whole = store.get(key)
    store.put(key, b"")
    Journal(store, "b/2").take_over(3.0, "h", 2, "resume")
    store.put(key, whole)
    assert journal.recover(store).state.name == ""


def test_torn_entry_with_successors_is_damage() -> None:
    store = Store("memory://torn-inside", retry_s=0.0)
    writer = Journal(store, "a/1")
    writer.take_over(1.0, "h", 1, "up")
    writer.append(2.0, (RunCreated("r", "id"),))
    writer.append(3.0, (RunCreated("s", "id"),))
    store.put(layout.journal_entry(2), b"")
    with pytest.raises(Corrupt, match=r"journal/000000000002\.json: 0 bytes"):
        journal.recover(store)


def test_newer_versions_entry_is_not_torn() -> None:
    store = Store("memory://torn-newer", retry_s=0.0)
    Journal(store, "a/1").take_over(1.0, "h", 1, "up")
    store.put(layout.journal_entry(1), b'{"schema":2}')
    with pytest.raises(Corrupt):
        journal.recover(store)


@pytest.mark.parametrize("left", TORN)
def test_a_torn_revision_keeps_its_number_and_is_ignored(left: bytes, tmp_path: Path) -> None:
    store = Store(f"memory://torn-revision-{len(left)}", retry_s=0.0)
    (tmp_path / "weights").write_bytes(b"weights")
    files = [("model.safetensors", tmp_path / "weights")]
    known = Catalog(store, "a")
    for step in (10, 20):
        transfer.upload(store, known, files, PolicyVersion(0, step), 1.0, {})
    store.put(layout.catalog_revision(2), left)
    late = Catalog(store, "late")
    assert [one.version for one in late.newest().checkpoints] == ["0-10"]
    transfer.upload(store, Catalog(store, "b"), files, PolicyVersion(0, 30), 1.0, {})
    for catalog in (known, late, Catalog(store, "c")):
        assert [one.version for one in catalog.newest().checkpoints] == ["0-10", "0-30"]
        assert catalog.newest().number == 3
    assert late.condemned_since(0, late.newest()) == set()
