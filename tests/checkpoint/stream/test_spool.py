"""The spool: what is sealed waits for the uploader, whoever is killed when, and memory is reused."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grpo_orch.checkpoint.records.documents import RunRecord
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream.spool import Seal, Spool, UploaderState
from grpo_orch.checkpoint.stream.uploader import Uploader
from grpo_orch.policies.detect.divergence import Detector, Health, Verdict
from grpo_orch.policies.model.node_contract import SPOOL
from grpo_orch.policies.model.spec import CheckpointsSpec
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.serving.joining import Stage
from grpo_orch.policies.tick.snapshot import Trainer
from grpo_orch.tasks.machine.spooling import GIB, SpoolFull, find_spool, make_spool, remove_spool
from grpo_orch.tasks.storing.heartbeat import Heartbeat
from grpo_orch.tasks.storing.saving import CheckpointSaver, wait_until_stored
from tests.stand_ins.world import spec

SIZE = 100_000


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool", budget_bytes=2 * SIZE, slot_bytes=SIZE)


def sealed(step: int) -> Seal:
    return Seal(str(PolicyVersion(0, step)), 1.0)


def save(spool: Spool, step: int, **files: int) -> Path | None:
    """A save as the trainer does it: over what is in the slot; sizes in bytes by name."""
    slot = spool.claim(step)
    if slot is not None:
        for name, size_bytes in (files or {"model": SIZE}).items():
            with (slot / name).open("r+b" if (slot / name).exists() else "wb", buffering=0) as file:
                os.pwrite(file.fileno(), bytes([step]) * size_bytes, 0)
                os.ftruncate(file.fileno(), size_bytes)
        spool.seal(slot, sealed(step))
    return slot


def steps(spool: Spool) -> list[int]:
    return [seal.at.step for seal, _ in spool.sealed()]


def test_second_slot_is_used_and_a_third_does_not_fit(spool: Spool) -> None:
    first, second = save(spool, 5), save(spool, 100)
    assert steps(spool) == [5, 100], "in the order of steps, not of names"
    assert spool.claim(105) is None
    assert first is not None
    inode = (first / "model").stat().st_ino
    spool.release(first)
    third = spool.claim(105)
    assert third is not None
    assert (third.name, third.exists(), first.exists()) == ("checkpoint-105", True, False)
    assert (third / "model").stat().st_ino == inode, "a free slot keeps its memory"
    assert second is not None
    assert (second / "model").read_bytes() == bytes([100]) * SIZE


def test_files_missing_from_a_save_are_not_kept(spool: Spool) -> None:
    """Such as the shards of a checkpoint that had more of them."""
    slot = save(spool, 5, model=10, shard=10, empty=0)
    assert slot is not None
    (slot / "deep").mkdir()
    (slot / "deep" / "old").write_bytes(b"old")
    spool.release(slot)
    again = save(spool, 10, model=10, empty=0, more=3)
    assert again is not None
    assert sorted(path.name for path in again.rglob("*") if path.is_file()) == ["empty", "model", "more"]


class Killed(BaseException):
    """Stands in for SIGKILL: nothing after it runs."""


def killing(number: int, patch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Die before the given call that changes the file system; returns how many there have been."""
    calls = 0

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def before(*args: object, **kwargs: object) -> object:
            nonlocal calls
            calls += 1
            if calls == number:
                raise Killed
            return call(*args, **kwargs)

        return before

    for name in ("rename", "mkdir", "unlink", "replace", "write_bytes"):
        patch.setattr(Path, name, counted(getattr(Path, name)))
    for name in ("utime", "pwrite", "ftruncate"):
        patch.setattr(os, name, counted(getattr(os, name)))
    return lambda: calls


@pytest.mark.parametrize("prepared", [False, True])
def test_killed_trainer_loses_nothing_sealed_and_frees_a_slot(tmp_path: Path, prepared: bool) -> None:
    number = 0
    while True:
        number += 1
        folder = tmp_path / str(number)
        spool = Spool(folder, 3 * SIZE, SIZE)
        if prepared:
            first = save(spool, 1, model=SIZE, shard=5)
            assert first is not None
            spool.release(first)
        with pytest.MonkeyPatch.context() as patch:
            count = killing(number, patch)
            try:
                save(spool, 2, model=SIZE, optimizer=7)
                save(spool, 3, model=SIZE)
            except Killed:
                pass
            over = count() < number
        for seal, slot in spool.sealed():
            assert (slot / "model").read_bytes() == bytes([seal.at.step]) * SIZE
            assert not (slot / "shard").exists()
        after = Spool(folder, 3 * SIZE, SIZE)
        for _, slot in after.sealed():
            after.release(slot)
        assert save(after, 4) is not None
        assert len(list(folder.glob("checkpoint-*/"))) <= 2
        if over:
            break
    assert number > 8, "hardly anything was killed, so this proves little"


def test_slot_released_during_a_look_is_no_error(spool: Spool) -> None:
    """The trainer looks while the uploader, another process, gives slots back."""
    slot, looked = spool.folder / "checkpoint-1", threading.Event()
    slot.mkdir()
    errors: list[Exception] = []

    def look() -> None:
        try:
            for _ in range(3000):
                spool.sealed()
        except Exception as error:  # noqa: BLE001  # shown by the test
            errors.append(error)
        looked.set()

    thread = threading.Thread(target=look)
    thread.start()
    while not looked.is_set():
        spool.seal(slot, sealed(1))
        spool.release(slot)
    thread.join()
    assert errors == []


