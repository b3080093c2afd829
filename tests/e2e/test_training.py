"""The main job with real parts: TRL, vLLM servers on CPU, the gateway, and processes that are really killed."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from pathlib import Path

import pytest

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.metrics import REPLAYED, read_metrics
from grpo_orch.checkpoint.stream.catalog import Catalog
from grpo_orch.policies.model.node_contract import NOTICE
from tests.budget import HANG_S
from tests.e2e.harness import Run, kill
from tests.e2e.tiny import (
    RUN_TIMEOUT_S,
    STEPS,
    check_healthy,
    final_weights,
    finish,
    kill_trainer,
    make_tiny,
    reach,
    step,
    tiny_run,
)
from tests.rigs.store.server import S3Server

pytestmark = [pytest.mark.whole, pytest.mark.slow]

LEAVES_IN_S = 4.0
TRAINERS = (
    "grpo_orch.tasks.trainer.main",
    "grpo_orch.tasks.machine.uploader",
    "grpo_orch.orchestrator.gateway",
)  # all on its machine


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def undisturbed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights after a run with one node that nobody disturbs."""
    run = tiny_run(tmp_path_factory.mktemp("one") / "run", tiny, replicas=1)
    try:
        run.cli("up", str(run.yaml), "-y", "-d")
        finish(run)
        report = check_healthy(run)
        assert (report["faults_survived"], report["tokens_regenerated"]) == (0, 0)
        return final_weights(run)
    finally:
        run.end()


def test_every_fault_is_survived_and_changes_no_weight(
    undisturbed: str, tiny: Path, tmp_path: Path, ceph: S3Server
) -> None:
    """On a real S3 store; the undisturbed run was on files."""
    run = tiny_run(tmp_path / "run", tiny, replicas=2, server=ceph)
    try:
        run.cli("up", str(run.yaml), "-y", "-d")
        reach(run, 3)

        kill(run.pids("rollout-0-i1"))  # a whole machine, without a word
        reach(run, step(run) + 2)

        os.kill(run.pid("trainer-0-i1", "grpo_orch.orchestrator.gateway"), signal.SIGKILL)
        reach(run, step(run) + 2)

        before = lasting(run)
        os.kill(run.daemon_pid, signal.SIGKILL)
        reach(run, step(run) + 2)  # training goes on without it
        run.cli("resume", run.url, "-d")
        assert before <= lasting(run), "resume adopts what runs"

        reach(run, 13)
        kill_trainer(run)
        os.kill(run.pid("trainer-0-i1", "grpo_orch.tasks.machine.uploader"), signal.SIGKILL)
        reach(run, 17)

        for node in list(run.state.nodes):  # nobody home
            if node.startswith("rollout"):
                kill(run.pids(node))
        finish(run)

        report = check_healthy(run)
        assert report["faults_survived"] >= 5
        assert sum(row.values.get(REPLAYED, 0) for row in read_metrics(run.store)) >= 1
        assert report["restarts"]["trainer-0"] == 1
        assert final_weights(run) == undisturbed  # of one node: how many there are changes nothing either
        run.cli("plot", run.url, "--out", str(tmp_path / "plot.png"))
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
        assert not ceph.client().list_multipart_uploads(Bucket=ceph.bucket).get("Uploads")
    finally:
        run.end()


def test_neither_a_notice_nor_down_loses_a_step(undisturbed: str, tiny: Path, tmp_path: Path) -> None:
    """No checkpoint is due before the last step: what is gone on from was stored when it was left."""
    run = tiny_run(tmp_path / "run", tiny, replicas=1, save_steps=10 * STEPS)
    try:
        run.cli("up", str(run.yaml), "-y", "-d")
        reach(run, 3)
        give_notice(run, "trainer-0-i1")
        run.until("another machine trains", lambda: trained_by(run) == "trainer-0-i2", RUN_TIMEOUT_S)
        run.until("the other one is gone", lambda: run.pids("trainer-0-i1") == [])
        assert stored(run) == [step_restored(run)], "it goes on from what was stored last"

        reach(run, step(run) + 3)
        said = run.json("down", run.url)
        assert (said["phase"], said["machines"]) == ("stopped", [])
        assert said["step"] == said["stored_step"] == stored(run)[-1]

        run.cli("resume", run.url, "-d")
        finish(run)
        check_healthy(run)
        assert final_weights(run) == undisturbed
    finally:
        run.end()


def give_notice(run: Run, node: str) -> None:
    """A notice of which half will be over in a few seconds: then a trainer leaves that has stored nothing so far.
    The other half is long, for a busy one to store what it has. The daemon hears of it once the trainer has said
    that it leaves: one that is slow to say so would be replaced before."""
    part = run.machine(node) / "part"
    part.write_text(f"{2 * HANG_S}")
    begun_s = time.time() - HANG_S + LEAVES_IN_S
    os.utime(part, (begun_s, begun_s))
    os.kill(run.daemon_pid, signal.SIGSTOP)
    part.rename(run.machine(node) / "work" / NOTICE)
    run.until("it leaves", lambda: (beat := documents.TRAINER.read(run.store)) is not None and beat.leaving)
    os.kill(run.daemon_pid, signal.SIGCONT)


def lasting(run: Run) -> set[int]:
    """The machines' own processes, and those on the trainer's. What starts in a machine, as vLLM does on one that
    replaces another, starts processes that soon end."""
    beside = (run.pids("trainer-0-i1", module) for module in TRAINERS)
    return {*run.own_pids().values(), *itertools.chain(*beside)}


def trained_by(run: Run) -> str | None:
    """The machine whose trainer has begun to train."""
    beat = documents.TRAINER.read(run.store)
    return beat.node if beat is not None and beat.max_steps > 0 else None


def stored(run: Run) -> list[int]:
    return [one.at.step for one in Catalog(run.store, "test").newest().checkpoints]


def step_restored(run: Run) -> int:
    """Where the second machine's trainer went on."""
    log = (run.machine("trainer-0-i2") / "log").read_text()
    (found,) = re.findall(r"training .*from_policy=0-(\d+)", re.sub(r"\x1b\[[0-9;]*m", "", log))
    return int(found)
