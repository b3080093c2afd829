"""Processes that spool, upload and restore are killed at random: at any moment all that is listed is whole."""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from pathlib import Path

import pytest

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import write_fork
from grpo_orch.checkpoint.store.run_store import OPTIONS_ENV, Store
from grpo_orch.checkpoint.stream.catalog import Checkpoint
from grpo_orch.checkpoint.stream.spool import Seal
from grpo_orch.orchestrator.simulate.simulated_work import retain
from grpo_orch.policies.detect.divergence import Verdict
from grpo_orch.policies.ledger.retention import keep_before, keep_since
from grpo_orch.policies.model.spec import CheckpointsSpec
from grpo_orch.policies.model.timelines import Fork
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.tick.snapshot import Trainer
from grpo_orch.tasks.machine.node_env import NodeEnv
from grpo_orch.tasks.machine.uploader import is_replaced, retention
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
    shutil.rmtree(tmp_path / "restored", ignore_errors=True)  # what the killed restore had of the newest
    log = tmp_path / "restore.log"
    log.write_bytes(b"")
    for gets in (9, 9, 10**6):
        processes.start("restore", str(gets)).wait(HANG_S)
    read = re.findall(r"read ([0-9]+)", log.read_text())
    assert len(read) == 1, log.read_text()
    # Of the eight begun before each kill, at most six were still under way.
    assert 0 < int(read[0]) <= CHUNKS_OF_ONE - 2 * (8 - 6), f"of {CHUNKS_OF_ONE} chunks of {CHUNK} bytes"


# What of a spool still belongs to the run: not what a fork has abandoned, nor what a newer trainer makes again.


@pytest.mark.parametrize(
    ("says", "forks", "beat", "version", "replaced"),
    [
        ("nobody has spoken yet", [], None, "0-30", False),
        ("the present trainer's", [], ("trainer-0-i1", 0), "0-30", False),
        ("of a trainer before it on this machine", [], ("trainer-0-i1", 1), "0-30", False),
        ("of a machine that was replaced", [], ("trainer-0-i2", 0), "0-30", True),
        ("left by a fork, before its trainer has begun", ["0-20"], ("trainer-0-i1", 0), "0-30", True),
        ("left by a fork, on the machine that goes on", ["0-20"], ("trainer-0-i1", 1), "0-30", True),
        ("what a fork began from", ["0-20"], ("trainer-0-i1", 0), "0-20", False),
        ("of the new timeline", ["0-20"], ("trainer-0-i1", 1), "1-30", False),
        ("of the second of three", ["0-20", "1-30"], ("trainer-0-i1", 1), "1-30", False),
        ("of one that the third has left", ["0-20", "0-10"], ("trainer-0-i1", 1), "1-30", True),
        ("of a run that began anew", [None], ("trainer-0-i1", 0), "0-20", True),
    ],
)
def test_replaced_checkpoints_by_forks_and_heartbeat(
    says: str, forks: list[str | None], beat: tuple[str, int] | None, version: str, replaced: bool, tmp_path: Path
) -> None:
    store = Store(f"file://{tmp_path}/store")
    for number, start in enumerate(forks, 1):
        write_fork(store, Fork(number, start))
    if beat is not None:
        node, timeline = beat
        documents.TRAINER.write(store, Trainer(node, 1, timeline, 0, 0, "training", 0.0))
    env = NodeEnv(store.url, "trainer-0-i1", "", 1, 0, str(tmp_path), "127.0.0.1")
    assert is_replaced(store, env, PolicyVersion.parse(version)) == replaced, says


def test_uploader_retires_as_the_simulated_store_does(tmp_path: Path) -> None:
    store, spec = Store(f"file://{tmp_path}/store"), CheckpointsSpec(keep_last=1)
    forks = (Fork(1, "0-300", from_step=330), Fork(2, "1-350", from_step=380))
    retire, numbers = retention(store, spec), [(0, 10, 330), (1, 310, 380), (2, 360, 600)]
    listed: list[PolicyVersion] = []
    for timeline, first, last in numbers:
        for fork in forks[timeline - 1 : timeline] if timeline else ():
            write_fork(store, fork)
        for step in range(first, last + 1, 10):
            at, verdict = PolicyVersion(timeline, step), Verdict(step=step)
            held = [Checkpoint(str(one), "", "", 0.0, 0) for one in sorted({*listed, at})]
            seal = Seal(str(at), 0.0, {}, keep_before(step, verdict, 1), keep_since(step, 1))
            gone = set(retire(held, seal))
            listed = retain(listed, at, verdict, forks[:timeline], spec)
            assert [one.at for one in held if one.at not in gone] == listed