def test_giving_up_a_slot_lowers_the_budget(spool: Spool) -> None:
    save(spool, 5)
    slot = spool.claim(10)
    assert slot is not None
    assert spool.discard(slot)
    assert not slot.exists()
    assert spool.claim(15) is None
    spool.release(spool.folder / "checkpoint-5")
    only = spool.claim(15)
    assert only is not None
    assert not spool.discard(only), "nothing is left that could make room"


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory, of 1 MiB."""
    folder = tmp_path / "memory"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_the_uploader_frees_a_spool_without_a_byte_of_room(small_memory: Path, tmp_path: Path) -> None:
    spool, store = Spool(small_memory / "spool", GIB, SIZE), Store(f"file://{tmp_path}/store")
    save(spool, 1)
    with pytest.raises(OSError, match="No space left") as caught:
        (small_memory / "filler").write_bytes(b"0" * (2 << 20))
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="No space left"):
        save(spool, 2)
    uploader = Uploader(store, spool, "trainer-0-i1", lambda *_: (), lambda _: False)
    uploader.store_one(*spool.sealed()[0])
    assert steps(spool) == []
    assert save(spool, 3) is not None


def test_a_spool_is_found_again_and_given_back(tmp_path: Path) -> None:
    spec = CheckpointsSpec(spool=str(tmp_path / "fast"), spool_gib=0.001)
    assert find_spool(tmp_path) is None
    (tmp_path / SPOOL).mkdir()  # as transformers does before anybody
    assert find_spool(tmp_path) is None
    made = make_spool(tmp_path, spec, 1000)
    assert made.folder.parent == tmp_path / "fast"
    save(made, 1)
    assert make_spool(tmp_path, spec, 1000).folder == made.folder
    found = find_spool(tmp_path)
    assert found is not None
    assert steps(found) == [1]
    shutil.rmtree(made.folder)  # memory forgets when the machine starts again
    assert find_spool(tmp_path) is None
    again = make_spool(tmp_path, spec, 1000)
    assert (again.folder.exists(), (tmp_path / SPOOL).resolve()) == (True, again.folder)
    remove_spool(tmp_path)
    remove_spool(tmp_path)
    assert (find_spool(tmp_path), made.folder.exists()) == (None, False)
    assert not again.folder.exists()


def test_checkpoint_too_large_for_spool_names_the_key_to_change(tmp_path: Path) -> None:
    with pytest.raises(SpoolFull, match=r"checkpoints\.spool_gib: a checkpoint takes about 1\.00 GiB"):
        make_spool(tmp_path, CheckpointsSpec(spool=str(tmp_path), spool_gib=0.5), GIB)
    with pytest.raises(SpoolFull, match=r"checkpoints\.spool: a checkpoint takes about 1\.00 GiB"):
        make_spool(tmp_path, CheckpointsSpec(spool=str(tmp_path)), GIB, lambda _: GIB)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SpoolFull, match="choose a writable folder"):
        make_spool(tmp_path, CheckpointsSpec(spool=str(tmp_path / "file" / "below")), 1)


def checkpoints_of(spool: Spool, timeline: int, verdict: Verdict) -> CheckpointSaver:
    heartbeat = Heartbeat(Store("memory://unused"), Trainer("trainer-0-i1", 1, timeline, 0, 0, "starting", 0.0))
    record = RunRecord(1, "id", 0.0, spec())
    return CheckpointSaver(
        spool,
        heartbeat,
        record,
        timeline,
        frozen={},
        max_behind_steps=10,
        detector=lambda: Detector(verdict),
    )


def test_upload_progress_is_reported_while_waiting(spool: Spool) -> None:
    save(spool, 4)
    said, happens = (
        list[Stage](),
        iter(
            (
                lambda: spool.report(UploaderState(storing="0-4", total_bytes=100)),
                lambda: spool.report(UploaderState(storing="0-4", done_bytes=40, total_bytes=100)),
                lambda: None,
                lambda: spool.release(spool.sealed()[0][1]),
            )
        ),
    )

    class Told(Heartbeat):
        def update(self, *_: object, stage: Stage | None = None, **__: object) -> None:
            if stage is not None:
                said.append(stage)

        def wait(self, _: float) -> None:
            next(happens)()

    wait_until_stored(spool, Told(Store("memory://unused"), Trainer("trainer-0-i1", 1, 0, 4, 9, "storing", 0.0)))
    assert said == [Stage("storing checkpoint 0-4", done, 100) for done in (0, 40)]


def test_abandoned_timelines_checkpoints_are_not_counted(spool: Spool) -> None:
    checkpoints = checkpoints_of(spool, 1, Verdict())
    checkpoints.start_from(20, logging_steps=1)
    spool.report(UploaderState(stored="0-30"))
    assert checkpoints.stored_step() == 20
    spool.report(UploaderState(stored="1-25"))
    assert checkpoints.stored_step() == 25


@pytest.mark.parametrize(
    ("verdict", "before"),
    [(Verdict(), 60), (Verdict(Health.WATCH, 100, onset_step=93), 93), (Verdict(Health.TRIPPED, 99, 95, 99), 95)],
)
def test_seal_names_the_step_before_which_one_must_stay(spool: Spool, verdict: Verdict, before: int) -> None:
    checkpoints = checkpoints_of(spool, 0, verdict)
    checkpoints.start_from(0, logging_steps=2)
    slot = checkpoints.claim_slot(100, last=False)
    assert slot is not None
    checkpoints.seal(100, slot)
    assert [seal.keep_before_step for seal, _ in spool.sealed()] == [before]
