"""Three processes around one store, each to be killed at any moment: one spools, one uploads, one restores.

`python -m tests.rigs.uploader ROLE URL FOLDER`. What a checkpoint holds is a function of its step, so that whoever
reads it knows whether its bytes are right.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import structlog
from blake3 import blake3

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.codec import from_json
from grpo_orch.checkpoint.store.errors import Corrupt, NotFound
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import chunks, uploader
from grpo_orch.checkpoint.stream.catalog import Catalog, Checkpoint, Revision
from grpo_orch.checkpoint.stream.spool import Seal, Spool
from grpo_orch.checkpoint.stream.transfer import read_manifest
from grpo_orch.checkpoint.stream.uploader import Collector, Uploader
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.tasks.storing.restoring import restore_newest
from tests.budget import until

ROLES = ("spool", "upload", "restore")
CHUNK = 64 * 1024
SIZES = {"weights": 7 * CHUNK + 5, "optimizer": 11 * CHUNK, "small": 17}
FROZEN_BYTES = 3 * CHUNK
PACE_S = 0.05  # between two checkpoints: the store would fill with revisions otherwise
KEEP_LAST = 2
WRONG = 3  # exit code: what was restored is not what was saved


def content(name: str, step: int) -> bytes:
    return blake3(f"{name} {step}".encode()).digest(length=SIZES[name])


def spool_checkpoints(folder: Path) -> None:
    """Save and seal one checkpoint after another, and note each in `folder/sealed` after its seal."""
    spool, begun = Spool(folder / "spool", 3 * sum(SIZES.values()), sum(SIZES.values())), folder / "begun"
    frozen = folder / "frozen"
    frozen.write_bytes(blake3(b"frozen").digest(length=FROZEN_BYTES))
    step = int(begun.read_text() or "0") if begun.exists() else 0
    while True:
        step += 1
        part = begun.with_suffix(".part")
        part.write_text(str(step))
        part.replace(begun)  # at once: it may be killed here, and must never make a step again
        while (slot := spool.claim(step)) is None:
            time.sleep(0.01)
        for name in SIZES:
            (slot / name).write_bytes(content(name, step))
        spool.seal(slot, Seal(str(PolicyVersion(0, step)), time.time(), {"base/frozen": str(frozen)}))
        with (folder / "sealed").open("a") as sealed:
            sealed.write(f"{step}\n")
        time.sleep(PACE_S)


def retire(listed: Sequence[Checkpoint], _: Seal | None = None) -> Sequence[PolicyVersion]:
    """All but the newest: stricter than the real retention, so that there is more to collect."""
    return sorted(one.at for one in listed)[:-KEEP_LAST]


def restore_again_and_again(store: Store, folder: Path) -> None:
    """Fetch the newest checkpoint and check its bytes, again and again."""
    catalog, target = Catalog(store, "restorer"), folder / "restored"
    while True:
        any_there = bool(catalog.newest().checkpoints)
        restored = restore_newest(store, (0,), target, None)
        if restored is None:
            if any_there:
                sys.exit("a checkpoint was listed, and none was found")
            time.sleep(0.05)
            continue
        step = restored.at.step
        if any((restored.folder / name).read_bytes() != content(name, step) for name in SIZES):
            print(f"step {step} was restored with wrong bytes")
            sys.exit(WRONG)
        shutil.rmtree(target)


def restore_and_die(store: Store, folder: Path, gets: int) -> None:
    """Fetch the newest checkpoint and be killed before read number `gets` of a chunk; prints the number read."""

    class Mortal(Store):
        read = 0

        def get_buffer(self, key: str) -> memoryview:
            Mortal.read += key.startswith(layout.BLOBS)
            if Mortal.read >= gets:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().get_buffer(key)

    restored = restore_newest(Mortal(store.url), (0,), folder / "restored", None)
    assert restored is not None
    assert all((restored.folder / name).read_bytes() == content(name, restored.at.step) for name in SIZES)
    print(f"read {Mortal.read}")


class Processes:
    """The three processes, with their output in `folder/ROLE.log`."""

    def __init__(self, url: str, folder: Path, env: dict[str, str]) -> None:
        self.url, self.folder = url, folder
        self._env = {**os.environ, **env}
        self._running = {role: self.start(role) for role in ROLES}

    def start(self, role: str, *more: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.rigs.uploader", role, self.url, str(self.folder), *more]
        with (self.folder / f"{role}.log").open("ab") as log:
            return subprocess.Popen(command, env=self._env, stdout=log, stderr=subprocess.STDOUT)

    def kill(self, role: str) -> None:
        """Kill one; it must have been alive."""
        process = self._running.pop(role)
        log = self.folder / f"{role}.log"
        assert process.poll() is None, f"{role} ended with {process.returncode}:\n{log.read_text()[-3000:]}"
        process.kill()
        process.wait()

    def restart(self, role: str) -> None:
        self.kill(role)
        self._running[role] = self.start(role)

    def end(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()


def check_listed(store: Store) -> int:
    """Read every listed checkpoint, all its bytes; how many there were."""
    catalog = Catalog(store, "test")
    listed = catalog.newest().checkpoints
    for one in listed:
        try:
            found = read_manifest(store, one)
            for file in found.files:
                data = b"".join(store.get(f"{found.root}/{chunk}") for chunk in file.chunks)
                wanted = content(file.name, one.at.step) if file.name in SIZES else None
                assert wanted is None or data == wanted, f"{one.version}: {file.name} has wrong bytes"
        except (NotFound, Corrupt):
            assert one not in catalog.newest().checkpoints, f"{one.version} is listed and not whole"
    return len(listed)


def ever_listed(store: Store) -> set[int]:
    """The steps of all checkpoints that any revision lists."""
    revisions = [from_json(store.get(one.key), Revision, one.key) for one in store.entries(layout.CATALOG)]
    assert [one.number for one in revisions] == list(range(1, len(revisions) + 1))
    return {one.at.step for revision in revisions for one in revision.checkpoints}


def check_the_end(store: Store, folder: Path) -> None:
    """With nobody alive but the uploader: all that was sealed has been stored, and nothing else is left."""
    spool = Spool(folder / "spool", 0, 0)
    until("all stored", lambda: not spool.sealed())
    sealed = {int(line) for line in (folder / "sealed").read_text().splitlines()}
    assert len(sealed) > KEEP_LAST
    assert sealed <= ever_listed(store), "a sealed checkpoint never reached the store"


def check_nothing_is_left(store: Store) -> None:
    """With nobody alive."""
    Collector(store, Catalog(store, "test"), retire).collect(time.time() + 2 * uploader.IN_FLIGHT_S)
    listed = Catalog(store, "test").newest().checkpoints
    assert len(listed) == KEEP_LAST
    needed = {one.manifest for one in listed}
    for one in listed:
        needed |= {f"{layout.BLOBS}/{chunk}" for chunk in read_manifest(store, one).chunks}
    assert needed == {one.key for kind in (layout.BLOBS, layout.CHECKPOINTS) for one in store.entries(kind)}


def main(role: str, url: str, folder: Path, *more: str) -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    chunks.CHUNK_BYTES, chunks.TRANSFERS = CHUNK, 6
    uploader.IN_FLIGHT_S = 0.0  # unreferenced objects are collected at once
    match role:
        case "spool":
            spool_checkpoints(folder)
        case "upload":
            store = Store(url)
            Uploader(store, Spool(folder / "spool", 0, 0), "trainer-0-i1", retire, lambda _: False).run()
        case "restore" if more:
            restore_and_die(Store(url), folder, int(more[0]))
        case "restore":
            restore_again_and_again(Store(url), folder)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
