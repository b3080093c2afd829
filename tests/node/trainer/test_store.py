"""The trainer and a store, or a spool, that does not keep up: real trainer and uploader processes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.stream import transfer
from grpo_orch.checkpoint.stream.catalog import Catalog
from grpo_orch.checkpoint.stream.transfer import read_manifest
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.spec import CheckpointsSpec
from grpo_orch.policies.model.vocabulary import PolicyVersion
from tests.budget import HANG_S
from tests.node.trainer.rig import Rig, open_rig

STEPS = 7
BEHIND = 4
GRPO = {"max_steps": STEPS, "save_steps": 1}


@pytest.fixture(scope="module")
def slot_bytes(tiny: Path) -> int:
    """What a checkpoint takes, about: the weights and two values for each."""
    return 3 * (tiny / "model" / "model.safetensors").stat().st_size


def waits_for_the_store(rig: Rig) -> bool:
    beat = rig.beat()
    return beat is not None and beat.activity == "storing" and beat.step >= BEHIND


def check_the_end(rig: Rig) -> None:
    """The last step is stored, whole, and nothing is left that no checkpoint needs."""
    stored = rig.stored()
    assert stored[-1] == PolicyVersion(0, STEPS)
    listed = Catalog(rig.store, "test").newest().checkpoints
    needed = {f"{layout.BLOBS}/{chunk}" for one in listed for chunk in read_manifest(rig.store, one).chunks}
    assert [line for one in listed for line in transfer.verify(rig.store, one)] == []
    assert needed == {entry.key for entry in rig.store.entries(layout.BLOBS)}
    # Completions that a restart could be given again, and of the sample step 0.
    kept = {0, *range(listed[-CheckpointsSpec().keep_last].at.step, STEPS)}
    rig.until("rid of completions that no restart needs", lambda: stored_completions(rig) == kept)


def stored_completions(rig: Rig) -> set[int]:
    return {layout.call_of(entry.key)[0].step for entry in rig.store.entries(layout.ROLLOUTS)}


def test_behind_a_store_that_stands_still_training_goes_on_and_then_waits(
    tiny: Path, slot_bytes: int, tmp_path: Path
) -> None:
    spec = CheckpointsSpec(spool_gib=1.5 * slot_bytes / (1 << 30), max_behind_steps=BEHIND)
    with open_rig(tmp_path, tiny, grpo=GRPO, checkpoints=spec) as rig:
        rig.uploader.send_signal(signal.SIGSTOP)
        trainer = rig.start_trainer()
        rig.until("told that the store is slow", lambda: bool((beat := rig.beat()) and beat.store_slow))
        rig.until("waiting", lambda: waits_for_the_store(rig))
        beat, log = rig.last_beat(), rig.log().read_text()
        assert (beat.step, beat.store_slow) == (BEHIND, True)
        assert log.count("checkpoint_skipped") == BEHIND - 2, "all but the first and the one it waits with"
        assert Catalog(rig.store, "test").newest().checkpoints == []
        rig.uploader.send_signal(signal.SIGCONT)
        assert rig.wait(trainer) == exit_codes.OK
        assert not rig.last_beat().store_slow
        check_the_end(rig)


def test_uploader_and_trainer_killed_lose_nothing_sealed(tiny: Path, slot_bytes: int, tmp_path: Path) -> None:
    """The uploader in the middle of an upload, the trainer while it waits."""
    spec = CheckpointsSpec(spool_gib=1.5 * slot_bytes / (1 << 30), max_behind_steps=BEHIND)
    with open_rig(tmp_path, tiny, grpo=GRPO, checkpoints=spec) as rig:
        rig.uploader.send_signal(signal.SIGSTOP)
        trainer = rig.start_trainer()
        rig.until("waiting", lambda: waits_for_the_store(rig))
        rig.uploader.send_signal(signal.SIGCONT)
        blobs = tmp_path / "store" / layout.BLOBS
        rig.until("uploading", lambda: blobs.exists() and bool(list(blobs.iterdir())))
        for process in (rig.uploader, trainer):
            process.kill()
            process.wait()
        rig.start_uploader()
        assert rig.stored()[:1] == [PolicyVersion(0, 1)]
        assert rig.wait(rig.start_trainer(attempt=2), attempt=2) == exit_codes.OK
        check_the_end(rig)


@pytest.fixture
def small_memory(tmp_path: Path, slot_bytes: int) -> Iterator[Callable[[float], Path]]:
    """Mounts a file system in memory for so many checkpoints."""
    folder = tmp_path / "memory"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")

    def mount(slots: float) -> Path:
        size = f"size={int(slots * slot_bytes)}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], check=True)
        return folder

    yield mount
    subprocess.run(["umount", folder], check=True)


def test_memory_that_ends_in_mid_save_puts_the_checkpoint_off(
    tiny: Path, tmp_path: Path, small_memory: Callable[[float], Path]
) -> None:
    spec = CheckpointsSpec(spool=str(small_memory(1.6)), spool_gib=1.0, max_behind_steps=BEHIND)
    with open_rig(tmp_path, tiny, grpo=GRPO, checkpoints=spec) as rig:
        rig.uploader.send_signal(signal.SIGSTOP)
        trainer = rig.start_trainer()
        rig.until("waiting", lambda: waits_for_the_store(rig))
        log = rig.log().read_text()
        assert (log.count("spool_full"), log.count("checkpoint_skipped")) == (1, BEHIND - 2)
        rig.uploader.send_signal(signal.SIGCONT)
        assert rig.wait(trainer) == exit_codes.OK
        check_the_end(rig)


def test_without_room_for_one_checkpoint_the_run_ends_with_one_line(
    tiny: Path, tmp_path: Path, small_memory: Callable[[float], Path]
) -> None:
    memory = small_memory(0.7)
    with open_rig(tmp_path, tiny, grpo=GRPO, checkpoints=CheckpointsSpec(spool=str(memory), spool_gib=1.0)) as rig:
        assert rig.start_trainer().wait(HANG_S) == exit_codes.BAD_SPEC
        output = rig.log().read_text()
    assert "Traceback" not in output
    last = output.splitlines()[-1]
    assert last.startswith(f"grpo-orch trainer: checkpoints.spool: {memory}/")
    assert "has no space for a checkpoint; free some space, or set `spool` to another folder" in last


def test_a_run_whose_checkpoints_are_all_damaged_does_not_train_from_the_start(tiny: Path, tmp_path: Path) -> None:
    with open_rig(tmp_path, tiny, grpo=GRPO) as rig:
        (tmp_path / "weights").write_bytes(b"weights")
        files = [("model.safetensors", tmp_path / "weights")]
        stored = transfer.upload(rig.store, Catalog(rig.store, "test"), files, PolicyVersion(0, 5), 1.0, {})
        lost = f"{layout.BLOBS}/{read_manifest(rig.store, stored).files[0].chunks[0]}"
        rig.store.delete([lost])
        assert rig.wait(rig.start_trainer()) == exit_codes.NO_INTACT_CHECKPOINT
        last = rig.log().read_text().splitlines()[-1]
        assert last.startswith(
            f"grpo-orch trainer: none of the run's checkpoints can be restored: 0-5: read {lost}"
        )
        assert rig.gateway.asked == [], "no token was made from the start's weights"
