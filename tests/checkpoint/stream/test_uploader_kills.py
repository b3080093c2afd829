"""Processes that spool, upload and restore are killed at random: at any moment all that is listed is whole."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path

import pytest

from grpo_orch.checkpoint.store.run_store import OPTIONS_ENV, Store
from tests.budget import HANG_S, until
from tests.rigs.store.server import S3Server
from tests.rigs.uploader import (
    CHUNK,
    KEEP_LAST,
    ROLES,
    Processes,
    check_listed,
    check_nothing_is_left,
    check_the_end,
    ever_listed,
)

KILLS = 12
PAUSE_MAX_S = 0.8  # a process is at work within half of it
CHUNKS_OF_ONE = 8 + 11 + 1 + 3


def kill_and_look(store: Store, folder: Path, env: dict[str, str], kills: int, seed: int) -> None:
    """Kill one process after another, each time checking all that is listed."""
    print(f"SEED={seed}")
    rng = random.Random(seed)
    processes = Processes(store.url, folder, env)
    seen = 0
    try:
        until("enough checkpoints", lambda: len(ever_listed(store)) > KEEP_LAST)
        for number in range(kills):
            time.sleep(rng.uniform(0.0, PAUSE_MAX_S))
            # Each of them at least once, and the uploader most.
            processes.restart(ROLES[number] if number < len(ROLES) else rng.choice([*ROLES, "upload"]))
            seen += check_listed(store)
        processes.kill("spool")
        processes.kill("restore")
        check_the_end(store, folder)
        processes.kill("upload")
    finally:
        processes.end()
    assert seen >= kills, "hardly anything was there to look at, so this proves little"
    check_listed(store)
    check_nothing_is_left(store)


def test_kills_over_files(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    kill_and_look(Store(f"file://{tmp_path}/store"), tmp_path, {}, KILLS, seed)


@pytest.mark.slow
def test_kills_over_s3_leave_no_upload_behind(tmp_path: Path, moto: S3Server) -> None:
    seed = random.SystemRandom().randrange(10**6)
    store = Store(moto.url(f"kills {seed}"), options=moto.options())
    kill_and_look(store, tmp_path, {OPTIONS_ENV: json.dumps(moto.options())}, KILLS // 2, seed)
    assert moto.client().list_multipart_uploads(Bucket=moto.bucket).get("Uploads", []) == []


def test_a_killed_download_is_taken_up_again(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}/store")
    processes = Processes(store.url, tmp_path, {})
    try:
        until("enough checkpoints", lambda: len(ever_listed(store)) > KEEP_LAST)
        processes.kill("spool")
        processes.kill("restore")
        check_the_end(store, tmp_path)
        processes.kill("upload")
    finally:
        processes.end()
    log = tmp_path / "restore.log"
    log.write_bytes(b"")
    for gets in (9, 9, 10**6):
        processes.start("restore", str(gets)).wait(HANG_S)
    read = re.findall(r"read ([0-9]+)", log.read_text())
    assert len(read) == 1, log.read_text()
    # Of the eight begun before each kill, at most six were still under way.
    assert 0 < int(read[0]) <= CHUNKS_OF_ONE - 2 * (8 - 6), f"of {CHUNKS_OF_ONE} chunks of {CHUNK} bytes"
