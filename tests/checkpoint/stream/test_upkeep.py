"""What all checkpoints share is checked while its source is at hand, and damaged chunks are stored again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.errors import NoIntactCheckpoint, NotFound
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import transfer, uploader
from grpo_orch.checkpoint.stream.catalog import Catalog
from grpo_orch.checkpoint.stream.chunks import CHUNK_BYTES
from grpo_orch.checkpoint.stream.spool import Seal, Spool
from grpo_orch.checkpoint.stream.uploader import Upkeep, Uploader
from grpo_orch.policies.model.timelines import Fork, lineage
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.tasks.storing.restoring import restore_newest

SHARED = "base_model/model.safetensors"


class Machine:
    """A trainer's machine with a frozen base model of three chunks, and an uploader for what it saves."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(f"file://{folder}/store")
        self.catalog = Catalog(self.store, "test")
        self.base = folder / "base"
        self.base.write_bytes(os.urandom(2 * CHUNK_BYTES + 100))
        self.spool = Spool(folder / "spool", 1 << 40, 0)
        self.uploader = Uploader(self.store, self.spool, "test", lambda _listed, _seal: (), lambda _at: False)

    def saves(self, step: int) -> None:
        slot = self.spool.claim(step)
        assert slot is not None
        (slot / "model.safetensors").write_bytes(b"weights of %d" % step)
        self.spool.seal(slot, Seal(str(PolicyVersion(0, step)), 1.0, {SHARED: str(self.base)}))
        self.uploader.store_one(*self.spool.sealed()[0])

    def shared(self) -> list[str]:
        """The keys of the base model's chunks, in the order of its bytes."""
        found = transfer.read_manifest(self.store, self.catalog.newest().checkpoints[0])
        return [f"{layout.BLOBS}/{name}" for file in found.files if file.name == SHARED for name in file.chunks]

    def damage(self) -> dict[str, list[str]]:
        """What reading every byte finds, by version; whole checkpoints are left out."""
        listed = self.catalog.newest().checkpoints
        found = {one.version: transfer.verify(self.store, one) for one in listed}
        return {version: lines for version, lines in found.items() if lines}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_lost_base_model_chunk_is_stored_again_for_all(machine: Machine) -> None:
    machine.saves(10)
    machine.saves(20)
    first, second, third = machine.shared()
    machine.store.delete([first])
    machine.store.put(second, b"cut")
    assert set(machine.damage()) == {"0-10", "0-20"}
    machine.saves(30)
    assert machine.damage() == {}
    manifests = [transfer.read_manifest(machine.store, one) for one in machine.catalog.newest().checkpoints]
    shared = frozenset.intersection(*(found.chunks for found in manifests))
    assert {f"{layout.BLOBS}/{name}" for name in shared} == {first, second, third}, "not stored a second time"


def test_wrong_bytes_of_the_right_size_are_found_in_turn(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploader, "CHUNKS_READ", 1)
    machine.saves(10)
    wrong = machine.shared()[1]
    machine.store.put(wrong, bytes(CHUNK_BYTES))
    kept = Upkeep(machine.store, machine.catalog)
    mended = [kept.repair(1.0, {SHARED: str(machine.base)}) for _ in range(3)]
    assert sorted(mended) == [[], [], [wrong.partition("/")[2]]]
    assert machine.damage() == {}


def test_damage_found_by_a_restore_is_repaired_at_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader, "CHUNKS_READ", 0)
    machine.saves(10)
    wrong = machine.shared()[0].partition("/")[2]
    machine.store.put(f"{layout.BLOBS}/{wrong}", bytes(CHUNK_BYTES))
    machine.catalog.suspect(1.0, wrong)
    assert Upkeep(machine.store, machine.catalog).repair(1.0, {SHARED: str(machine.base)}) == [wrong]
    assert machine.damage() == {}
    assert machine.catalog.newest().suspect == []


@pytest.mark.parametrize("now", ["changed", "cut", "gone"])
def test_changed_source_is_not_stored(machine: Machine, now: str) -> None:
    machine.saves(10)
    lost = machine.shared()[0]
    machine.store.delete([lost])
    match now:
        case "changed":
            machine.base.write_bytes(os.urandom(machine.base.stat().st_size))
        case "cut":
            machine.base.write_bytes(b"")
        case _:
            machine.base.unlink()
    assert Upkeep(machine.store, machine.catalog).repair(1.0, {SHARED: str(machine.base)}) == []
    with pytest.raises(NotFound):
        machine.store.get(lost)


def test_all_checkpoints_damaged_is_an_error_and_no_fresh_start(machine: Machine, tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        machine.saves(step)
    machine.store.delete([machine.shared()[1]])
    with pytest.raises(NoIntactCheckpoint) as caught:
        restore_newest(machine.store, lineage((), 0), tmp_path / "restored", None)
    told = str(caught.value)
    lost = machine.shared()[1]
    assert told == (
        f"none of the run's checkpoints can be restored: 0-40, 0-30, 0-20, 0-10: read {lost} in "
        f"{machine.store.url}: no such object; restore the objects from a copy of the store or from "
        "the bucket's older versions and run `grpo-orch resume`; `grpo-orch checkpoints verify` lists the damage"
    )


def test_timeline_with_lost_start_does_not_start_over(machine: Machine, tmp_path: Path) -> None:
    error = "continues from 0-10, and the store has neither it nor an older checkpoint"
    with pytest.raises(NoIntactCheckpoint, match=error):
        restore_newest(machine.store, lineage((Fork(1, "0-10"),), 1), tmp_path / "restored", None)
    assert restore_newest(machine.store, lineage((Fork(1, None),), 1), tmp_path / "restored", None) is None
    assert restore_newest(machine.store, lineage((), 0), tmp_path / "restored", None) is None
