"""What a user does with checkpoints, by the real command line over a store in a folder."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_orch.checkpoint.records.documents import write_fork
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import transfer
from grpo_orch.checkpoint.stream.catalog import Catalog
from grpo_orch.checkpoint.stream.chunks import CHUNK_BYTES
from grpo_orch.checkpoint.stream.manifest import files_below
from grpo_orch.orchestrator.views.formatting import keep_reasons
from grpo_orch.policies.detect.divergence import Health, Verdict
from grpo_orch.policies.model.spec import CheckpointsSpec
from grpo_orch.policies.model.timelines import Fork
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.tick.snapshot import Trainer
from tests.rigs.command_line import Answer, Cli
from tests.stand_ins.control_plane import Run
from tests.stand_ins.world import spec


class Kept(Run):
    """A run's store in a folder, with real checkpoints."""

    def __init__(self, folder: Path) -> None:
        keeps = replace(spec(), checkpoints=CheckpointsSpec(keep_last=2, keep_every_steps=100))
        super().__init__(folder / "store", keeps)
        self.folder = folder
        self.create()

    def uploads(self, timeline: int, step: int) -> Path:
        """A checkpoint of three files, one of two chunks, one that all checkpoints share. Returns its files."""
        folder = self.folder / f"{timeline}-{step}"
        (folder / "base_model").mkdir(parents=True)
        (folder / "base_model" / "model.safetensors").write_bytes(b"base" * 1000)
        (folder / "model.safetensors").write_bytes(os.urandom(1000))
        (folder / "optimizer.pt").write_bytes(os.urandom(16) * (CHUNK_BYTES // 16) + os.urandom(6))
        version = PolicyVersion(timeline, step)
        transfer.upload(self.store, self.catalog, files_below(folder), version, time.time() - 7200, {})
        return folder

    @property
    def catalog(self) -> Catalog:
        return Catalog(self.store, "test")

    def chunks(self, text: str, name: str) -> list[Path]:
        """Where the store keeps a file of a checkpoint."""
        found = transfer.read_manifest(self.store, self.catalog.newest().find(PolicyVersion.parse(text)))
        file = next(file for file in found.files if file.name == name)
        return [self.folder / "store" / found.root / chunk for chunk in file.chunks]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    monkeypatch.setenv("GRPO_ORCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return Kept(tmp_path)


@pytest.fixture
def cli(run: Kept, grpo_orch: Cli) -> Cli:
    """`grpo-orch checkpoints ...`; without `at`, of the run."""

    def call(*words: str, at: str | None = run.store.url) -> Answer:
        return grpo_orch("checkpoints", *words, *([at] if at else []))

    return call


def read(folder: Path) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, path in files_below(folder)}


def plain(answer: Answer) -> Any:
    assert answer.code in (0, 1)
    return json.loads(answer.out)


def test_ls_lists_checkpoints_with_reasons_to_stay(run: Kept, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s)  # else an age says how long this takes, too
    for timeline, step in ((0, 100), (0, 120), (0, 200), (1, 130), (1, 140)):
        run.uploads(timeline, step)
    write_fork(run.store, Fork(1, "0-110"))
    assert cli("pin", "0-120").out == "0-120 is pinned\n"
    rows = [" ".join(line.split()) for line in cli("ls").out.splitlines()]
    assert rows == [
        "version age size kept as",
        "0-100 2:00 h 16.0 MiB every 100 steps, before a possible divergence, doubling ages",
        "0-120 2:00 h 16.0 MiB pinned",
        "0-200 2:00 h 16.0 MiB –",
        "1-130 2:00 h 16.0 MiB newest 2, recent, doubling ages",
        "1-140 2:00 h 16.0 MiB newest 2, recent, doubling ages",
    ]
    listed = plain(cli("ls", "-o", "json"))
    assert [(one["version"], one["timeline"], one["step"], one["pinned"]) for one in listed] == [
        ("0-100", 0, 100, False),
        ("0-120", 0, 120, True),
        ("0-200", 0, 200, False),
        ("1-130", 1, 130, False),
        ("1-140", 1, 140, False),
    ]
    assert [one["keep_reasons"] for one in listed][1:3] == [["pinned"], []]
    assert {one["size_bytes"] for one in listed} == {4000 + 1000 + CHUNK_BYTES + 6}
    assert {one["created_at_s"] for one in listed} == {now_s - 7200}


def test_every_rule_that_keeps_a_checkpoint_is_named(run: Kept) -> None:
    for step in (100, 200, 250, 500, 600):
        run.uploads(0, step)
    run.uploads(1, 650)
    listed = run.catalog.newest().checkpoints
    keeps = replace(spec(), checkpoints=CheckpointsSpec(keep_last=1, keep_every_steps=200))
    forks = (Fork(1, "0-500", from_step=600),)
    beat = Trainer("trainer-0-i1", 2, 1, 650, 900, "training", 0.0, verdict=Verdict(Health.WATCH, 650, 150))
    assert {str(at): rules for at, rules in keep_reasons(listed, keeps, forks, beat).items()} == {
        "0-100": ("before a possible divergence", "doubling ages"),
        "0-200": ("every 200 steps",),
        "0-250": ("rollback on probation",),
        "0-500": ("doubling ages", "rollback on probation"),
        "0-600": ("abandoned, until probation has passed",),
        "1-650": ("newest 1", "recent", "doubling ages"),
    }
    # What the guard of an older timeline said is not this one's: in calm, what an unnoticed one may need stays.
    kept = keep_reasons(listed, keeps, forks, replace(beat, timeline=0))
    assert "before a possible divergence" in kept[PolicyVersion(0, 500)]


@pytest.mark.parametrize(
    ("word", "meant"), [("0-60", "0-60"), ("1-60", "1-60"), ("60", "1-60"), ("120", "0-120"), ("latest", "1-60")]
)
def test_a_version_a_step_or_the_latest_is_pinned_and_unpinned(word: str, meant: str, run: Kept, cli: Cli) -> None:
    for timeline, step in ((0, 60), (0, 120), (1, 60)):
        run.uploads(timeline, step)
    assert plain(cli("pin", word, "-o", "json"))["version"] == meant
    assert [one.version for one in run.catalog.newest().checkpoints if one.pinned] == [meant]
    assert plain(cli("unpin", word, "-o", "json"))["pinned"] is False
    assert not [one.version for one in run.catalog.newest().checkpoints if one.pinned]


def test_verify_reads_every_byte_and_names_damage(run: Kept, cli: Cli) -> None:
    for step in (50, 100, 150):
        run.uploads(0, step)
    whole = cli("verify")
    assert (whole.code, whole.err) == (0, "")
    assert whole.out.splitlines() == [f"0-{step} is intact, 16.0 MiB" for step in (50, 100, 150)]

    _, second = run.chunks("0-100", "optimizer.pt")
    second.write_bytes(b"second")
    (lost,) = run.chunks("0-150", "model.safetensors")
    lost.unlink()
    broken = cli("verify")
    assert broken.code == 1
    first, *damaged = broken.out.splitlines()
    assert first == "0-50 is intact, 16.0 MiB"
    assert damaged[0].startswith(f"0-100 is damaged: blobs/{second.name}: its digest differs from the manifest's")
    assert damaged[1].startswith("0-150 is damaged: ")
    assert lost.name in damaged[1]
    assert broken.err.splitlines()[-1] == "damaged: 0-100, 0-150"

    told = cli("verify", "latest", "50", "0-50", "-o", "json")
    assert told.code == 1
    assert [(one["version"], len(one["damage"])) for one in plain(told)] == [("0-150", 1), ("0-50", 0)]
    assert cli("verify", "50", "0-50").out == "0-50 is intact, 16.0 MiB\n"


@pytest.mark.parametrize("fault", ["changed", "lost"])
def test_damaged_or_missing_manifest_counts_as_damage(fault: str, run: Kept, cli: Cli) -> None:
    run.uploads(0, 50)
    path = run.folder / "store" / run.catalog.newest().checkpoints[0].manifest
    if fault == "lost":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes().replace(b"optimizer", b"optimiser"))
    answer = cli("verify")
    assert answer.code == 1
    assert answer.out.startswith("0-50 is damaged: ")
    assert path.name in answer.out


def test_exported_checkpoint_equals_the_saved_one(run: Kept, cli: Cli, tmp_path: Path) -> None:
    run.uploads(0, 50)
    saved = run.uploads(0, 100)
    out = tmp_path / "deep" / "out"
    listed = plain(cli("ls", "-o", "json"))[-1]
    del listed["keep_reasons"]
    assert plain(cli("export", "latest", str(out), "-o", "json")) == {**listed, "folder": str(out)}
    assert read(out) == read(saved)
    (tmp_path / "empty").mkdir()
    assert cli("export", "100", "empty").out == f"Wrote 0-100 to {tmp_path}/empty, 16.0 MiB\n"
    assert read(tmp_path / "empty") == read(saved)
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_an_export_that_was_killed_is_taken_up(run: Kept, cli: Cli, tmp_path: Path) -> None:
    saved = run.uploads(0, 50)
    part = tmp_path / ".out.part"
    shutil.copytree(saved, part)
    damaged = bytearray((saved / "optimizer.pt").read_bytes())
    damaged[5] ^= 1  # in its first chunk, where the write was cut
    (part / "optimizer.pt").write_bytes(damaged)
    (run.chunks("0-50", "model.safetensors")[0]).unlink()  # only what is there already can give them
    run.chunks("0-50", "optimizer.pt")[1].unlink()
    assert cli("export", "50", "out").code == 0
    assert read(tmp_path / "out") == read(saved)
    assert not part.exists()


def test_a_damaged_checkpoint_is_not_exported(run: Kept, cli: Cli, tmp_path: Path) -> None:
    run.uploads(0, 50)
    (chunk,) = run.chunks("0-50", "model.safetensors")
    chunk.write_bytes(b"x" * 1000)
    answer = cli("export", "50", "out")
    assert answer.code == 1
    assert "its digest differs from the manifest's" in answer.err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


@pytest.fixture
def retired_meanwhile(run: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run retires all that it has as soon as somebody reads a chunk of it."""
    read_from_store = Store.get_buffer

    def get_buffer(store: Store, key: str) -> memoryview:
        if key.startswith(layout.BLOBS):
            run.catalog.change(time.time(), lambda present: replace(present, checkpoints=[]))
            run.store.delete([entry.key for entry in run.store.entries(layout.BLOBS)])
        return read_from_store(store, key)

    monkeypatch.setattr(Store, "get_buffer", get_buffer)


@pytest.mark.usefixtures("retired_meanwhile")
def test_checkpoint_retired_during_reading_is_not_damaged(run: Kept, cli: Cli, tmp_path: Path) -> None:
    run.uploads(0, 50)
    answer = cli("verify")
    assert (answer.code, answer.out) == (0, "0-50 was retired in the meantime\n")
    run.uploads(0, 100)
    answer = cli("export", "100", "out")
    assert answer.code == 1
    assert answer.line.startswith(
        "0-100 was retired in the meantime; pin a checkpoint before you export it: `grpo-orch"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("pin", "0-70"), "no checkpoint 0-70; available: 0-50"),
        (("unpin", "70"), "no checkpoint 70; available: 0-50"),
        (
            ("pin", "newest"),
            "'newest' is not a checkpoint: expected TIMELINE-STEP as in 0-120, a step,",
        ),
        (("verify", "0-50", "70"), "no checkpoint 70; available: 0-50"),
        (("verify", "newest"), "'newest' and 'file://"),
        (("export", "70", "out"), "no checkpoint 70; available: 0-50"),
        (("export", "50", "used"), "/used is not empty; name a new folder"),
        (("export", "50", "a-file"), "/a-file is a file; name a new folder"),
        (("export", "50", "a-file/below"), "/a-file/below: Not a directory"),
    ],
)
def test_a_users_mistake_is_one_line(
    words: tuple[str, ...], says: str, run: Kept, cli: Cli, tmp_path: Path
) -> None:
    run.uploads(0, 50)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "theirs").write_text("dear")
    (tmp_path / "a-file").write_text("dear")
    before = run.catalog.newest().number
    answer = cli(*words)
    assert (answer.code, says in answer.line) == (2, True), answer
    assert run.catalog.newest().number == before
    assert read(tmp_path / "used") == {"theirs": b"dear"}
    assert not (tmp_path / "out").exists()


def test_a_run_without_a_checkpoint(cli: Cli) -> None:
    assert cli("ls").out == "no checkpoint yet\n"
    assert plain(cli("ls", "-o", "json")) == []
    for words in (("pin", "latest"), ("unpin", "5"), ("verify",), ("verify", "5"), ("export", "5", "out")):
        answer = cli(*words)
        assert (answer.code, answer.line) == (2, "the run has no checkpoint yet"), words
