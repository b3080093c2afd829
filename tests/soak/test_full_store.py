"""A store that is full for a while, under a whole run: training waits, and nothing is lost."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_orch.checkpoint import journal
from grpo_orch.policies.model.events import JobRestarted
from tests.e2e.test_training import (
    OVERLAPPED,
    undisturbed,  # noqa: F401  # pytest finds it here
)
from tests.e2e.tiny import RUN_TIMEOUT_S, check_healthy, final_weights, finish, reach, step, tiny_run

pytestmark = pytest.mark.soak


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes, mounted for the test."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_store_is_waited_for_and_loses_nothing(
    undisturbed: str,  # noqa: F811
    tiny: Path,
    tmp_path: Path,
    small_disk: Path,
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "store").symlink_to(small_disk)
    run = tiny_run(tmp_path / "run", tiny, replicas=1, **OVERLAPPED)
    filler = small_disk / "filler"
    try:
        run.cli("up", str(run.yaml), "-y", "-d")
        reach(run, 4)
        with filler.open("wb") as out, contextlib.suppress(OSError):
            while True:
                out.write(b"0" * 65536)
                out.flush()
        log = run.machine("trainer-0-i1") / "log"
        run.until("the trainer says why it waits", lambda: "free some space" in log.read_text(), RUN_TIMEOUT_S)
        held_at = step(run)
        filler.unlink()
        reach(run, held_at + 2)
        finish(run)
        check_healthy(run, drift=math.inf)
        events = [event for record in journal.read(run.store) for event in record.decoded()]
        restarts = [event for event in events if isinstance(event, JobRestarted) and event.node == "trainer-0-i1"]
        assert not restarts, "a full disk is no reason to start again"
        assert run.state.epoch == 1, "the daemon lived through it"
        assert final_weights(run) == undisturbed
    finally:
        filler.unlink(missing_ok=True)
        run.end()
